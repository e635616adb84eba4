"""Any OpenAI-compatible chat API, which gives words and no token ids: a strong model to imitate or to compare with.

Its rollouts are graded and rewarded like any other. Nothing of them can be trained on by ids, and everything says so:
``EngineFacts.ids``, each record's ``ids``, the row's ``text_only`` and mask, the exporters that need tensors. The
conversations are what supervised fine-tuning takes (``polar export --format sft``).

What is sent is the common ground of such APIs: messages, tools, sampling, nothing of vLLM's. Where an API refuses
``max_tokens`` for ``max_completion_tokens`` (OpenAI's own since 2024), the second is used from then on.
"""

import contextlib
import json
from array import array
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from polar_env.config import EngineConfig
from polar_env.engine import EngineFacts, Session
from polar_env.engine.replicas import PROBE, Accepted, Replicas, addresses, chunks
from polar_env.engine.vllm_wire import Assembly, chat_body
from polar_env.errors import EngineError, EngineRefused
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling

_OURS = ("logprobs", "top_logprobs", "return_token_ids", "return_weight_versions", "session_id")
"""Fields of a vLLM request that an API may refuse as unknown."""

_CHARACTERS_PER_TOKEN = 4
"""What a token of English text and code comes to; ``count_tokens`` has nothing better."""

_PROBE_TOKENS = 64
"""A model that thinks before it speaks needs some."""


class TextEngine:
    """One model behind one or more addresses of an API."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineError when no API is configured."""
        self._config = config
        self._replicas = Replicas(config, addresses(config, "the API's base, such as https://host/v1", _base))
        self._cap = "max_tokens"
        """The API's name for the most tokens it may sample."""

    async def check(self) -> EngineFacts:
        """Prove that every address answers. Raises EngineError with what to change."""
        versions = {await self._try(base) for base in self._replicas.bases}
        notes = (
            "the API gives no token ids and no log-probabilities: rollouts are graded, and masked for training by ids",
            f"the context window is engine.max_model_len ({self._config.max_model_len}); the API does not tell",
        )
        return EngineFacts(
            self._replicas.model, self._config.max_model_len, min(versions), real_tensors=False, notes=notes, ids=False
        )

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        """Deltas as they come, then a reply without ids. Closing it closes the HTTP response."""
        async with contextlib.aclosing(self._sample(self._replicas.order(session), request, sampling)) as parts:
            async for part in parts:
                yield part

    async def count_tokens(self, request: ModelRequest) -> int:
        """An estimate by the length of the request; these APIs count only what they sample."""
        written = json.dumps([request.messages, request.tools], ensure_ascii=False)
        return max(1, len(written) // _CHARACTERS_PER_TOKEN)

    async def aclose(self) -> None:
        """Close every connection; generations still open end with EngineError."""
        await self._replicas.aclose()

    # --- one generation ----------------------------------------------------------------------------------------

    async def _sample(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        model, answer = await self._replicas.served_model(), Assembly()
        async with (
            self._open(order, self._body(request, sampling, model)) as at,
            contextlib.aclosing(chunks(at.response)) as parts,
        ):
            async for chunk in parts:
                for delta in answer.feed(chunk):
                    yield delta
        if not answer.finished:
            raise EngineError(f"{at.base} ended its answer without a finish reason; the API broke off")
        version = self._config.policy_version or f"{model}@{answer.fingerprint or 'unversioned'}"
        nothing = array("i")
        reply = replace(answer.reply(version), prompt_ids=nothing, sampled_ids=nothing, log_probs=array("f"))
        yield replace(reply, versioned=False, ids=False)

    @contextlib.asynccontextmanager
    async def _open(self, order: tuple[str, ...], body: dict[str, Any]) -> AsyncGenerator[Accepted, None]:
        """As ``Replicas.open``; a cap the API has another name for is sent under that name."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                at = await stack.enter_async_context(self._replicas.open(order, _CHAT, body))
            except EngineRefused as refused:
                if self._cap not in body or "max_completion_tokens" not in str(refused):
                    raise
                most, self._cap = body.pop(self._cap), "max_completion_tokens"
                body[self._cap] = most
                at = await stack.enter_async_context(self._replicas.open(order, _CHAT, body))
            yield at

    def _body(self, request: ModelRequest, sampling: Sampling, model: str) -> dict[str, Any]:
        body = chat_body(request, sampling, "", model, self._config.stream)
        body = {name: value for name, value in body.items() if name not in _OURS}
        for message in body["messages"]:
            if thought := message.pop("reasoning", ""):
                message["reasoning_content"] = thought  # as the APIs call it that want their thoughts back (DeepSeek)
        if "max_tokens" in body:
            body[self._cap] = body.pop("max_tokens")
        return body

    async def _try(self, base: str) -> str:
        """The version that one tiny generation names."""
        sampling = Sampling(max_tokens=_PROBE_TOKENS)
        try:
            async with contextlib.aclosing(self._sample((base,), PROBE, sampling)) as parts:
                replies = [part async for part in parts if isinstance(part, EngineReply)]
        except EngineRefused as refused:
            raise EngineError(f"{base} refused a plain question ({refused}); is it a chat API?") from refused
        turn = replies[0].turn
        if not (turn.text or turn.reasoning or turn.tool_calls):
            raise EngineError(f"{base} answered with no words; is {self._replicas.model!r} a chat model?")
        return replies[0].policy_version


_CHAT = "/chat/completions"


def _base(url: str) -> str:
    """The address as given; one without a path gets the usual ``/v1``."""
    bare = url.rstrip("/")
    return bare if urlsplit(bare).path else f"{bare}/v1"

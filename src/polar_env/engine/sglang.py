"""The SGLang engine: chat completions with the exact ids and log-probs of what was sampled.

**It was never run against a server** (SGLang needs a GPU): written from the source of 0.5.23, tested on an endpoint of
that shape. ``check`` proves ids, log-probs and splice on the real server before a rollout starts; read its notes.

- Ids come only without streaming: ``return_token_ids``, ``return_prompt_token_ids`` and ``return_meta_info`` with
  ``stream`` are a 400 (``serving_chat.py``). A choice then has ``prompt_token_ids``, ``response_token_ids`` and
  ``meta_info``: ``output_token_logprobs`` as [log-prob, id, text] and ``weight_version`` ("default" until one is set).
- Sampling that is left out is the model's ``generation_config.json`` (``--sampling-defaults model``), a top_k or a
  repetition penalty among it, so all of it is said.
- ``input_ids`` stand in for the template; the tool parser and the tool choice work as ever. So a continued prompt is
  *spliced* (``engine.splice``) where ``engine.tokenizer`` names a copy of the served model's tokenizer and template:
  the new messages are rendered here, and the check compares that rendering with the server's.
"""

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import EngineFacts, Session, tokenizer
from polar_env.engine.replicas import PROBE, Replicas, addresses, agreed, whole
from polar_env.engine.splice import Splicer, Unspliceable, prove
from polar_env.engine.vllm_wire import Assembly, chat_body, prompt_body
from polar_env.errors import EngineError, EngineRefused
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling

_VLLMS_OWN = ("return_weight_versions", "session_id", "top_logprobs")
_PLAIN_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What "nothing but the model's distribution" is called here."""

_NEVER_SET = "default"
"""SGLang's weight version until a trainer names one."""


class SglangEngine:
    """One or more replicas of one served model."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineError when no server is configured."""
        self._config = config
        self._replicas = Replicas(config, addresses(config, "the SGLang server, such as http://host:30000/v1"))
        self._splicer: Splicer | None = None
        self._take_ids: set[str] = set()
        """Replicas that were proved to take ``input_ids``."""
        self.unspliced: Counter[str] = Counter()
        """Calls that carried on another and were rendered whole all the same, by reason."""

    async def check(self) -> EngineFacts:
        """Prove every replica with tiny generations. Raises EngineError naming the replica and what to change."""
        return agreed([await self._check_replica(base) for base in self._replicas.bases])

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        """The whole turn at once, then the reply. Closing it closes the HTTP response, which aborts the generation."""
        order = self._replicas.order(session)
        deltas, reply = await self._sample(order, request, sampling, await self._ids(order[0], request))
        for delta in deltas:
            yield delta
        yield reply

    async def count_tokens(self, request: ModelRequest) -> int:
        """By ``engine.tokenizer`` when there is one, else by the server's ``POST /tokenize``."""
        if self._config.tokenizer is not None:
            return len(await self._render(request.messages, request.tools))
        body = prompt_body(request, await self._replicas.served_model())
        return int((await self._replicas.tokenized(self._replicas.bases[0], body, "set engine.tokenizer"))["count"])

    async def aclose(self) -> None:
        """Close every connection; generations still open end with EngineError."""
        await self._replicas.aclose()

    # --- one generation ----------------------------------------------------------------------------------------

    async def _ids(self, base: str, request: ModelRequest) -> "array[int] | None":
        """The prompt to send as ids; ``None``: the server renders the messages (counted, when it had to)."""
        if request.continues is None or self._splicer is None or base not in self._take_ids:
            return None
        try:
            return await self._splicer.prompt(request)
        except Unspliceable as reason:
            self.unspliced[str(reason)] += 1
            return None

    async def _sample(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling, ids: "array[int] | None"
    ) -> tuple[list[Delta], EngineReply]:
        model = await self._replicas.served_model()
        body = chat_body(request, sampling, "", model, stream=False)
        body = {name: value for name, value in body.items() if name not in _VLLMS_OWN}
        body = _PLAIN_SAMPLING | body | {"return_prompt_token_ids": True, "return_meta_info": True}
        if ids is not None:
            body["input_ids"] = ids.tolist()
        async with self._replicas.open(order, "/chat/completions", body) as at:
            told = await whole(at)
        answer = Assembly()
        deltas = answer.feed(_as_vllm(told))
        if not answer.finished:
            raise EngineError(f"{at.base} answered without a finish reason; look at the engine's log")
        told_by = [] if set(answer.versions) <= {_NEVER_SET} else answer.versions
        version = "+".join(told_by) or self._config.policy_version
        reply, spliced = answer.reply(version or f"{model}@unversioned"), False
        if ids is not None:
            spliced = reply.prompt_ids == ids
        return deltas, replace(reply, versioned=bool(told_by), spliced=spliced)

    async def _render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> "array[int]":
        """Prompt ids [P] by ``engine.tokenizer``. Raises EngineError."""
        assert self._config.tokenizer is not None
        words = await asyncio.to_thread(tokenizer.load, self._config.tokenizer)
        return await asyncio.to_thread(words.render, messages, tools)

    # --- the start-up proof ------------------------------------------------------------------------------------

    async def _check_replica(self, base: str) -> EngineFacts:
        card = await self._replicas.card(base, self._replicas.model)
        sampling = Sampling(max_tokens=8)
        try:
            _, plain = await self._sample((base,), PROBE, sampling, None)
        except EngineRefused as refused:
            raise EngineError(
                f"{base} refused a plain question ({refused}); is it SGLang 0.5.13 or newer?"
            ) from refused
        if breaches := judge("check", plain):
            told = "; ".join(f"{hole.kind}: {hole.detail}" for hole in breaches)
            raise EngineError(f"{base} does not give what training needs ({told}); is it SGLang 0.5.13 or newer?")
        window = int(card.get("max_model_len") or self._config.max_model_len)
        notes = (await self._check_splice(base, plain), _LOG_PROBS)
        return EngineFacts(str(card["id"]), window, plain.policy_version, real_tensors=True, notes=notes)

    async def _check_splice(self, base: str, plain: EngineReply) -> str:
        """What is to be said about splicing. Raises EngineError when it must work and does not."""
        if self._config.splice == "off":
            return "prompts are rendered whole (engine.splice=off)"
        try:
            await self._prove_splice(base, plain)
        except EngineError as error:
            self._take_ids.discard(base)
            if self._config.splice == "on":
                raise EngineError(f"{base} cannot splice: {error}") from error
            return f"{base} cannot splice, so its prompts are rendered whole ({error})"
        return "a continued prompt begins with the exact ids of the call it carries on (splice)"

    async def _prove_splice(self, base: str, plain: EngineReply) -> None:
        """Raises EngineError: no tokenizer, another template, one that cannot be cut, or a server that ignores ids."""
        if self._config.tokenizer is None:
            raise Unspliceable("set engine.tokenizer to a directory with the served model's tokenizer and template")
        if await self._render(PROBE.messages, ()) != plain.prompt_ids:
            raise Unspliceable("engine.tokenizer renders other ids than the server; copy the served model's own files")
        self._splicer = self._splicer or await prove(self._render)
        odd = plain.prompt_ids + plain.prompt_ids[:1]  # no rendering gives these
        _, reply = await self._sample((base,), PROBE, Sampling(max_tokens=8), odd)
        if not reply.spliced:
            raise Unspliceable("the server does not take input_ids as the prompt")
        self._take_ids.add(base)


def _as_vllm(answer: object) -> object:
    """A whole answer with its tensors where vLLM has them. What is missing stays missing; log-probs that belong to
    other ids than those reported are NaN, which the capture contract refuses."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("choices"), list):
        return cast("object", answer)
    data = cast("Mapping[str, Any]", answer)
    choices = [_choice(cast("Mapping[str, Any]", choice)) for choice in data["choices"] if isinstance(choice, Mapping)]
    return {**data, "choices": choices, "prompt_token_ids": choices[0].get("prompt_token_ids") if choices else None}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    meta: Mapping[str, Any] = choice.get("meta_info") or {}
    ids: list[int] = choice.get("response_token_ids") or []
    pairs: list[Sequence[Any]] = meta.get("output_token_logprobs") or []
    same = [pair[1] for pair in pairs] == ids or len(pairs) != len(ids)
    spans: list[Mapping[str, Any]] = meta.get("weight_versions") or []
    told = [{"version": meta["weight_version"]}] if meta.get("weight_version") else []
    return {
        **choice,
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": pair[0] if same else math.nan} for pair in pairs]},
        "weight_versions": spans or told,
    }


_LOG_PROBS = (
    "log-probs are as the server reports them: sample with temperature 1, top_p 1 and no top_k, where they are the "
    "policy's whatever its settings"
)

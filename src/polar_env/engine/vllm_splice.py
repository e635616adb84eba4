"""Token-in generation on vLLM: a prompt that begins with the exact ids of the call it carries on.

Three requests of a server started with ``--enable-scale-out`` (vLLM 0.32; it answers 403 without):

1. ``POST /v1/chat/completions/render``, on ``splice``'s short stand-in and not on the history: the ids of what is new,
   and the sampling parameters as a chat completion would resolve them (the model's defaults, the caps).
2. ``POST /inference/v1/generate``: ids in; ids, log-probs and weight versions out, streamed.
3. ``POST /v1/chat/completions/derender``: those ids through the server's own reasoning and tool parsers, once, at the
   end. It can be asked chunk by chunk, but carries no parser state and so begins anew with each: measured with a 1,000
   token prompt, 4 ms a chunk over 64 tokens, 17 ms over 512, and growing; all 512 at the end take 20 ms together.
   So a spliced call shows a harness its turn at once when it is done; the proxy's keep-alives cover the wait.

What is asked for is the request's own sampling in all of this; only the length cap is measured on the real prompt. A
server holds calls to a grammar when they may not be parallel (Codex), or always (``--tool-strict-level``). That comes
out of ``render`` too, once more with the request's own tools. A tool choice that forces a call is left to a chat.
"""

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from polar_env.engine import Session
from polar_env.engine.replicas import Accepted, Replicas, chunks
from polar_env.engine.splice import Splicer, Unspliceable, prove
from polar_env.engine.vllm_wire import Assembly, chat_body
from polar_env.errors import EngineError, EngineOverflow
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import ModelRequest, Sampling, WireApi

_NOBODY = ModelRequest(WireApi.CHAT, "", (ChatMessage(role="user", content="Go on."),))
"""Parsers read a request's tools, never its messages: these stand for them."""

_OVERFLOW = (
    "This model's maximum context length is {window} tokens. However, your prompt contains {prompt} input tokens, "
    "which leaves no room for an answer. Please reduce the length of the input prompt."
)
"""As vLLM words it for a chat: the words may reach a harness that looks for them."""
GENERATE = "/inference/v1/generate"
"""Not under /v1."""


@dataclass(frozen=True, slots=True)
class Proved:
    """A replica that takes ids, and what is known of its template."""

    splicer: Splicer
    window: int
    """Tokens of prompt and answer together."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One generation to come: where, the prompt's ids [P], and the bodies of both requests."""

    base: str
    ids: "array[int]"
    body: dict[str, Any]
    """Of ``/inference/v1/generate``."""
    asked: dict[str, Any]
    """The chat completion it stands for, as ``derender`` wants it."""


class _Rendering:
    """``splice.Render`` by a server, which is the first of ``order`` that answers; keeps its last whole answer."""

    def __init__(
        self, replicas: Replicas, order: tuple[str, ...], request: ModelRequest, sampling: Sampling, model: str
    ) -> None:
        self._replicas, self._order, self._model = replicas, order, model
        self._request, self._sampling = replace(request, continues=None), sampling
        self.base = ""
        self.answer: dict[str, Any] = {}

    async def __call__(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> "array[int]":
        request = replace(self._request, messages=tuple(messages), tools=tuple(tools))
        body = chat_body(request, self._sampling, "", self._model, stream=False)
        async with self._replicas.open(self._order, "/chat/completions/render", body) as at:
            self.base, self.answer = at.base, await _object(at)
        ids = self.answer.get("token_ids")
        if not isinstance(ids, list) or not isinstance(self.answer.get("sampling_params"), dict):
            raise EngineError(f"{at.base} rendered no token_ids and sampling_params; is it vLLM 0.32 or newer?")
        return array("i", cast("list[int]", ids))

    async def again(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> None:
        """Once more, by the server that answered: what it resolves is for the ids it rendered."""
        self._order = (self.base,)
        await self(messages, tools)


async def _object(at: Accepted) -> dict[str, Any]:
    async with contextlib.aclosing(chunks(at.response)) as parts:
        async for part in parts:
            if isinstance(part, dict):
                return cast("dict[str, Any]", part)
    raise EngineError(f"{at.base} did not answer with an object; is it a vLLM server?")


class TokenRoute:
    """The replicas that take ids, each proved by itself."""

    def __init__(self, replicas: Replicas, stream: bool) -> None:
        self._replicas = replicas
        self._stream = stream
        self._proved: dict[str, Proved] = {}

    async def prove(self, base: str, model: str, window: int) -> None:
        """Prove that ``base`` renders a template that can be spliced.

        Raises Unspliceable or EngineError with the reason; ids are then never sent to this replica.
        """
        self.forget(base)
        splicer = await prove(_Rendering(self._replicas, (base,), _NOBODY, Sampling(), model))
        self._proved[base] = Proved(splicer, window)

    def forget(self, base: str) -> None:
        """Send no ids to this replica."""
        self._proved.pop(base, None)

    async def plan(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling, session: Session, model: str
    ) -> Plan:
        """What is to be sent, and to which replica.

        Raises:
            Unspliceable: this call is to be rendered whole.
            EngineOverflow: the prompt leaves no room in the window.
        """
        if request.tools and request.tool_choice != "auto":
            raise Unspliceable(f"tool_choice {request.tool_choice!r} is parsed otherwise than an ordinary call")
        rendering = _Rendering(self._replicas, order, request, sampling, model)
        ids = await replace(self._at(order[0]).splicer, render=rendering).prompt(request)
        room = self._at(rendering.base).window - len(ids)  # asked again: the first may have been down
        if room < 1:
            raise EngineOverflow(_OVERFLOW.format(window=room + len(ids), prompt=len(ids)))
        if rendering.answer["sampling_params"].get("structured_outputs"):
            await self._grammar(rendering, request.tools)
        asked = chat_body(replace(request, messages=_NOBODY.messages), sampling, session.session_id, model, False)
        body = generate_body(rendering.answer, ids, room, self._stream)
        return Plan(rendering.base, ids, body, asked | {"return_token_ids": False})

    async def _grammar(self, rendering: _Rendering, tools: Sequence[ToolSpec]) -> None:
        """The grammar was of the stand-in's tool; now of the request's own, from the same replica. Raises
        Unspliceable: a chat may get on without it, or says in the server's words why it cannot."""
        try:
            await rendering.again(_NOBODY.messages, tools)
        except EngineError as error:
            raise Unspliceable(f"the grammar of the tools cannot be rendered: {error}") from error

    def _at(self, base: str) -> Proved:
        found = self._proved.get(base)
        if found is None:
            raise Unspliceable("the session's replica was not proved to take ids")
        return found

    async def said(self, plan: Plan, answer: Assembly) -> dict[str, Any]:
        """The turn behind the sampled ids, as a chunk for ``answer``. Raises EngineError."""
        if not turn_ids(answer):
            return {}
        body = derender_body(plan.asked, plan.ids, answer)
        try:
            found = await self._replicas.ask("POST", f"{plan.base}/chat/completions/derender", body)
        except EngineError as error:
            raise EngineError(f"sampled ids could not be read back as a turn: {error}") from error
        return message_chunk(found, plan.asked)


# --- the wire. Pure ---------------------------------------------------------------------------------------------


def generate_body(rendered: Mapping[str, Any], ids: "array[int]", room: int, stream: bool) -> dict[str, Any]:
    """``POST /inference/v1/generate``: what ``render`` resolved, for another prompt.

    Args:
        room: tokens of the window behind the prompt; the cap that ``render`` resolved was measured on its own, shorter
            one. A null is left out: what is absent is the server's default, and a null need not be.
    """
    params = {name: value for name, value in rendered["sampling_params"].items() if value is not None}
    params |= {"logprobs": 0, "max_tokens": min(params.get("max_tokens", room), room)}
    kept = {name: rendered[name] for name in _KEPT if rendered.get(name) is not None}
    body = kept | {"token_ids": ids.tolist(), "sampling_params": params, "stream": stream}
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


_KEPT = ("model", "cache_salt", "priority", "reasoning_ended", "reasoning_parser_kwargs")


def turn_ids(answer: Assembly) -> "array[int]":
    """The sampled ids [<= S] without the one that ended the turn: a chat completion does not show it to its parsers."""
    return answer.sampled_ids[:-1] if answer.finish == "stop" else answer.sampled_ids


def derender_body(asked: Mapping[str, Any], prompt: "array[int]", answer: Assembly) -> dict[str, Any]:
    """``POST /v1/chat/completions/derender``. The prompt goes along: its last mark says whether a thought is open."""
    choice = {"index": 0, "token_ids": turn_ids(answer).tolist(), "finish_reason": answer.finish}
    generated = {"request_id": "spliced", "prompt_token_ids": prompt.tolist(), "choices": [choice]}
    return {"model": asked["model"], "generate_response": generated, "chat_request": dict(asked)}


def message_chunk(derendered: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The message alone, as a chunk that ``Assembly`` takes, cut as a chat completion would have been: no calls where
    no tools were offered, one where they may not be parallel.

    Raises EngineError.
    """
    try:
        message: dict[str, Any] = dict(derendered["choices"][0]["message"])
        calls: list[Any] = (message.get("tool_calls") or []) if asked.get("tools") else []
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError("derender answered without a message; is it vLLM 0.32 or newer?") from error
    message["tool_calls"] = calls if asked.get("parallel_tool_calls", True) else calls[:1]
    return {"choices": [{"index": 0, "message": message}]}

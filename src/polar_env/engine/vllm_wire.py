"""vLLM's chat completions as data: a request body out, chunks of the answer in. Pure: no sockets.

Facts of vLLM 0.32 (run) and 0.33 (read), `docs: OpenAI-compatible server`: with ``return_token_ids`` the first chunk
carries ``prompt_token_ids`` beside ``choices``; every later one carries ``choices[].token_ids`` and
``logprobs.content``, also when its delta is empty (tokens of tool markup); the end token comes with ``finish_reason``.
"""

import json
import math
import re
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from polar_env.errors import EngineError
from polar_env.messages import ChatMessage
from polar_env.types import AssistantTurn, Delta, EngineReply, ModelRequest, Sampling, StopReason, ToolCall, Usage

OVERFLOW = re.compile(r"maximum (?:context|model|input) length|max_model_len|context length exceeded", re.IGNORECASE)
"""How vLLM words a prompt that does not fit (``renderers/params.py``, ``get_max_tokens``)."""

_STOPS = {
    "stop": StopReason.STOP,
    "tool_calls": StopReason.TOOL_CALLS,
    "function_call": StopReason.TOOL_CALLS,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
}


# --- the request ------------------------------------------------------------------------------------------------


def prompt_body(request: ModelRequest, model: str) -> dict[str, Any]:
    """What decides the prompt: model, messages, tools. Also the body of ``POST /tokenize``."""
    body: dict[str, Any] = {"model": model, "messages": [message_body(message) for message in request.messages]}
    if request.tools:
        body["tools"] = [{"type": "function", "function": dict(tool)} for tool in request.tools]
    return body


def chat_body(request: ModelRequest, sampling: Sampling, session_id: str, model: str, stream: bool) -> dict[str, Any]:
    """The body of ``POST /v1/chat/completions``: the session's sampling, ids and log-probs asked for.

    ``top_logprobs`` is 0 and not null: null yields no log-probs at all. ``return_weight_versions`` (0.33) and
    ``session_id`` (0.32) are ignored by servers that do not know them.
    """
    body = prompt_body(request, model)
    body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_weight_versions": True}
    body |= {"stream": stream, "session_id": session_id}
    if stream:
        body["stream_options"] = {"include_usage": True}
    wanted = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
    }
    body |= {name: value for name, value in wanted.items() if value is not None}
    if request.tools:
        body["tool_choice"] = _tool_choice(request.tool_choice)
        body["parallel_tool_calls"] = request.parallel_tool_calls
    return body


def _tool_choice(choice: str) -> object:
    return choice if choice in ("auto", "none", "required") else {"type": "function", "function": {"name": choice}}


def message_body(message: ChatMessage) -> dict[str, Any]:
    """A message as vLLM takes it: it renders ``reasoning`` (not ``reasoning_content``) and knows no developer."""
    body: dict[str, Any] = dict(message)
    if body["role"] == "developer":
        body["role"] = "system"
    if reasoning := body.pop("reasoning_content", ""):
        body["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        body["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": object_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return body


def object_text(arguments: str) -> str:
    """Arguments as the text of a JSON object. vLLM silently replaces anything else in the history by ``{}``."""
    try:
        if isinstance(json.loads(arguments or "{}"), dict):
            return arguments or "{}"
    except (ValueError, RecursionError):
        pass
    return json.dumps({"arguments": arguments}, ensure_ascii=False)


# --- the answer -------------------------------------------------------------------------------------------------


def error_text(body: object) -> str:
    """The message of an error body, whichever of vLLM's shapes it has."""
    if isinstance(body, Mapping):
        found = cast("Mapping[str, Any]", body)
        inner = found.get("error")
        if isinstance(inner, Mapping):
            return str(cast("Mapping[str, Any]", inner).get("message", inner))
        return str(inner or found.get("message") or found.get("detail") or found)
    return str(body)


@dataclass(slots=True)
class _OpenCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])
    at: int = -1
    """Its place in the turn: calls count as they are named, whatever numbers the engine's parser gives them."""


@dataclass(slots=True)
class Assembly:
    """One answer, put together from its chunks; a whole (non-streamed) answer is one chunk.

    Ids and log-probs are kept exactly as they came. What is missing stays missing: the capture contract judges it.
    """

    prompt_ids: "array[int]" = field(default_factory=lambda: array("i"))
    sampled_ids: "array[int]" = field(default_factory=lambda: array("i"))
    log_probs: "array[float]" = field(default_factory=lambda: array("f"))
    finish: str = ""
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    fingerprint: str = ""
    versions: list[str] = field(default_factory=list[str])
    """Weight versions that sampled this answer, in order, without repeats."""
    _text: list[str] = field(default_factory=list[str])
    _reasoning: list[str] = field(default_factory=list[str])
    _calls: dict[int, _OpenCall] = field(default_factory=dict[int, _OpenCall])
    _named: list[_OpenCall] = field(default_factory=list[_OpenCall])
    _indexes: set[int] = field(default_factory=set[int])
    _answer_id: str = ""

    def feed(self, chunk: object) -> list[Delta]:
        """Take one chunk (or a whole answer) and return what it adds for a reader.

        Raises:
            EngineError: the chunk reports an error, or has not the shape of a chat completion.
        """
        if not isinstance(chunk, Mapping):
            raise EngineError(
                f"the engine sent {type(chunk).__name__} where a completion was due; is it a vLLM server?"
            )
        data = cast("Mapping[str, Any]", chunk)
        if data.get("error"):
            raise EngineError(f"the engine failed while it generated: {error_text(data)}")
        try:
            return self._take(data)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error) as error:
            raise EngineError(f"the engine sent a malformed chunk ({type(error).__name__}: {error})") from error

    def _take(self, data: Mapping[str, Any]) -> list[Delta]:
        self._answer_id = self._answer_id or str(data.get("id") or data.get("request_id") or "")
        self.fingerprint = data.get("system_fingerprint") or self.fingerprint
        self.prompt_ids.frombytes(_int32(data.get("prompt_token_ids") or ()))
        if usage := data.get("usage"):
            self._take_usage(usage)
        deltas: list[Delta] = []
        for choice in data.get("choices") or ():
            self._indexes.add(int(choice.get("index") or 0))
            if not choice.get("index"):
                deltas += self._take_choice(choice)
        return deltas

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        self.usage = Usage(int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0), cached)

    def _take_choice(self, choice: Mapping[str, Any]) -> list[Delta]:
        self.sampled_ids.extend(choice.get("token_ids") or ())
        logprobs: Mapping[str, Any] = choice.get("logprobs") or {}
        self.log_probs.extend(_log_probs(logprobs.get("content") or ()))
        self.finish = choice.get("finish_reason") or self.finish
        for span in choice.get("weight_versions") or ():
            if not self.versions or self.versions[-1] != str(span["version"]):
                self.versions.append(str(span["version"]))
        said: Mapping[str, Any] = choice.get("delta") or choice.get("message") or {}
        return [*self._take_words(said), *self._take_calls(said.get("tool_calls") or ())]

    def _take_words(self, said: Mapping[str, Any]) -> Iterable[Delta]:
        if thought := said.get("reasoning") or said.get("reasoning_content"):
            self._reasoning.append(str(thought))
            yield Delta("reasoning", str(thought))
        if text := said.get("content"):
            self._text.append(str(text))
            yield Delta("text", str(text))

    def _take_calls(self, calls: Iterable[Mapping[str, Any]]) -> Iterable[Delta]:
        for order, piece in enumerate(calls):
            index = int(piece.get("index", order))
            call = self._calls.setdefault(index, _OpenCall())
            call.id = call.id or str(piece.get("id") or "")
            function: Mapping[str, Any] = piece.get("function") or {}
            if not call.name and function.get("name"):
                call.name = str(function["name"])
                call.id = call.id or f"call_{self._answer_id}_{index}"
                call.at = len(self._named)
                self._named.append(call)
                yield Delta("tool_open", index=call.at, id=call.id, name=call.name)
                if call.arguments:
                    yield Delta("tool_args", "".join(call.arguments), index=call.at)
            if arguments := function.get("arguments"):
                call.arguments.append(str(arguments))
                if call.name:
                    yield Delta("tool_args", str(arguments), index=call.at)

    @property
    def finished(self) -> bool:
        """The engine said why it stopped: nothing of the sampled tokens is still to come."""
        return bool(self.finish)

    def reply(self, policy_version: str) -> EngineReply:
        """The answer as the engine reported it. A named tool choice ends with ``stop``; the calls say what it was."""
        calls = tuple(ToolCall(c.id, c.name, "".join(c.arguments)) for c in self._named)
        stop = _STOPS.get(self.finish, StopReason.STOP)
        if calls and stop is StopReason.STOP:
            stop = StopReason.TOOL_CALLS
        turn = AssistantTurn("".join(self._text), calls, stop, self.usage, "".join(self._reasoning))
        return EngineReply(
            turn=turn,
            prompt_ids=self.prompt_ids,
            sampled_ids=self.sampled_ids,
            log_probs=self.log_probs,
            policy_version=policy_version,
            choices=max(1, len(self._indexes)),
            finish=self.finish,
        )


def _int32(ids: Sequence[int]) -> bytes:
    """Ids as an array holds them, in a third of the time an array takes for a long prompt. Raises struct.error."""
    return struct.Struct(f"{len(ids)}i").pack(*ids)


def _log_probs(content: Iterable[Mapping[str, Any]]) -> Iterable[float]:
    """One number per token. A null is NaN: a bad log-prob for the capture contract, never a made-up one."""
    for entry in content:
        value = entry.get("logprob")
        yield math.nan if value is None else float(value)

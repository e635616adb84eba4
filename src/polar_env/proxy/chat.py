"""OpenAI Chat Completions, as Pi, Qwen Code, opencode, mini-swe-agent, OpenHands and Aider speak it.

Source: platform.openai.com, "Chat"; ``reasoning_content`` is the name vLLM and DeepSeek gave to reasoning.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from polar_env.messages import ChatMessage, ChatToolCall, ToolSpec
from polar_env.proxy import render, sse
from polar_env.proxy.render import Kind, Notes, Part, array, obj, text_of
from polar_env.types import AssistantTurn, ModelRequest, Usage, WireApi

_KNOWN = render.words(
    "model messages tools tool_choice parallel_tool_calls stream stream_options n max_tokens"
    " max_completion_tokens temperature top_p top_k user metadata store prompt_cache_key"
    " safety_identifier"
)
_MESSAGE_KEYS = render.words("role content reasoning_content reasoning tool_calls tool_call_id name id cache_control")
_ROUTES = {
    ("POST", "/v1/chat/completions"): "generate",
    ("POST", "/chat/completions"): "generate",
    ("GET", "/v1/models"): "models",
    ("GET", "/models"): "models",
}
_ROLES = ("system", "developer", "user", "tool")


class Chat:
    """Chat Completions as a Dialect."""

    wire = WireApi.CHAT

    def matches(self, method: str, path: str) -> str | None:
        """The operation of a route, whatever its query; ``None`` for a foreign one."""
        return _ROUTES.get((method.upper(), path.partition("?")[0].rstrip("/") or "/"))

    def decode(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
        """The request, canonical. Raises BadRequest when there are no messages or more than one choice is asked for."""
        raw = render.conversation(body, "messages")
        choices = render.number(body.get("n"))
        if choices is not None and choices > 1:
            render.refuse(f"n={choices} asks for several answers to one request; send n=1, once per answer")
        notes = Notes()
        options = obj(body.get("stream_options"))
        messages = [_decode_message(message, notes) for message in raw]
        return ModelRequest(
            wire=self.wire,
            model=text_of(body.get("model")),
            messages=tuple(render.in_call_order(list(_without_stubs(messages, notes)))),
            tools=tuple(_tools(array(body.get("tools")), notes)),
            tool_choice=_tool_choice(body.get("tool_choice")),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            stream=body.get("stream") is True,
            asked=render.sampling(body, "max_completion_tokens", "max_tokens"),
            ignored=notes.unknown(body, _KNOWN),
            include_usage=options.get("include_usage") is True,
        )

    def reply(self, request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
        """A whole completion. ``content`` is null when the model only called tools, as OpenAI sends it."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.tool_calls:
            message["content"] = turn.text or None
            message["tool_calls"] = [render.chat_call(call.id, call.name, call.arguments) for call in turn.tool_calls]
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        finish = render.ending(turn, len(turn.tool_calls))
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return {**_head(request, call_id, "chat.completion"), "choices": [choice], "usage": _usage(turn.usage)}

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> "ChatEncoder":
        """``prompt_tokens`` has no place before the end of this API's stream."""
        return ChatEncoder(request, call_id)

    def error(self, status: int, message: str) -> dict[str, Any]:
        """An error body; type and code follow the status."""
        return render.openai_error(status, message)

    def overflow(self, message: str) -> dict[str, Any]:
        """The words "This model's maximum context length is …": Pi, Qwen Code and opencode compact on them."""
        return render.openai_overflow(message, "", "messages")

    def models(self, names: Iterable[str]) -> dict[str, Any]:
        return render.openai_models(names)

    def token_count(self, count: int) -> dict[str, Any]:
        """This API has no such operation; the shape is vLLM's /tokenize."""
        return {"count": count}


# --- decode -----------------------------------------------------------------------------------------------------


def _decode_message(message: dict[str, Any], notes: Notes) -> ChatMessage:
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and value is not None:
            notes.ignore(f"messages:{key}")
    role = text_of(message.get("role"))
    if role == "assistant":
        return _assistant(message, notes)
    if role not in _ROLES:
        notes.ignore(f"role:{role}")
        role = "user"
    out: ChatMessage = {"role": role, "content": render.content_of(_parts(message.get("content"), notes))}
    if role == "tool":
        out["tool_call_id"] = text_of(message.get("tool_call_id"))
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def _without_stubs(messages: list[ChatMessage], notes: Notes) -> Iterable[ChatMessage]:
    """Leave out an assistant's message of nothing right before the next of its messages.

    That is what opencode 1.18 keeps of an answer whose stream broke, before the answer it got when it asked again
    (measured): no model said it.
    """
    for message, after in itertools.zip_longest(messages, messages[1:]):
        if message == render.assistant_message("") and after is not None and after["role"] == "assistant":
            notes.ignore("messages:nothing")
        else:
            yield message


def _assistant(message: dict[str, Any], notes: Notes) -> ChatMessage:
    text: list[str] = []
    for part in _parts(message.get("content"), notes):
        if part.get("type") == "text":
            text.append(text_of(part.get("text")))
        elif part.get("type") == "refusal":
            text.append(text_of(part.get("refusal")))
        else:
            notes.ignore(f"content:{text_of(part.get('type'))}")
    reasoning = text_of(message.get("reasoning_content")) or text_of(message.get("reasoning"))
    calls = [_call(obj(call)) for call in array(message.get("tool_calls"))]
    return render.assistant_message("".join(text), calls, reasoning)


def _call(call: dict[str, Any]) -> ChatToolCall:
    function = obj(call.get("function"))
    return render.chat_call(text_of(call.get("id")), text_of(function.get("name")), function.get("arguments"))


def _parts(value: object, notes: Notes) -> list[Part]:
    """Parts without their cache markers. Types we do not know stay: engines take audio and video we need not name."""
    return render.parts_of(value, lambda part: _part(part, notes))


def _part(value: object, notes: Notes) -> Part | None:
    part = obj(value)
    kind = text_of(part.get("type"))
    if isinstance(value, str):
        return render.text_part(value)
    if isinstance(part.get("text"), str):
        return render.text_part(part["text"])
    if kind in ("", "text"):
        notes.ignore(f"content:{kind}")
        return None
    return {key: field for key, field in part.items() if key != "cache_control"}


def _tools(raw: list[Any], notes: Notes) -> Iterable[ToolSpec]:
    for tool in map(obj, raw):
        function = obj(tool.get("function"))
        if not isinstance(function.get("name"), str):
            notes.ignore(f"tools:{text_of(tool.get('type'))}")
            continue
        parameters = obj(function.get("parameters")) or {"type": "object", "properties": {}}
        spec: ToolSpec = {"name": function["name"], "parameters": parameters}
        if isinstance(function.get("description"), str):
            spec["description"] = function["description"]
        yield spec


def _tool_choice(value: object) -> str:
    if isinstance(value, str):
        return value if value in ("auto", "none", "required") else "auto"
    choice = obj(value)
    named = text_of(obj(choice.get("function")).get("name"))
    allowed = obj(choice.get("allowed_tools"))
    return named or ("required" if allowed.get("mode") == "required" else "auto")


# --- encode -----------------------------------------------------------------------------------------------------


def _head(request: ModelRequest, call_id: str, kind: str) -> dict[str, Any]:
    """``created`` is 0: a reply is a function of its turn alone, so a replayed one is the same bytes."""
    return {"id": f"chatcmpl-{call_id}", "object": kind, "created": 0, "model": request.model}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": render.cached(usage)},
    }


class ChatEncoder(render.TurnWriter):
    """One streamed completion as ``chat.completion.chunk`` events and ``[DONE]``."""

    def __init__(self, request: ModelRequest, call_id: str) -> None:
        super().__init__()
        self._request = request
        self._base = _head(request, call_id, "chat.completion.chunk")
        self._held = ""

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: a choice, as some clients index it, with an empty delta, as finish chunks have."""
        return self._chunk({})

    def open_block(self, kind: Kind) -> bytes:
        if kind != "call":
            return b""
        call = self.calls[-1]
        function = {"name": call.name, "arguments": ""}
        return self._call({"id": call.id, "type": "function", "function": function})

    def block_text(self, kind: Kind, text: str) -> bytes:
        """Of a call, all but the last sign: opencode's library runs a tool as soon as its arguments parse."""
        if kind != "call":
            return self._chunk({"content" if kind == "text" else "reasoning_content": text})
        text = self._held + text
        cut = max(0, len(text.rstrip()) - 1)
        self._held = text[cut:]
        return self._arguments(text[:cut])

    def close_block(self, kind: Kind, text: str) -> bytes:
        held, self._held = self._held, ""
        return self._arguments(held)

    def end(self, turn: AssistantTurn) -> bytes:
        out = self._chunk({}, render.ending(turn, len(self.calls)))
        if self._request.include_usage:
            out += sse.encode({**self._base, "choices": [], "usage": _usage(turn.usage)})
        return out + sse.encode_text("[DONE]")

    def _arguments(self, text: str) -> bytes:
        return self._call({"function": {"arguments": text}}) if text else b""

    def _call(self, fields: dict[str, Any]) -> bytes:
        return self._chunk({"tool_calls": [{"index": len(self.calls) - 1, **fields}]})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse.encode({**self._base, "choices": [choice]})

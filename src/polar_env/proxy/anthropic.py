"""Anthropic Messages (and count_tokens), as Claude Code, Pi, Qwen Code and opencode speak it.

Source: docs.anthropic.com, "Messages", "Streaming messages", "Errors"; echoes as measured (design: harnesses).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from polar_env.messages import ChatMessage, ChatToolCall, ToolSpec
from polar_env.proxy import render, sse
from polar_env.proxy.render import Kind, Notes, Part, array, obj, text_of
from polar_env.types import AssistantTurn, ModelRequest, ToolCall, Usage, WireApi

_KNOWN = render.words(
    "model messages system tools tool_choice stream max_tokens temperature top_p top_k metadata cache_control"
)
_ROUTES = {
    ("POST", "/v1/messages"): "generate",
    ("POST", "/messages"): "generate",
    ("POST", "/v1/messages/count_tokens"): "count_tokens",
    ("POST", "/messages/count_tokens"): "count_tokens",
    ("GET", "/v1/models"): "models",
    ("GET", "/models"): "models",
    ("HEAD", "/"): "health",
    ("GET", "/"): "health",
    ("HEAD", "/api/hello"): "health",
    ("GET", "/api/hello"): "health",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_UNPARSED = "__unparsedToolInput"
"""Key under which Claude Code 2.1.332 keeps arguments that are not JSON: {"raw": text, "len": characters}."""


class Anthropic:
    """The Messages API as a Dialect."""

    wire = WireApi.ANTHROPIC

    def matches(self, method: str, path: str) -> str | None:
        """The operation of a route, whatever its query; ``None`` for a foreign one."""
        return _ROUTES.get((method.upper(), path.partition("?")[0].rstrip("/") or "/"))

    def decode(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
        """The request in Chat form. Raises BadRequest when there are no messages."""
        raw = render.conversation(body, "messages")
        notes = Notes()
        messages = _system(body.get("system"), notes)
        for message in raw:
            messages += _decode_message(message, notes)
        choice = obj(body.get("tool_choice"))
        kind = text_of(choice.get("type"))
        return ModelRequest(
            wire=self.wire,
            model=text_of(body.get("model")),
            # Claude Code sends results in order of completion.
            messages=tuple(render.in_call_order(messages)),
            tools=tuple(_tools(array(body.get("tools")), notes)),
            tool_choice=text_of(choice.get("name")) if kind == "tool" else _CHOICES.get(kind, "auto"),
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            stream=body.get("stream") is True,
            asked=render.sampling(body, "max_tokens"),
            ignored=notes.unknown(body, _KNOWN),
        )

    def reply(self, request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
        """A whole message. Arguments that are no JSON object go out the way Claude Code itself keeps such ones."""
        content: list[Part] = []
        if turn.reasoning:
            content.append(_thinking(turn.reasoning))
        if turn.text:
            content.append(render.text_part(turn.text))
        content += [_tool_use(call) for call in turn.tool_calls]
        stop = _STOPS[render.ending(turn, len(turn.tool_calls))]
        return _message(request, call_id, content, stop, _usage(turn.usage))

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> "AnthropicEncoder":
        """``prompt_tokens`` (0: not known yet) is the first word on usage; ``message_delta`` has the last."""
        return AnthropicEncoder(request, call_id, prompt_tokens)

    def error(self, status: int, message: str) -> dict[str, Any]:
        """An error body; the type follows the status."""
        kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def overflow(self, message: str) -> dict[str, Any]:
        """ "prompt is too long: N tokens > M maximum": the words that make Claude Code compact."""
        sizes = render.context_sizes(message)
        words = message if sizes is None else f"{sizes[0]} tokens > {sizes[1]} maximum"
        return self.error(400, f"prompt is too long: {words}")

    def models(self, names: Iterable[str]) -> dict[str, Any]:
        """One page with every model, readable as OpenAI's list too: the path is theirs as well."""
        both = {"type": "model", "object": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z"}
        data = [{**both, "id": name, "display_name": name, "owned_by": "polar"} for name in names]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return {"object": "list", "data": data, "has_more": False, **ends}

    def token_count(self, count: int) -> dict[str, Any]:
        return {"input_tokens": count}


# --- decode -----------------------------------------------------------------------------------------------------


def _system(value: object, notes: Notes) -> list[ChatMessage]:
    content = render.content_of(_parts(value, notes))
    return [{"role": "system", "content": content}] if content else []


def _decode_message(message: dict[str, Any], notes: Notes) -> list[ChatMessage]:
    role = text_of(message.get("role"))
    if role == "assistant":
        return [_assistant(message.get("content"), notes)]
    if role not in ("user", "system"):
        notes.ignore(f"role:{role}")
    return _user(message.get("content"), notes, system=role == "system")


def _user(value: object, notes: Notes, *, system: bool) -> list[ChatMessage]:
    """Tool results in the order received, then what the user added."""
    blocks = array(value)
    results = [block for block in blocks if obj(block).get("type") == "tool_result"]
    out: list[ChatMessage] = [_tool_result(block, notes) for block in results]
    rest = [block for block in blocks if obj(block).get("type") != "tool_result"] if blocks else value
    parts = _parts(rest, notes)
    if parts or not results:
        out.append({"role": "system" if system else "user", "content": render.content_of(parts)})
    return out


def _tool_result(block: dict[str, Any], notes: Notes) -> ChatMessage:
    """Chat has no error flag; tools say in words that they failed. Only a silent failure needs a word of ours."""
    content = render.content_of(_parts(block.get("content"), notes))
    if not content and block.get("is_error") is True:
        content = "Error"
    return {"role": "tool", "tool_call_id": text_of(block.get("tool_use_id")), "content": content}


def _assistant(value: object, notes: Notes) -> ChatMessage:
    if isinstance(value, str):
        return render.assistant_message(value)
    reasoning: list[str] = []
    text: list[str] = []
    calls: list[ChatToolCall] = []
    for block in map(obj, array(value)):
        kind = block.get("type")
        if kind == "thinking":
            reasoning.append(render.unseal(block.get("signature"), text_of(block.get("thinking"))))
        elif kind == "tool_use":
            calls.append(render.chat_call(text_of(block.get("id")), text_of(block.get("name")), _arguments(block)))
        elif kind == "redacted_thinking":
            reasoning.append(_redacted(block, notes))
        else:
            text += [part["text"] for part in _parts([block], notes) if part["type"] == "text"]
    return render.assistant_message("".join(text), calls, "".join(reasoning))


def _redacted(block: dict[str, Any], notes: Notes) -> str:
    ours = render.unseal(block.get("data"), "")
    if not ours:
        notes.ignore("content:redacted_thinking")
    return ours


def _arguments(block: dict[str, Any]) -> object:
    given = block.get("input")
    raw = obj(obj(given).get(_UNPARSED)).get("raw")
    return raw if isinstance(raw, str) and len(obj(given)) == 1 else given


def _parts(value: object, notes: Notes) -> list[Part]:
    return render.parts_of(value, lambda block: _part(block, notes))


def _part(value: object, notes: Notes) -> Part | None:
    block = obj(value)
    kind = text_of(block.get("type"))
    if isinstance(value, str):
        return render.text_part(value)
    if isinstance(block.get("text"), str):
        return render.text_part(block["text"])
    if kind == "tool_reference":
        notes.referenced.add(text_of(block.get("tool_name")))
        return render.text_part(f"Tool loaded: {text_of(block.get('tool_name'))}")
    source = obj(block.get("source"))
    if kind == "image" and source.get("type") in ("base64", "url"):
        return render.image_part(_image_url(source))
    if kind == "document" and isinstance(source.get("data"), str) and source.get("type") == "text":
        return render.text_part(source["data"])
    notes.ignore(f"content:{kind}")
    return None


def _image_url(source: dict[str, Any]) -> str:
    if source.get("type") == "url":
        return text_of(source.get("url"))
    return f"data:{text_of(source.get('media_type'))};base64,{text_of(source.get('data'))}"


def _tools(raw: list[Any], notes: Notes) -> Iterable[ToolSpec]:
    """Tools with a schema. Hosted ones cannot run here; deferred ones show once a tool_reference has loaded them."""
    for tool in map(obj, raw):
        name = text_of(tool.get("name"))
        if not isinstance(tool.get("input_schema"), dict):
            notes.ignore(f"tools:{text_of(tool.get('type')) or name}")
        elif tool.get("defer_loading") is True and name not in notes.referenced:
            notes.ignore(f"tools:deferred:{name}")
        else:
            spec: ToolSpec = {"name": name, "parameters": tool["input_schema"]}
            if isinstance(tool.get("description"), str):
                spec["description"] = tool["description"]
            yield spec


# --- encode -----------------------------------------------------------------------------------------------------


def _thinking(text: str) -> Part:
    return {"type": "thinking", "thinking": text, "signature": render.seal(text)}


def _tool_use(call: ToolCall) -> Part:
    given = render.parse_object(call.arguments or "{}")
    if given is None:
        given = {_UNPARSED: {"raw": call.arguments, "len": len(call.arguments)}}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - render.cached(usage),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": render.cached(usage),
        "output_tokens": usage.completion_tokens,
    }


def _message(
    request: ModelRequest, call_id: str, content: list[Part], stop: str | None, usage: dict[str, int]
) -> dict[str, Any]:
    head = {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": request.model}
    return {**head, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage}


class AnthropicEncoder(render.TurnWriter):
    """One streamed message: thinking, text and tool_use blocks with their indices."""

    def __init__(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> None:
        super().__init__()
        self._request = request
        self._call_id = call_id
        self._prompt_tokens = prompt_tokens
        self._index = 0

    def start(self) -> bytes:
        usage = _usage(Usage(self._prompt_tokens, 0))
        message = _message(self._request, self._call_id, [], None, usage)
        return _event("message_start", message=message)

    def keep_alive(self) -> bytes:
        return _event("ping")

    def open_block(self, kind: Kind) -> bytes:
        if kind == "reasoning":
            block: Part = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "text":
            block = render.text_part("")
        else:
            block = {"type": "tool_use", "id": self.calls[-1].id, "name": self.calls[-1].name, "input": {}}
        return _event("content_block_start", index=self._index, content_block=block)

    def block_text(self, kind: Kind, text: str) -> bytes:
        if kind == "reasoning":
            return self._delta({"type": "thinking_delta", "thinking": text})
        if kind == "text":
            return self._delta({"type": "text_delta", "text": text})
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def close_block(self, kind: Kind, text: str) -> bytes:
        signed = (
            self._delta({"type": "signature_delta", "signature": render.seal(text)}) if kind == "reasoning" else b""
        )
        stop = _event("content_block_stop", index=self._index)
        self._index += 1
        return signed + stop

    def end(self, turn: AssistantTurn) -> bytes:
        reason = _STOPS[render.ending(turn, len(self.calls))]
        delta = {"stop_reason": reason, "stop_sequence": None}
        return _event("message_delta", delta=delta, usage=_usage(turn.usage)) + _event("message_stop")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.encode({"type": kind, **fields}, kind)

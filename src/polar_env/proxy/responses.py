"""OpenAI Responses, as Codex speaks it (and Pi, Qwen Code, opencode, mini-swe-agent can).

Source: platform.openai.com, "Responses", "Streaming events"; Codex's own item and tool kinds as measured (design:
harnesses, section 4). Stateless: a request carries its whole history.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polar_env.messages import ChatMessage, ChatToolCall, ToolSpec
from polar_env.proxy import render
from polar_env.proxy.render import Notes, Part, array, obj, text_of
from polar_env.proxy.responses_stream import LOCAL_SHELL, ResponsesEncoder, flat_name, whole
from polar_env.types import AssistantTurn, ModelRequest, WireApi

_KNOWN = render.words(
    "model input instructions tools tool_choice parallel_tool_calls stream max_output_tokens temperature"
    " top_p top_k metadata store include user prompt_cache_key client_metadata safety_identifier"
    " background"
)
_ROUTES = {
    ("POST", "/v1/responses"): "generate",
    ("POST", "/responses"): "generate",
    ("POST", "/v1/responses/input_tokens"): "count_tokens",
    ("POST", "/responses/input_tokens"): "count_tokens",
    ("GET", "/v1/responses"): "websocket",
    ("GET", "/responses"): "websocket",
    ("GET", "/v1/models"): "models",
    ("GET", "/models"): "models",
}
_STATEFUL = {
    "previous_response_id": "this endpoint keeps no responses; send the whole history in 'input' (store: false)",
    "conversation": "this endpoint keeps no conversations; send the whole history in 'input'",
    "prompt": "this endpoint keeps no prompt templates; send the text itself in 'input'",
}
_OURS = re.compile(r"(?:msg|rs|fc|ctc|lsh)_(.+)_\d+")
"""Item ids that we issue: kind, call id, place in the output."""


class Responses:
    """The Responses API as a Dialect."""

    wire = WireApi.RESPONSES

    def matches(self, method: str, path: str) -> str | None:
        """The operation of a route, whatever its query; a GET on the responses route is a websocket upgrade."""
        return _ROUTES.get((method.upper(), path.partition("?")[0].rstrip("/") or "/"))

    def decode(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
        """The request in Chat form. Raises BadRequest for no input, and for what needs a memory we do not keep."""
        if isinstance(body, Mapping) and isinstance(body.get("input"), str) and body["input"]:
            body = {**body, "input": [{"role": "user", "content": body["input"]}]}
        items = render.conversation(body, "input")
        for name, sentence in _STATEFUL.items():
            if body.get(name) is not None:
                render.refuse(f"{name}: {sentence}")
        history = _History(text_of(body.get("instructions")))
        for item in items:
            history.add(item)
        tools = _Tools(history.notes)
        tools.add(array(body.get("tools")))
        tools.add(history.tools)
        return ModelRequest(
            wire=self.wire,
            model=text_of(body.get("model")),
            messages=tuple(render.in_call_order(history.done())),
            tools=tuple(tools.specs.values()),
            tool_choice=_tool_choice(body.get("tool_choice")),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            stream=body.get("stream") is True,
            asked=render.sampling(body, "max_output_tokens"),
            custom_tools=frozenset(tools.custom),
            namespaces=tools.namespaces,
            ignored=history.notes.unknown(body, _KNOWN),
        )

    def reply(self, request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
        """A whole response: reasoning, message and call items."""
        return whole(request, turn, call_id)

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> ResponsesEncoder:
        """``prompt_tokens`` has no place before the end of this API's stream."""
        return ResponsesEncoder(request, call_id)

    def error(self, status: int, message: str) -> dict[str, Any]:
        """An error body; type and code follow the status."""
        return render.openai_error(status, message)

    def overflow(self, message: str) -> dict[str, Any]:
        """Code context_length_exceeded, with OpenAI's words for it first and vLLM's after: Pi looks for either."""
        return render.openai_overflow(message, "Your input exceeds the context window of this model. ", "input")

    def models(self, names: Iterable[str]) -> dict[str, Any]:
        return render.openai_models(names)

    def token_count(self, count: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": count}


# --- decode: history --------------------------------------------------------------------------------------------


class _History:
    """Items in, Chat messages out: reasoning, text and calls of one turn become one assistant message."""

    def __init__(self, instructions: str) -> None:
        self.notes = Notes()
        self.tools: list[Any] = []
        self._messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
        self._open = False
        self._turn = ""
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[ChatToolCall] = []

    def add(self, item: dict[str, Any]) -> None:
        """Take one item. Raises BadRequest for a reference to an item we would have had to keep."""
        kind = text_of(item.get("type")) or "message"
        if kind == "item_reference":
            render.refuse("item_reference: this endpoint keeps no items; send the items themselves (store: false)")
        if kind == "additional_tools":
            self.tools += array(item.get("tools"))
        elif kind == "reasoning" or kind in _CALLS or (kind == "message" and item.get("role") == "assistant"):
            self._said(kind, item)
        elif kind == "message" or kind in _OUTPUTS:
            self._close()
            self._messages.append(_heard(kind, item, self.notes))
        else:
            self.notes.ignore(f"input:{kind}")

    def done(self) -> list[ChatMessage]:
        self._close()
        return self._messages

    def _said(self, kind: str, item: dict[str, Any]) -> None:
        self._same_turn(item)
        if kind == "reasoning":
            self._reasoning.append(_reasoning(item))
        elif kind == "message":
            parts = _parts(item.get("content"), self.notes)
            self._text += [part["text"] for part in parts if part["type"] == "text"]
        else:
            name = flat_name(text_of(item.get("namespace")), text_of(item.get("name")))
            self._calls.append(_CALLS[kind](text_of(item.get("call_id")), name, item))

    def _same_turn(self, item: dict[str, Any]) -> None:
        """Two turns may touch (an answer, then another): our own item ids tell them apart."""
        ours = _OURS.fullmatch(text_of(item.get("id")))
        turn = ours.group(1) if ours else ""
        if self._open and turn and self._turn and turn != self._turn:
            self._close()
        self._open = True
        self._turn = turn or self._turn

    def _close(self) -> None:
        if self._open:
            text, reasoning = "".join(self._text), "".join(self._reasoning)
            self._messages.append(render.assistant_message(text, self._calls, reasoning))
        self._open, self._turn = False, ""
        self._reasoning, self._text, self._calls = [], [], []


def _function_call(call_id: str, name: str, item: dict[str, Any]) -> ChatToolCall:
    return render.chat_call(call_id, name, item.get("arguments"))


def _custom_call(call_id: str, name: str, item: dict[str, Any]) -> ChatToolCall:
    return render.chat_call(call_id, name, {"input": text_of(item.get("input"))})


def _shell_call(call_id: str, name: str, item: dict[str, Any]) -> ChatToolCall:
    action = {key: value for key, value in obj(item.get("action")).items() if key != "type" and value is not None}
    if not action.get("env"):
        action.pop("env", None)
    return render.chat_call(call_id or text_of(item.get("id")), LOCAL_SHELL["name"], action)


_CALLS: dict[str, Callable[[str, str, dict[str, Any]], ChatToolCall]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
}
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def _heard(kind: str, item: dict[str, Any], notes: Notes) -> ChatMessage:
    """A message or a tool output: what the model reads rather than says."""
    if kind in _OUTPUTS:
        call_id = text_of(item.get("call_id")) or text_of(item.get("id"))
        return {"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"), notes)}
    role = text_of(item.get("role"))
    if role not in ("system", "developer", "user"):
        notes.ignore(f"role:{role}")
        role = "user"
    return {"role": role, "content": _content(item.get("content"), notes)}


def _content(value: object, notes: Notes) -> str | list[Part]:
    return render.content_of(_parts(value, notes))


def _parts(value: object, notes: Notes) -> list[Part]:
    return render.parts_of(value, lambda part: _part(obj(part), notes))


def _part(part: dict[str, Any], notes: Notes) -> Part | None:
    kind = text_of(part.get("type"))
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return render.image_part(part["image_url"], part.get("detail"))
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if isinstance(text, str):
        return render.text_part(text)
    notes.ignore(f"content:{kind}")
    return None


def _reasoning(item: dict[str, Any]) -> str:
    shown = [text_of(obj(part).get("text")) for part in array(item.get("summary"))]
    raw = [text_of(obj(part).get("text")) for part in array(item.get("content"))]
    return render.unseal(item.get("encrypted_content"), "\n\n".join(raw or shown))


# --- decode: tools ----------------------------------------------------------------------------------------------


class _Tools:
    """Tools the model can be offered: functions, freeform tools as functions of one string, namespaces laid flat."""

    def __init__(self, notes: Notes) -> None:
        self.specs: dict[str, ToolSpec] = {}
        self.custom: set[str] = set()
        self.namespaces: dict[str, str] = {}
        self._notes = notes

    def add(self, tools: list[Any], namespace: str = "", about: str = "") -> None:
        """``about``: what the namespace says of itself; its first tool carries it, as functions have no groups."""
        for tool in map(obj, tools):
            kind = text_of(tool.get("type"))
            if kind == "namespace":
                self.add(array(tool.get("tools")), text_of(tool.get("name")), text_of(tool.get("description")))
            elif kind == "local_shell":
                self.specs[LOCAL_SHELL["name"]] = LOCAL_SHELL
            elif kind in ("function", "custom"):
                self._offer(tool, namespace, about, freeform=kind == "custom")
                about = ""
            else:
                self._notes.ignore(f"tools:{kind}")

    def _offer(self, tool: dict[str, Any], namespace: str, about: str, *, freeform: bool) -> None:
        name = flat_name(namespace, text_of(tool.get("name")))
        lines = [about, text_of(tool.get("description")), _grammar(tool) if freeform else ""]
        parameters = _FREEFORM if freeform else obj(tool.get("parameters")) or {"type": "object", "properties": {}}
        spec: ToolSpec = {"name": name, "parameters": parameters}
        if description := "\n\n".join(line for line in lines if line):
            spec["description"] = description
        self.specs[name] = spec
        if freeform:
            self.custom.add(name)
        if namespace:
            self.namespaces[name] = namespace


_FREEFORM: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _grammar(tool: dict[str, Any]) -> str:
    rules = obj(tool.get("format"))
    if rules.get("type") != "grammar":
        return ""
    return f"`input` follows this {text_of(rules.get('syntax'))} grammar:\n{text_of(rules.get('definition'))}"


def _tool_choice(value: object) -> str:
    if isinstance(value, str):
        return value if value in ("auto", "none", "required") else "auto"
    choice = obj(value)
    if choice.get("type") in ("function", "custom"):
        return flat_name(text_of(choice.get("namespace")), text_of(choice.get("name"))) or "auto"
    return "required" if choice.get("mode") == "required" else "auto"

"""What a Responses answer is made of: output items, the response object around them, and the events that stream both.

Source: platform.openai.com, "Responses" and "Streaming events". The half of ``responses`` that writes.
"""

from typing import Any

from polar_env.messages import ToolSpec
from polar_env.proxy import render, sse
from polar_env.proxy.render import Kind, Part
from polar_env.types import AssistantTurn, ModelRequest, ToolCall, Usage

LOCAL_SHELL: ToolSpec = {
    "name": "local_shell",
    "description": "Runs a command on the local machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "Program and arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}
"""The function the model sees in place of the built-in ``local_shell`` tool."""


def flat_name(namespace: str, name: str) -> str:
    """The one name the model sees. Always prefixed, so that the namespace can be taken off again without doubt."""
    return f"{namespace}__{name}" if namespace else name


def whole(request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
    """The response of a non-streaming answer: reasoning, message and call items."""
    output: list[Part] = []
    if turn.reasoning:
        output.append(reasoning_item(f"{call_id}_0", turn.reasoning))
    if turn.text:
        output.append(message_item(f"{call_id}_{len(output)}", turn.text))
    for call in turn.tool_calls:
        output.append(call_item(request, f"{call_id}_{len(output)}", call))
    return ended(request, call_id, turn, output)


# --- items: ``place`` is "<call id>_<index in the output>" ------------------------------------------------------


def reasoning_item(place: str, text: str, status: str = "completed") -> Part:
    """Reasoning as its own summary: that is what harnesses show and echo; the exact text is in encrypted_content."""
    sealed = render.seal(text) if status == "completed" else None
    summary = [_summary_part(text)] if status == "completed" else []
    return {"id": f"rs_{place}", "type": "reasoning", "summary": summary, "encrypted_content": sealed, "status": status}


def message_item(place: str, text: str, status: str = "completed") -> Part:
    content = [_text_part(text)] if status == "completed" else []
    return {"id": f"msg_{place}", "type": "message", "role": "assistant", "status": status, "content": content}


def call_item(request: ModelRequest, place: str, call: ToolCall, status: str = "completed") -> Part:
    """The call in the form its tool came in: freeform, built-in shell, or function, with its namespace."""
    namespace = request.namespaces.get(call.name, "")
    name = call.name.removeprefix(flat_name(namespace, "")) if namespace else call.name
    group = {"namespace": namespace} if namespace else {}
    head = {"call_id": call.id, "status": status}
    if call.name in request.custom_tools:
        item = {
            "id": f"ctc_{place}",
            "type": "custom_tool_call",
            **head,
            "name": name,
            "input": freeform(call.arguments),
        }
        return {**item, **group}
    action = shell_action(request, call)
    if action is not None:
        return {"id": f"lsh_{place}", "type": "local_shell_call", **head, "action": action}
    item = {"id": f"fc_{place}", "type": "function_call", **head, "name": name, "arguments": call.arguments}
    return {**item, **group}


def freeform(arguments: str) -> str:
    """The freeform input inside the function's arguments; arguments of another shape are the input as they are."""
    given = render.parse_object(arguments)
    if given is not None and given.keys() == {"input"} and isinstance(given["input"], str):
        return given["input"]
    return arguments


def shell_action(request: ModelRequest, call: ToolCall) -> Part | None:
    """The built-in shell's action, ``None`` when it is not that tool or its arguments name no command."""
    if call.name != LOCAL_SHELL["name"] or LOCAL_SHELL not in request.tools:
        return None
    given = render.parse_object(call.arguments) or {}
    command = render.array(given.get("command"))
    if not command or not all(isinstance(word, str) for word in command):
        return None
    return {"type": "exec", "env": {}, **given}


def _text_part(text: str) -> Part:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> Part:
    return {"type": "summary_text", "text": text}


# --- the response around them -----------------------------------------------------------------------------------


def ended(request: ModelRequest, call_id: str, turn: AssistantTurn, output: list[Part]) -> dict[str, Any]:
    """The final response object: ``incomplete`` when the turn was cut, never "completed" then."""
    cut = render.ending(turn, 0) == "length"
    body = _response(request, call_id, "incomplete" if cut else "completed", output)
    reason = {"reason": "max_output_tokens"} if cut else None
    return {**body, "incomplete_details": reason, "usage": _usage(turn.usage)}


def _response(request: ModelRequest, call_id: str, status: str, output: list[Part]) -> dict[str, Any]:
    """``created_at`` is 0: a reply is a function of its turn alone, so a replayed one is the same bytes."""
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": render.cached(usage)},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# --- the stream -------------------------------------------------------------------------------------------------


class ResponsesEncoder(render.TurnWriter):
    """One streamed response. ``sequence_number`` counts every event, keep-alives too."""

    def __init__(self, request: ModelRequest, call_id: str) -> None:
        super().__init__()
        self._request = request
        self._call_id = call_id
        self._sequence = 0
        self._output: list[Part] = []

    def start(self) -> bytes:
        response = _response(self._request, self._call_id, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def keep_alive(self) -> bytes:
        """``response.in_progress`` once more: any data event resets Codex's idle timer, comments do not (measured)."""
        return self._event(
            "response.in_progress", response=_response(self._request, self._call_id, "in_progress", self._output)
        )

    def streams_call(self, name: str) -> bool:
        """Not for freeform and shell calls: their input is inside JSON, which is only known when it is whole."""
        return name not in self._request.custom_tools and name != LOCAL_SHELL["name"]

    def open_block(self, kind: Kind) -> bytes:
        item = self._item(kind, "", "in_progress")
        out = self._event("response.output_item.added", output_index=len(self._output), item=item)
        if kind == "text":
            out += self._inside("response.content_part.added", content_index=0, part=_text_part(""))
        elif kind == "reasoning":
            out += self._inside("response.reasoning_summary_part.added", summary_index=0, part=_summary_part(""))
        return out

    def block_text(self, kind: Kind, text: str) -> bytes:
        if kind == "text":
            return self._inside("response.output_text.delta", content_index=0, delta=text, logprobs=[])
        if kind == "reasoning":
            return self._inside("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        item = self._item("call", text, "completed")
        if item["type"] == "custom_tool_call":
            return self._inside("response.custom_tool_call_input.delta", delta=item["input"])
        if item["type"] == "local_shell_call":
            return b""
        return self._inside("response.function_call_arguments.delta", delta=text)

    def close_block(self, kind: Kind, text: str) -> bytes:
        item = self._item(kind, text, "completed")
        out = self._done(item, text)
        out += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out

    def end(self, turn: AssistantTurn) -> bytes:
        response = ended(self._request, self._call_id, turn, self._output)
        return self._event(f"response.{response['status']}", response=response)

    def _done(self, item: Part, text: str) -> bytes:
        if item["type"] == "message":
            out = self._inside("response.output_text.done", content_index=0, text=text, logprobs=[])
            return out + self._inside("response.content_part.done", content_index=0, part=_text_part(text))
        if item["type"] == "reasoning":
            out = self._inside("response.reasoning_summary_text.done", summary_index=0, text=text)
            return out + self._inside("response.reasoning_summary_part.done", summary_index=0, part=_summary_part(text))
        if item["type"] == "custom_tool_call":
            return self._inside("response.custom_tool_call_input.done", input=item["input"])
        if item["type"] == "local_shell_call":
            return b""
        return self._inside("response.function_call_arguments.done", name=item["name"], arguments=text)

    def _item(self, kind: Kind, text: str, status: str) -> Part:
        place = f"{self._call_id}_{len(self._output)}"
        if kind == "text":
            return message_item(place, text, status)
        if kind == "reasoning":
            return reasoning_item(place, text, status)
        call = self.calls[-1]
        return call_item(self._request, place, ToolCall(call.id, call.name, text), status)

    def _inside(self, kind: str, **fields: Any) -> bytes:
        """An event inside the open item."""
        return self._event(kind, item_id=self._item_id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if kind == "response.output_item.added":
            self._item_id: str = fields["item"]["id"]
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse.encode(event, kind)

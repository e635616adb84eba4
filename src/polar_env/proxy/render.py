"""What the dialects share: Chat content, JSON text, sealed reasoning, and the order in which a turn is streamed.

Canonical Chat form, the same from every wire API, so that one conversation gives one prompt: content that is a single
text is a string; an assistant's content is always a string (``""`` when it said nothing); cache markers are gone.
"""

import base64
import binascii
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from polar_env import fast_json
from polar_env.errors import BadRequest
from polar_env.messages import ChatMessage, ChatToolCall
from polar_env.types import AssistantTurn, Delta, Sampling, StopReason, ToolCall, Usage

Part = dict[str, Any]
Kind = Literal["reasoning", "text", "call"]

_SEAL = "polar1."
"""Marks the signatures and encrypted contents we issued."""
_MAXIMUM = re.compile(r"(?:maximum (?:context|model) length(?: is| of)?|context length)\D{0,4}(\d+)|> (\d+) maximum")
_COUNT = re.compile(r"(\d+) (?:\w+ )?tokens|length (\d+)")


# --- reading foreign JSON ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Notes:
    """What a decoder met on its way and the caller has to know."""

    ignored: dict[str, None] = field(default_factory=dict[str, None])
    referenced: set[str] = field(default_factory=set[str])
    """Deferred tools that the conversation has loaded (Anthropic ``tool_reference``)."""

    def ignore(self, name: str) -> None:
        self.ignored[name] = None

    def unknown(self, body: Mapping[str, Any], known: frozenset[str]) -> tuple[str, ...]:
        """Names of everything ignored: fields of the body first. A field that is null asks for nothing."""
        fields = [name for name, value in body.items() if name not in known and value is not None]
        return (*fields, *self.ignored)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def obj(value: object) -> dict[str, Any]:
    """The JSON object, or an empty one when it is something else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def array(value: object) -> list[Any]:
    """The JSON array, or an empty one when it is something else."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def text_of(value: object) -> str:
    """The JSON string, or an empty one when it is something else."""
    return value if isinstance(value, str) else ""


def conversation(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The list of messages under ``name``. Raises BadRequest when there is none, or one of them is not an object."""
    if not isinstance(body, Mapping):
        refuse("the body is not a JSON object; send one")
    messages = array(body.get(name))
    if not messages:
        refuse(f"{name!r} is missing or empty; send at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            refuse(f"{name}[{index}] is not a JSON object; send messages as objects")
    return messages


def refuse(sentence: str) -> NoReturn:
    """Raises BadRequest."""
    raise BadRequest(sentence)


def sampling(body: Mapping[str, Any], *max_names: str) -> Sampling:
    """What the harness asked for; the first of ``max_names`` that is a number is its output limit."""
    limits = [number(body.get(name)) for name in max_names]
    limit = next((value for value in limits if value is not None), None)
    top_k = number(body.get("top_k"))
    return Sampling(
        temperature=number(body.get("temperature")),
        top_p=number(body.get("top_p")),
        top_k=None if top_k is None else int(top_k),
        max_tokens=None if limit is None else int(limit),
    )


def number(value: object) -> float | None:
    """The JSON number, or ``None``; one that no float holds (1e999, Infinity) is no setting of anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -sys.float_info.max <= value <= sys.float_info.max else None


# --- Chat messages ----------------------------------------------------------------------------------------------


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def parts_of(value: object, part: Callable[[Any], Part | None]) -> list[Part]:
    """Chat parts of a string or a list of blocks; ``part`` turns a block into a part, or ``None`` to leave it out."""
    if isinstance(value, str):
        return [text_part(value)]
    return [made for block in array(value) if (made := part(block)) is not None]


def image_part(url: str, detail: object = None) -> Part:
    image = {"url": url, "detail": detail} if isinstance(detail, str) else {"url": url}
    return {"type": "image_url", "image_url": image}


def content_of(parts: Sequence[Part]) -> str | list[Part]:
    """Chat content of the parts. One text is a string: Claude Code sends the same text in either form (measured)."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].get("type") == "text":
        return parts[0]["text"]
    return list(parts)


def chat_call(call_id: str, name: str, arguments: object) -> ChatToolCall:
    """A tool call in Chat form; arguments that are not text already are written as JSON."""
    text = arguments if isinstance(arguments, str) else "" if arguments is None else dump(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def assistant_message(text: str, calls: Iterable[ChatToolCall] = (), reasoning: str = "") -> ChatMessage:
    """An assistant's turn in canonical Chat form: keys that would be empty are absent, ``content`` is always there."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if listed := list(calls):
        message["tool_calls"] = listed
    return message


def in_call_order(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Results that follow a turn in the order of its calls; those of no call of it stay behind them as they came.

    Chat templates (Qwen2.5, Qwen3) write results without ids: in another order the model would take one for another.
    """
    ordered, calls = list[ChatMessage](), dict[str, int]()
    run = list[ChatMessage]()
    for message in messages:
        if message["role"] == "tool":
            run.append(message)
            continue
        ordered += sorted(run, key=lambda result: calls.get(result.get("tool_call_id", ""), len(calls)))
        run = []
        calls = {call["id"]: index for index, call in enumerate(message.get("tool_calls", []))}
        ordered.append(message)
    return ordered + sorted(run, key=lambda result: calls.get(result.get("tool_call_id", ""), len(calls)))


def turn_message(turn: AssistantTurn) -> ChatMessage:
    """The turn as the next request of a faithful harness will carry it."""
    calls = [chat_call(call.id, call.name, call.arguments) for call in turn.tool_calls]
    return assistant_message(turn.text, calls, turn.reasoning)


def dump(value: object) -> str:
    """JSON text as models write it: spaces after separators, characters as they are."""
    return json.dumps(value, ensure_ascii=False)


DEEPEST = 200
"""Levels of arguments that are sent as an object: the harness's next request, which has them some levels further down,
must not be refused for what the model wrote (``fast_json.DEPTH``)."""


def parse_object(text: str) -> dict[str, Any] | None:
    """The object that ``text`` is in strict JSON, and can be again when it is written, else ``None``."""
    try:
        value = json.loads(text, parse_constant=fast_json.no_constant, parse_float=fast_json.finite)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) and not fast_json.is_deep(value, DEEPEST) else None


# --- reasoning that survives the harness ------------------------------------------------------------------------


def seal(reasoning: str) -> str:
    """A signature / encrypted_content that carries the reasoning itself.

    Harnesses echo it untouched even where they trim the visible text (Qwen Code) or drop it. Not compressed: a
    sandbox may send us anything, and inflating it would be a way to fill our memory.
    """
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode("ascii")


def unseal(sealed: object, visible: str) -> str:
    """The reasoning as we sent it. Visible text that differs by more than outer whitespace is an edit, and wins."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return visible
    try:
        raw = base64.b64decode(sealed.removeprefix(_SEAL), validate=True)
        ours = raw.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return visible
    return ours if not visible.strip() or visible.strip() == ours.strip() else visible


def cached(usage: Usage) -> int:
    """Prompt tokens out of the engine's cache: a part of the prompt, whatever the engine says."""
    return max(0, min(usage.cached_tokens, usage.prompt_tokens))


# --- errors -----------------------------------------------------------------------------------------------------


def context_sizes(message: str) -> tuple[int, int] | None:
    """(tokens asked for, window) out of an engine's overflow message, ``None`` when it names no window.

    The first is the largest count named; where none is over the window, it is one over it.
    """
    found = _MAXIMUM.search(message)
    if found is None:
        return None
    window = int(found.group(1) or found.group(2))
    counts = [int(tokens or length) for tokens, length in _COUNT.findall(message)]
    return max([window + 1, *counts]), window


def openai_error(status: int, message: str) -> dict[str, Any]:
    """The error body both OpenAI APIs share; type and code by status."""
    kind, code = _OPENAI_ERRORS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


_OPENAI_ERRORS: dict[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    410: ("invalid_request_error", "session_ended"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("server_error", "server_is_overloaded"),
}


def openai_overflow(message: str, opening: str, param: str) -> dict[str, Any]:
    """A context_length_exceeded body in the words of OpenAI and vLLM, which Pi, Qwen Code and opencode look for."""
    sizes = context_sizes(message)
    words = message
    if sizes is not None:
        words = (
            f"This model's maximum context length is {sizes[1]} tokens. However, your request has {sizes[0]} tokens."
        )
    error = {"message": opening + words, "type": "invalid_request_error", "param": param}
    return {"error": {**error, "code": "context_length_exceeded"}}


def openai_models(names: Iterable[str]) -> dict[str, Any]:
    """The model list both OpenAI APIs share."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "polar"} for name in names]
    return {"object": "list", "data": data}


# --- the streamed turn ------------------------------------------------------------------------------------------


def ending(turn: AssistantTurn, calls: int) -> Literal["stop", "tool_calls", "length"]:
    """Why the turn ended, for the wire. An aborted turn was cut short, so it says so in the only word there is."""
    if turn.stop in (StopReason.LENGTH, StopReason.ABORT):
        return "length"
    return "tool_calls" if calls else "stop"


class TurnWriter(ABC):
    """Writes a turn as blocks, one open at a time. A dialect says what opening, text and closing look like.

    - The first tool call streams as it comes. Everything after its arguments waits for ``finish`` and goes out with
      the terminal event: no harness can start a tool (Codex does on ``output_item.done``) of a turn that is not
      committed, and fragments of parallel calls may come in any order.
    - What was streamed stands. Where the final turn extends it, the rest is appended. Where it contradicts it (the
      engine's parser changed its mind), nothing is taken back or repeated: that block closes as it was streamed, and
      whatever has not been streamed at all follows in its own block.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        """Calls that went out, in order; the last one may still be open and its arguments not complete."""
        self._open: Kind | None = None
        self._block: list[str] = []
        self._sent: dict[Kind, list[str]] = {"reasoning": [], "text": []}
        self._calling = False
        self._live: int | None = None

    # what a dialect says

    @abstractmethod
    def open_block(self, kind: Kind) -> bytes:
        """The block's opening; of a call, ``self.calls[-1]``."""

    @abstractmethod
    def block_text(self, kind: Kind, text: str) -> bytes:
        """A fragment of the open block."""

    @abstractmethod
    def close_block(self, kind: Kind, text: str) -> bytes:
        """The block's closing. ``text``: all of the block's text."""

    @abstractmethod
    def end(self, turn: AssistantTurn) -> bytes:
        """The events that end the stream."""

    def streams_call(self, name: str) -> bool:
        """Whether fragments of this tool's arguments can be written as they come."""
        return True

    # the Encoder protocol

    def delta(self, delta: Delta) -> bytes:
        """The fragment's bytes; empty for what has to wait for ``finish``."""
        if delta.kind in ("reasoning", "text"):
            return b"" if self._calling else self._append(delta.kind, delta.text)
        if delta.kind == "tool_args":
            live = self._live is not None and self._live == delta.index
            return self._append("call", delta.text) if live else b""
        if self._calling:
            return b""
        self._calling = True
        if not self.streams_call(delta.name):
            return b""
        self._live = delta.index
        return self._start_call(ToolCall(delta.id, delta.name, ""))

    def finish(self, turn: AssistantTurn) -> tuple[bytes, bytes]:
        """(the rest of reasoning and text, calls and the terminal event)."""
        before = after = b""
        if self._live is None:
            before = self._rest(turn)
        else:
            after = self._rest_of_call(turn) + self._close() + self._rest(turn)
        for index, call in enumerate(turn.tool_calls):
            if not self._is_live(index, call):
                after += self._start_call(call) + self._append("call", call.arguments) + self._close()
        return before, after + self._close() + self.end(turn)

    # how it keeps its promises

    def _is_live(self, index: int, call: ToolCall) -> bool:
        return index == self._live and call.id == self.calls[0].id

    def _rest_of_call(self, turn: AssistantTurn) -> bytes:
        sent = "".join(self._block)
        for index, call in enumerate(turn.tool_calls):
            if self._is_live(index, call) and call.arguments.startswith(sent):
                return self._append("call", call.arguments[len(sent) :])
        return b""

    def _rest(self, turn: AssistantTurn) -> bytes:
        out = b""
        wholes: tuple[tuple[Kind, str], ...] = (("reasoning", turn.reasoning), ("text", turn.text))
        for kind, whole in wholes:
            sent = "".join(self._sent[kind])
            if whole.startswith(sent):
                out += self._append(kind, whole[len(sent) :])
        return out

    def _start_call(self, call: ToolCall) -> bytes:
        closed = self._close()
        self.calls.append(call)
        self._open = "call"
        return closed + self.open_block("call")

    def _append(self, kind: Kind, text: str) -> bytes:
        if not text:
            return b""
        out = b""
        if self._open != kind:
            out = self._close()
            self._open = kind
            out += self.open_block(kind)
        self._block.append(text)
        if kind != "call":
            self._sent[kind].append(text)
        return out + self.block_text(kind, text)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open, "".join(self._block)
        self._open, self._block = None, []
        return self.close_block(kind, text)

"""Which earlier call does a request carry on, message for message? Pure.

A harness sends its whole history with every call, in its own spelling: content as text or in parts, results of parallel
calls in another order, arguments written again, thoughts left out, blanks trimmed. ``History`` reads a request from the
front and keeps a digest of what it has read. Where a model's turn comes, it asks for an earlier call that was given
exactly this and said exactly that; the digest then goes on from what was *said*, so a turn that is echoed in two
spellings stays one turn.

What joins an echo to its turn: the ids of its tool calls, in order, all of them and no other; the words with them are
the turn's or are left out. Without calls, or where the wire API has no ids (Gemini), the names, the arguments as JSON
values and the words. Thoughts may be left out (few harnesses can carry them); other thoughts than the model's are an
edit.

What joins nothing: other tools, another system prompt, any earlier message changed, a parallel call dropped, a summary
in place of the history, a turn of the model changed or made up after the last one that is known.

Cost: O(request) to read, six small digests to keep for a call, no text.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import AssistantTurn, Continuation, ModelRequest, StopReason

_SIZE = 16
_NOTHING = b""


@dataclass(frozen=True, slots=True)
class _Said:
    """A call's turn, as digests; ``b""`` stands for no words."""

    call_id: str
    index: int
    thread: str
    cut: bool
    state: bytes
    """The history that ends with this turn."""
    text: bytes
    reasoning: bytes

    def echoed(self, text: bytes, reasoning: bytes, *, by_ids: bool) -> bool:
        """Whether an echo with these words is this turn; its calls are known to be."""
        same = text == self.text or (by_ids and not text)
        return same and reasoning in (_NOTHING, self.reasoning)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in its session's history."""

    state: bytes
    call_id: str | None = None
    """The call it carries on; ``None``: it begins a conversation, or rewrites one."""
    messages: int = 0
    """How many of its messages are that call's, its turn included; at least one more follows."""
    cut: bool = False

    def carried(self, request: ModelRequest, ids: "Callable[[str], array[int]]") -> ModelRequest:
        """``request`` with the exact ids it carries on; ``ids`` gives a call's prompt and sampled ids."""
        if self.call_id is None:
            return request
        return replace(request, continues=Continuation(self.call_id, ids(self.call_id), self.messages, self.cut))


class History:
    """The calls of one session that can be carried on."""

    def __init__(self) -> None:
        self._said: dict[bytes, tuple[_Said, ...]] = {}

    def place(self, request: ModelRequest, thread: str = "") -> Place:
        """Read a request of ``thread``. Of equal turns one with the echoed thoughts is carried on, else one of the same
        thread (two sub-agents that were told the same may say the same), else the latest."""
        state, at, known = _tools(request.tools), 0, Place(_NOTHING)
        for group in _groups(request.messages):
            spoken, at = group[0]["role"] == "assistant", at + len(group)
            said = self._echoed(state, group[0], thread) if spoken else None
            if said is not None:
                state, known = said.state, Place(said.state, said.call_id, at, said.cut)
            else:
                state, known = _after(state, group), Place(_NOTHING) if spoken else known
        return replace(known, state=state) if at > known.messages else Place(state)

    def add(self, place: Place, call_id: str, index: int, turn: AssistantTurn, thread: str = "") -> None:
        """From now on a request can carry on this call. ``place`` is that of its request."""
        calls = [(call.name, call.arguments) for call in turn.tool_calls]
        state = _content_key(place.state, turn.text, calls)
        cut = turn.stop is StopReason.LENGTH
        said = _Said(call_id, index, thread, cut, state, _words(turn.text), _words(turn.reasoning))
        alone = (said,)  # one for both keys: a session keeps it for every call
        for key in {state, _id_key(place.state, [call.id for call in turn.tool_calls])} - {_NOTHING}:
            known = self._said.get(key)
            self._said[key] = tuple(sorted((*known, said), key=lambda one: -one.index)) if known else alone

    def _echoed(self, state: bytes, message: ChatMessage, thread: str) -> _Said | None:
        """The call that said this when it was given the history ``state``."""
        text, reasoning = _words(_text(message)), _words(message.get("reasoning_content", ""))
        calls = message.get("tool_calls", ())
        by_ids = self._said.get(_id_key(state, [call["id"] for call in calls]), ())
        made = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        alike = by_ids or self._said.get(_content_key(state, _text(message), made), ())
        fitting = [said for said in alike if said.echoed(text, reasoning, by_ids=bool(by_ids))]
        return max(
            fitting, key=lambda said: (said.reasoning == reasoning, said.thread == thread, said.index), default=None
        )


# --- digests ----------------------------------------------------------------------------------------------------


def _digest(*parts: bytes) -> bytes:
    """Of the parts, each with its length, so that no two lists of parts give one."""
    hashed = sha256()  # in hardware, where it takes a third of blake2b's time over a long history
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.digest()[:_SIZE]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _words(text: str) -> bytes:
    """Of a turn's words without the white space around them; of none, nothing."""
    return _digest(_bytes(text.strip())) if text.strip() else _NOTHING


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _tools(tools: Iterable[ToolSpec]) -> bytes:
    """The history before the first message: tools in any order."""
    return _digest(b"tools", *sorted(map(_json, tools)))


def _id_key(state: bytes, ids: Sequence[str]) -> bytes:
    return _digest(b"ids", state, *map(_bytes, ids)) if ids and all(ids) else _NOTHING


def _content_key(state: bytes, text: str, calls: Iterable[tuple[str, str]]) -> bytes:
    made = (part for name, arguments in calls for part in (_bytes(name), _value(arguments)))
    return _digest(b"said", state, _bytes(text.strip()), *made)


def _value(arguments: str) -> bytes:
    """Arguments as a JSON value; as they are when they are none. Nothing is the empty object."""
    try:
        return _json(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return _bytes(arguments)


def _groups(messages: Iterable[ChatMessage]) -> list[list[ChatMessage]]:
    """Tool results that stand together, and every other message alone."""
    groups = list[list[ChatMessage]]()
    for message in messages:
        if groups and message["role"] == groups[-1][0]["role"] == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _after(state: bytes, group: Iterable[ChatMessage]) -> bytes:
    """The history with these messages; results that stand together count in any order."""
    return _digest(state, *sorted(map(_message, group)))


def _message(message: ChatMessage) -> bytes:
    """A message that no call of the session said."""
    role = "system" if message["role"] == "developer" else message["role"]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    more = (message.get("reasoning_content", ""), message.get("tool_call_id", ""), message.get("name", ""), calls)
    return _digest(_bytes(role), _bytes(_text(message)), _json(more), *_shown(message))


def _text(message: ChatMessage) -> str:
    """Text, or the text of the parts as a template joins them."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")


def _shown(message: ChatMessage) -> list[bytes]:
    """Parts that are no text, each with its place."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return []
    return [_json([at, part]) for at, part in enumerate(content) if part.get("type") != "text"]

"""What a model call was asked: messages and tools, stored once however often a harness sends them again. Pure.

A harness repeats its whole history with every call. Kept is what is new: a request names the earlier one whose messages
it begins with, how many it shares, and the rest. Nothing that trains needs this; ``polar export --format sft`` does.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polar_env import fast_json
from polar_env.messages import ChatMessage, ChatToolCall, ToolSpec
from polar_env.types import AssistantTurn, ModelRequest

LEVEL = 4
"""Of zlib: half the time of the default (a call waits for it) for a twentieth more bytes, on source code."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request in Chat form, as the engine was shown it; the reply is the call record's ``turn``."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()


class Writer:
    """Requests of one session as (header, body) of log frames. Holds digests only: a live session costs little."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}
        """Digest of the first messages of a call, for every number of them -> the first call that began so."""
        self._tools: dict[bytes, str] = {}

    def encode(self, call_id: str, request: ModelRequest) -> tuple[dict[str, Any], bytes]:
        """``header`` names what is shared with earlier calls; ``body`` is zlib-compressed JSON of what is new."""
        packed = [fast_json.write(message) for message in request.messages]
        base, shared = self._share(call_id, packed)
        tools = fast_json.write(request.tools)
        holder = self._tools.setdefault(hashlib.sha256(tools).digest(), call_id)
        new = b",".join(packed[shared:])
        body = b'{"messages":[' + new + (b'],"tools":' + tools if holder == call_id else b"]") + b"}"
        return {"call_id": call_id, "base": base, "shared": shared, "tools": holder}, zlib.compress(body, LEVEL)

    def _share(self, call_id: str, packed: Iterable[bytes]) -> tuple[str | None, int]:
        """The earlier call that has most of the first messages, and how many. All prefixes become findable."""
        found: tuple[str | None, int] = None, 0
        digest = b""
        for count, message in enumerate(packed, start=1):
            digest = hashlib.sha256(digest + message).digest()
            holder = self._known.setdefault(digest, call_id)
            if holder != call_id:
                found = holder, count
        return found


def as_message(turn: AssistantTurn) -> ChatMessage:
    """A model's turn as the Chat message that a harness would put into its history."""
    message = ChatMessage(role="assistant", content=turn.text)
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            ChatToolCall(id=call.id, type="function", function={"name": call.name, "arguments": call.arguments})
            for call in turn.tool_calls
        ]
    return message


def decode(entries: Iterable[tuple[Mapping[str, Any], bytes]]) -> dict[str, Conversation]:
    """call_id -> conversation, from a session's (header, body) in order. One whose base is not there is left out.

    Raises ValueError or KeyError for what ``Writer`` did not write.
    """
    found, tools = dict[str, Conversation](), dict[str, tuple[ToolSpec, ...]]()
    for header, packed in entries:
        body = _unpack(packed)
        call_id, base = header["call_id"], header["base"]
        if "tools" in body:
            tools[call_id] = tuple(body["tools"])
        if (base is None or base in found) and header["tools"] in tools:
            before = found[base].messages[: header["shared"]] if base is not None else ()
            found[call_id] = Conversation((*before, *body["messages"]), tools[header["tools"]])
    return found


def _unpack(packed: bytes) -> dict[str, Any]:
    try:
        return json.loads(zlib.decompress(packed))
    except zlib.error as error:
        raise ValueError(str(error)) from error

"""Server-sent events, both ways: bytes of one event out, events out of any chunking of bytes.

Rules: WHATWG HTML, "Server-sent events", sections 9.2.5 (parsing) and 9.2.6 (interpreting). Pure: no sockets.
"""

import json
from dataclasses import dataclass, field
from typing import Any

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event. ``event`` is ``"message"`` when the stream did not name it."""

    data: str
    event: str = "message"
    id: str = ""

    def json(self) -> Any:
        """The data as JSON. Raises ValueError when it is not JSON (``[DONE]``, for one)."""
        return json.loads(self.data)


def encode(data: object, event: str = "") -> bytes:
    """One event whose data is ``data`` as JSON.

    Pure ASCII on purpose: some clients split lines on U+2028 or U+0085 too, and a lone surrogate of a cut character
    has no UTF-8 form.
    """
    return encode_text(json.dumps(data, separators=(",", ":")), event)


def encode_text(data: str, event: str = "") -> bytes:
    """One event whose data is the text itself; each of its lines becomes a ``data:`` line."""
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    head = f"event: {event}\n" if event else ""
    return (head + "".join(f"data: {line}\n" for line in lines) + "\n").encode()


@dataclass(slots=True)
class Parser:
    """Incremental reader: ``feed`` gives the same events whatever the chunking. An event cut by the end is none.

    Bytes that are not UTF-8 are replaced (U+FFFD), as the standard says; they never raise.
    """

    _line: bytearray = field(default_factory=bytearray)
    _data: list[str] = field(default_factory=list[str])
    _event: str = ""
    _id: str = ""
    _after_cr: bool = False
    _first: bool = True

    def feed(self, chunk: bytes) -> list[Event]:
        """Events completed by ``chunk``, in order."""
        if self._after_cr and chunk[:1] == b"\n":
            chunk, self._after_cr = chunk[1:], False
        events: list[Event] = []
        for piece in chunk.splitlines(keepends=True):  # bytes split on CR, LF and CRLF only
            self._after_cr = piece.endswith(b"\r")
            text = piece.rstrip(b"\r\n")
            self._line += text
            if len(text) < len(piece):
                events += self._end_of_line()
        return events

    def _end_of_line(self) -> list[Event]:
        line, self._line = bytes(self._line), bytearray()
        if self._first:
            line, self._first = line.removeprefix(_BOM), False
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        self._field(name, value.removeprefix(" "))
        return []

    def _field(self, name: str, value: str) -> None:
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value

    def _dispatch(self) -> list[Event]:
        data, self._data = self._data, []
        event, self._event = self._event, ""
        return [Event("\n".join(data), event or "message", self._id)] if data else []

"""A row as JSON, without holding up the process that serves it: calls of other rollouts go through it meanwhile.

A row of 150 calls that ends at 136K tokens is 72 MB of JSON and 10M numbers: written in one go it holds the
interpreter for 0.2 s, read in one go for 2 s.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any, cast

import orjson

from polar_env.gym.rows import plain

BULKY = ("response", "trajectories")
"""Fields of a row that hold tensors. They come last."""

ROW = ("reward", "mask_sample", "response")
"""Fields that only a row has."""

LARGE = 1 << 20
"""Bytes. An error is smaller."""


def encode(row: Mapping[str, Any]) -> bytes:
    """``row`` (``rows.compact``) as JSON. Meant for a thread: it holds the interpreter for milliseconds at a time."""
    ordered = {key: row[key] for key in sorted(row, key=lambda key: key in BULKY)}
    return b"".join(_Encoder().pieces(ordered))


def is_row(content: bytes) -> bool:
    """Whether this is a row that ``encode`` wrote, not an error. A large answer is looked at, not read."""
    if len(content) > LARGE:
        return (
            content.startswith(b"{") and content.endswith(b"}") and all(f'"{key}":'.encode() in content for key in ROW)
        )
    try:
        answer: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return isinstance(answer, dict) and set(ROW) <= cast("dict[str, Any]", answer).keys()


class _Encoder:
    """JSON in pieces. Of an array that begins with the one before, only what is new is written out again."""

    def __init__(self) -> None:
        self._known: array[Any] = array("i")
        self._text = b"[]"

    def pieces(self, value: Any) -> Iterator[bytes]:
        match value:
            case dict() if value:
                yield from self._members(cast("dict[Any, Any]", value))
            case [dict(), *_]:
                for at, inner in enumerate(cast("list[Any]", value)):
                    yield b"," if at else b"["
                    yield from self.pieces(inner)
                yield b"]"
            case array():
                yield self._numbers(cast("array[Any]", value))
            case _:
                yield orjson.dumps(plain(value))

    def _members(self, value: Mapping[Any, Any]) -> Iterator[bytes]:
        for at, (key, inner) in enumerate(value.items()):
            yield (b"," if at else b"{") + orjson.dumps({key: 0})[1:-2]  # refuses a key that is no text
            yield from self.pieces(inner)
        yield b"}"

    def _numbers(self, value: "array[Any]") -> bytes:
        if value.typecode != "i":
            return orjson.dumps(value.tolist())
        known = len(self._known)
        if 0 < known < len(value) and value[:known] == self._known:
            text = self._text[:-1] + b"," + orjson.dumps(value[known:].tolist())[1:]
        else:
            text = orjson.dumps(value.tolist())
        if len(value) > known:
            self._known, self._text = value, text
        return text

"""JSON of long conversations and of arrays of ids: orjson where it can, the standard library where it cannot. Pure.

orjson refuses lone surrogates (JavaScript harnesses cut characters in two), integers over 64 bits when it writes,
nesting over 254 levels and keys that are no text; those take the slow way and nothing is lost. Two differences remain.
It writes NaN and Infinity, which no JSON has, as null. It reads an integer over 64 bits as a float: a harness's own
request is therefore read with ``strict`` (it costs a twentieth of an engine's answer).
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import orjson

DEPTH = 254
"""Levels of objects and lists in what somebody else wrote: as many as orjson writes."""

_TOO_DEEP = f"it is nested deeper than {DEPTH} levels"


def read(text: bytes | str) -> Any:
    """The value of ``text``: an engine's answer, whose ids and log-probabilities fit their types or are no answer.

    Raises ValueError: it is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def strict(text: bytes | str) -> Any:
    """The value of what somebody else wrote, integers of any length and no word that JSON has not: Python's own reader
    takes NaN, Infinity and -Infinity (RFC 8259, section 6, has none of them).

    Raises ValueError: it is not JSON, or deeper than ``DEPTH`` (section 9 allows a limit). What is just not too deep to
    be read would be so wherever it is written again, in the engine's request and on the log's threads.
    """
    try:
        value = json.loads(text, parse_constant=no_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    try:
        orjson.dumps(value)  # nearly always this says at once that it is not
    except orjson.JSONEncodeError:
        if is_deep(value, DEPTH):
            raise ValueError(_TOO_DEEP) from None
    return value


def is_deep(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in each other to more than so many levels."""
    inside = [value]
    for _ in range(levels + 1):
        inside = [item for outer in inside for item in _inside(outer)]
        if not inside:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def no_constant(name: str) -> NoReturn:
    """What ``json`` calls for NaN, Infinity and -Infinity. Raises ValueError."""
    raise ValueError(f"{name} is not JSON; send null, or a number")


def finite(text: str) -> float:
    """What ``json`` may call for a number with a point or exponent: 1e999 is JSON, and no float that could be written
    as JSON again. Raises ValueError."""
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is more than a float holds")
    return value


def write(value: object) -> bytes:
    """``value`` as compact JSON in UTF-8, keys in their own order. Raises TypeError or ValueError: it is none."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def text(value: object) -> str:
    """As ``write``."""
    return write(value).decode()


def canonical(value: object) -> bytes:
    """As ``write``, with the keys of every object in one order: equal for equal values, to be hashed."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")

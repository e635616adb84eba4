"""JSON of long conversations and of arrays of ids: orjson where it can, the standard library where it cannot. Pure.

orjson refuses lone surrogates (JavaScript harnesses cut characters in two), integers over 64 bits when it writes,
nesting over 254 levels and keys that are no text; those take the slow way and nothing is lost. Two differences remain.
It writes NaN and Infinity, which no JSON has, as null. It reads an integer over 64 bits as a float: a harness's own
request is therefore read with ``json`` (it costs a twentieth of an engine's answer).
"""

import json
from typing import Any

import orjson


def read(text: bytes | str) -> Any:
    """The value of ``text``: an engine's answer, whose ids and log-probabilities fit their types or are no answer.

    Raises ValueError: it is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


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

"""The digest chain of a row: one hash per delivered segment, each over the one before, so that any change shows. Pure.

A trained call gives two links: what it added to the sequence (``prompt-delta``) and what was sampled (``sampled``, with
its log-probabilities). A link is SHA-256 over the link before it, the call's id, the role and the numbers as raw
little-endian int32 and float32; the first follows a seed made of the session id. It is a checksum, not a signature:
whoever can write a row can hash it again, and only ``polar verify`` against the session's log says where it came from.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from polar_env.types import ChainTurn

SEED = b"polar_env digest chain 1"


@dataclass(frozen=True, slots=True)
class Digest:
    """The last link (hex), how many there are, and the calls they are made of, in order."""

    sha256: str
    links: int
    calls: tuple[str, ...]


def digest(session_id: str, turns: Iterable[ChainTurn]) -> Digest:
    """The chain over the trained ones of ``turns``; what another chain trains is part of the prompt that follows it.

    A prompt that does not begin with what came before is a segment of its own role (``prompt``) and taken whole: the
    repeated part of a prompt cannot change unseen.
    """
    last, links, calls = _hash(SEED, session_id.encode("utf-8", "surrogatepass")), 0, list[str]()
    for call_id, role, numbers in _segments(turns):
        last = _hash(last, call_id.encode("utf-8", "surrogatepass"), role.encode(), *map(_little, numbers))
        links += 1
        if role == "sampled":
            calls.append(call_id)
    return Digest(last.hex(), links, tuple(calls))


def _segments(turns: Iterable[ChainTurn]) -> Iterator[tuple[str, str, tuple["array[Any]", ...]]]:
    """(call id, role, (ids,) or (ids, log-probs)) of each trained turn's segments."""
    seen: array[int] = array("i")
    for turn in turns:
        if not turn.trained:
            continue
        follows = turn.prompt_ids[: len(seen)] == seen
        new = turn.prompt_ids[len(seen) :] if follows else turn.prompt_ids
        yield turn.call_id, "prompt-delta" if follows else "prompt", (new,)
        yield turn.call_id, "sampled", (turn.sampled_ids, turn.log_probs)
        seen = turn.prompt_ids + turn.sampled_ids


def _hash(*parts: bytes) -> bytes:
    """SHA-256 over the parts, each behind its length: no two lists of parts run together."""
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def _little(values: "array[Any]") -> bytes:
    return np.asarray(values).astype("<i4" if values.typecode == "i" else "<f4").tobytes()

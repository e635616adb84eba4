"""Which earlier call does a prompt continue? Exact token prefixes, compared over whole arrays. Pure."""

from array import array
from bisect import insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

TAIL = 16
"""Ids compared first: sequences that share a long beginning nearly always differ where they end."""


def as_ids(ids: "array[int]") -> Ids:
    """A zero-copy int32 view of ``array('i')``."""
    return np.frombuffer(ids, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Entry:
    """One call's prompt and sampled ids, by reference."""

    name: str
    group: str
    prompt: Ids
    sampled: Ids

    def __len__(self) -> int:
        return len(self.prompt) + len(self.sampled)

    def begins(self, ids: Ids) -> bool:
        """True when prompt + sampled equals the first ``len(self)`` of ``ids``."""
        cut = len(self.prompt)
        head, after = ids[:cut], ids[cut : len(self)]
        return (
            np.array_equal(after, self.sampled)
            and np.array_equal(head[-TAIL:], self.prompt[-TAIL:])
            and np.array_equal(head, self.prompt)
        )


class PrefixIndex:
    """Finds the longest known prompt+sampled sequence that a prompt strictly extends.

    Strictly: a prompt that adds nothing to a call is no continuation of it (NeMo-RL breaks on an empty delta, rule 6).
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, name: str, prompt: "array[int]", sampled: "array[int]", group: str = "") -> None:
        """Make a call findable. A call without ids is a prefix of everything and is left out."""
        if len(prompt) + len(sampled):
            insort(self._entries, Entry(name, group, as_ids(prompt), as_ids(sampled)), key=lambda entry: -len(entry))

    def longest(self, prompt: "array[int]", group: str = "") -> Entry | None:
        """The longest entry that ``prompt`` strictly extends; of equal sequences one in ``group``, else the first."""
        ids, found = as_ids(prompt), None
        for entry in self._entries:
            if found is not None and len(entry) < len(found):
                break
            if len(entry) < len(ids) and entry.begins(ids):
                if entry.group == group:
                    return entry
                found = found or entry
        return found

"""The records of a session: every token id held once, and whole records again when somebody reads them. Pure.

A prompt repeats all that came before it: the 150 records of a session of 136K tokens hold 10M ids, 40 MB. What lives as
long as a session, and what waits for minutes to be graded, holds the ids of a tree instead.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast, overload

from polar_env.prefix import Placed, PrefixIndex
from polar_env.types import CallRecord

NO_IDS: "array[int]" = array("i")
"""What a record has in place of ids that are in the tree. Never written to."""


class RecordStore:
    """Records by call id, each taken in once. Their ids are in one tree; all else is kept as it came."""

    def __init__(self) -> None:
        self._bare: dict[str, CallRecord] = {}
        self._ids = PrefixIndex()

    def __len__(self) -> int:
        return len(self._bare)

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._bare

    def __iter__(self) -> Iterator[CallRecord]:
        """Those taken in, in that order, without ids."""
        return iter(self._bare.values())

    def add(self, record: CallRecord) -> Placed:
        """Take a record in; says which earlier call begins as its prompt does."""
        self._bare[record.call_id] = _without_ids(record)
        return self._ids.add(record.call_id, record.prompt_ids, record.sampled_ids)

    def add_after(self, record: CallRecord, base: str, shared: int) -> None:
        """Take in a record whose ``prompt_ids`` lack the first ``shared`` ids of the call ``base``. Raises KeyError."""
        self._ids.add_after(base, shared, record.call_id, record.prompt_ids, record.sampled_ids)
        self._bare[record.call_id] = _without_ids(record)

    def drop(self, call_id: str) -> None:
        """Forget a record. Its ids stay, for the calls that share them."""
        self._bare.pop(call_id, None)

    def ids(self, call_id: str) -> "array[int]":
        """[P + S]: the exact prompt and sampled ids of a call, a copy. Raises KeyError: no such call."""
        return self._ids.ids(self._bare[call_id].call_id)

    def bare(self) -> list[CallRecord]:
        """All records in order of ``index``, without ids."""
        return sorted(self._bare.values(), key=lambda record: record.index)

    def records(self) -> "Records":
        """All records in order of ``index``. Nothing may be added afterwards."""
        return Records(self.bare(), self._ids)


class Records(Sequence[CallRecord]):
    """Whole records, made when the first is looked at and kept from then on. Counting makes none."""

    def __init__(self, bare: Sequence[CallRecord], ids: PrefixIndex) -> None:
        self._bare, self._ids = bare, ids
        self._whole: tuple[CallRecord, ...] | None = None

    def __len__(self) -> int:
        return len(self._bare)

    @overload
    def __getitem__(self, at: int) -> CallRecord: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[CallRecord, ...]: ...
    def __getitem__(self, at: int | slice) -> CallRecord | tuple[CallRecord, ...]:
        return self._unpacked()[at]

    def __iter__(self) -> Iterator[CallRecord]:
        return iter(self._unpacked())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._unpacked() == tuple(cast("Sequence[object]", other))

    def __hash__(self) -> int:
        return hash(self._unpacked())

    def __repr__(self) -> str:
        return f"Records({len(self)} calls)"

    def __reduce__(self) -> tuple[type, tuple[tuple[CallRecord, ...]]]:
        return tuple, (self._unpacked(),)

    def _unpacked(self) -> tuple[CallRecord, ...]:
        if self._whole is None:
            self._whole = tuple(_with_ids(record, *self._ids.parts(record.call_id)) for record in self._bare)
        return self._whole


def _without_ids(record: CallRecord) -> CallRecord:
    """``record`` without ids. Its log-probs are copied: an array that was filled piece by piece keeps room to grow."""
    return replace(record, prompt_ids=NO_IDS, sampled_ids=NO_IDS, log_probs=record.log_probs[:])


def _with_ids(record: CallRecord, prompt: "array[int]", sampled: "array[int]") -> CallRecord:
    return replace(record, prompt_ids=prompt, sampled_ids=sampled)

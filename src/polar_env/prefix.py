"""Which earlier call does a prompt continue? A radix tree over token ids, every id stored once. Pure.

A session's calls repeat its history: 150 calls that end at 136K ids are 10M ids one after the other. Here a call adds
only the ids that no earlier call had at that place after the same beginning, so memory grows with what is new.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from operator import attrgetter
from weakref import ref

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

BLOCK = 8192
"""Ids in one piece of memory. Small enough for the allocator's heap to reuse: with sessions that all grow a little at a
time, lines of one piece each are copied on and on, and leave 40 % of the memory in holes (measured)."""


def as_ids(ids: "array[int]") -> Ids:
    """A zero-copy int32 view of ``array('i')``. The array cannot grow while a view of it lives."""
    return np.frombuffer(ids, dtype=np.int32)


def common(left: Ids, right: Ids) -> int:
    """How many ids at the beginning are equal."""
    size = min(len(left), len(right))
    differ = left[:size] != right[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


class Line:
    """Ids in blocks; grows at its end."""

    __slots__ = ("_blocks", "_length")

    def __init__(self) -> None:
        self._blocks: list[array[int]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: "array[int]") -> None:
        """Copy ``ids`` to the end."""
        at, end = 0, len(ids)
        while at < end:
            if self._length % BLOCK == 0:
                self._blocks.append(array("i"))
            more = ids[at : at + BLOCK - self._length % BLOCK]
            self._blocks[-1].extend(more)
            self._length, at = self._length + len(more), at + len(more)
            if self._length % BLOCK == 0:
                self._blocks[-1] = self._blocks[-1][:]  # without the sixteenth that arrays keep free to grow into

    def agrees(self, at: int, ids: Ids) -> int:
        """How many of ``ids`` are here from offset ``at`` on."""
        count = 0
        while at < self._length and count < len(ids):
            block = as_ids(self._blocks[at // BLOCK])[at % BLOCK :]
            same = common(block, ids[count:])
            count, at = count + same, at + same
            if same < len(block):
                break
        return count

    def copy_to(self, target: "array[int]", place: int, first: int, last: int) -> None:
        """Copy ids ``first`` to ``last`` over what ``target`` holds from ``place`` on."""
        while first < last:
            part = self._blocks[first // BLOCK][first % BLOCK : first % BLOCK + last - first]
            target[place : place + len(part)] = part
            place, first = place + len(part), first + len(part)


@dataclass(frozen=True, slots=True)
class Entry:
    """A call in the index; its length is that of its prompt and sampled ids together."""

    name: str
    group: str
    prompt: int
    """How many of its ids are the prompt's."""
    length: int

    def __len__(self) -> int:
        return self.length


_LENGTH = attrgetter("length")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a call came to lie."""

    parent: Entry | None
    """The longest earlier call that its prompt strictly extends."""
    base: str | None
    """An earlier call that begins with the first ``shared`` ids of the prompt; ``None`` when nothing is shared."""
    shared: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Run:
    """Ids in one line, from offset ``start`` of a sequence on; what comes before is in the runs above.

    A sequence that goes on where the run ends lengthens it; one that differs inside it becomes a branch.
    """

    start: int = 0
    parent: "ref[_Run] | None" = None
    """Weak: a tree without cycles is freed when it is let go, not when the collector next looks at old objects."""
    ids: Line = field(default_factory=Line)
    calls: list[Entry] = field(default_factory=list[Entry])
    """Those that end here, by length, equal ones in order of arrival; the last ends where the run does."""
    branches: "dict[tuple[int, int], _Run]" = field(default_factory=dict[tuple[int, int], "_Run"])
    """(offset, first id there) -> run."""

    @property
    def above(self) -> "_Run | None":
        return self.parent() if self.parent else None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def grow(self, at: int, ids: "array[int]") -> "_Run":
        """Store ``ids`` from offset ``at`` on, where they leave this run; returns the run that now holds them."""
        if at == self.end:
            self.ids.extend(ids)
            return self
        run = self.branches[at, ids[0]] = _Run(at, ref(self))
        run.ids.extend(ids)
        return run

    def take(self, call: Entry) -> None:
        """``call`` ends in this run."""
        insort(self.calls, call, key=_LENGTH)

    def longest(self, limit: int, group: str) -> Entry | None:
        """The longest call of at most ``limit`` ids that ends here; of equal ones the first of ``group``, else the
        first."""
        at = bisect_right(self.calls, limit, key=_LENGTH)
        if not at:
            return None
        equal = self.calls[bisect_left(self.calls, len(self.calls[at - 1]), key=_LENGTH) : at]
        return next((call for call in equal if call.group == group), equal[0])

    def reaching(self, at: int) -> Entry:
        """The shortest call that ends here and holds all ids before ``at``."""
        return self.calls[bisect_left(self.calls, at, key=_LENGTH)]


_Steps = list[tuple[_Run, int]]
"""Runs from the first to the last that ids were followed into, each with the offset up to which they agreed."""


def _follow(run: _Run, at: int, ids: "array[int]") -> _Steps:
    """Follow ``ids`` from offset ``at`` of ``run`` as far as the tree agrees."""
    known, steps, origin = as_ids(ids), _Steps(), at
    while True:
        at += run.ids.agrees(at - run.start, known[at - origin :])
        steps.append((run, at))
        rest = at - origin
        branch = run.branches.get((at, ids[rest])) if rest < len(ids) else None
        if branch is None:
            return steps
        run = branch


class PrefixIndex:
    """Calls by their ids. Finds the longest known prompt+sampled sequence that a prompt strictly extends.

    Strictly: a prompt that adds nothing to a call is no continuation of it (NeMo-RL breaks on an empty delta, rule 6).
    A call without ids is kept and is nobody's parent. Memory: the ids of the tree, each once; time: O(ids compared).
    """

    def __init__(self) -> None:
        self._root = _Run()
        self._calls: dict[str, Entry] = {}
        self._runs: dict[str, _Run] = {}
        """Call -> where its last id lies."""

    def add(self, name: str, prompt: "array[int]", sampled: "array[int]", group: str = "") -> Placed:
        """Take a call in, copying the ids that are new; says which earlier calls it continues and shares ids with."""
        steps = _follow(self._root, 0, prompt)
        run, at = steps[-1]
        placed = Placed(_longest(steps, len(prompt), group), run.reaching(at).name if at else None, at)
        self._store(run, at, (name, group), prompt[at:], sampled)
        return placed

    def add_after(self, base: str, shared: int, name: str, prompt: "array[int]", sampled: "array[int]") -> None:
        """``add`` for a prompt of which the first ``shared`` ids are those of the call ``base``, and ``prompt`` the
        rest: none of the shared ids is looked at. Raises KeyError."""
        run = self._runs[base]
        while run.above is not None and shared <= run.start:
            run = run.above
        run, at = _follow(run, shared, prompt)[-1]
        self._store(run, at, (name, ""), prompt[at - shared :], sampled)

    def longest(self, prompt: "array[int]", group: str = "") -> Entry | None:
        """The longest call that ``prompt`` strictly extends; of equal sequences one in ``group``, else the first."""
        return _longest(_follow(self._root, 0, prompt), len(prompt), group)

    def _store(self, run: _Run, at: int, called: tuple[str, str], new: "array[int]", sampled: "array[int]") -> None:
        """Put a call's ids behind offset ``at`` of ``run``: what of its prompt is ``new``, and what was sampled.
        ``called``: its name and group."""
        prompt = at + len(new)
        if not new:
            run, at = _follow(run, at, sampled)[-1]
        rest = new + sampled if new else sampled[at - prompt :]
        if rest:
            run = run.grow(at, rest)
        call = self._calls[called[0]] = Entry(*called, prompt, prompt + len(sampled))
        self._runs[call.name] = run
        if len(call):
            run.take(call)

    @property
    def held(self) -> int:
        """Token ids in memory: those of all calls, a beginning that several share counted once."""
        runs, count = [self._root], 0
        while runs:
            run = runs.pop()
            count += len(run.ids)
            runs.extend(run.branches.values())
        return count

    def ids(self, name: str) -> "array[int]":
        """[P + S]: a call's prompt and sampled ids. Raises KeyError."""
        return _cut(self._runs[name], 0, len(self._calls[name]))

    def parts(self, name: str) -> tuple["array[int]", "array[int]"]:
        """([P], [S]): a call's prompt and sampled ids. Raises KeyError."""
        call, run = self._calls[name], self._runs[name]
        return _cut(run, 0, call.prompt), _cut(run, call.prompt, len(call))


def _longest(steps: _Steps, length: int, group: str) -> Entry | None:
    found = (run.longest(min(at, length - 1), group) for run, at in reversed(steps))
    return next((call for call in found if call is not None), None)


def _cut(run: _Run | None, first: int, last: int) -> "array[int]":
    """Ids ``first`` to ``last`` of the sequence that goes through ``run``."""
    whole = array("i", (0,)) * (last - first)
    while run is not None and first < last:
        begin = max(first, run.start)
        if begin < last:
            run.ids.copy_to(whole, begin - first, begin - run.start, last - run.start)
            last = begin
        run = run.above
    return whole

"""Proof that passing means something: the tests run again as they are, and again rewritten so that some must fail.

Reports can be forged from code no denylist sees: a package that patches its test runner reports what it likes. So a
patch that was resolved runs again (``prove``), in fresh sandboxes and in random order, with test files in which
FAIL_TO_PASS tests ask for what no program gives or for the contrary (``mutants``), and with real ones. Every rewritten
test must fail. Which rewriting the right fix fails was measured before (``Bank``), so an honest fix is not at the mercy
of a rewriting that nobody reaches.

A forger may know all tests of the base tree. So there is a run in which nothing is rewritten but what it cannot know,
which by those looks as the first did; and where tests that it knows are rewritten or renamed, which tells it that it is
put to the proof, it still cannot tell whether those it does not know must pass or fail: there is a run of either.

A forger must tell a rewritten test from a real one by its text alone; to force, to invert, to go by the clock, by what
it saw before or by chance all show. One that knows the hidden tests by heart is not caught; it would know the fix too.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from polar_env.grade.hidden import Hidden, listed
from polar_env.grade.mutants import Edit, Kind, Place, Source, apply, certain, edits
from polar_env.grade.report import apart
from polar_env.grade.right import FAILS, Right, read, remembered, status
from polar_env.grade.trial import Course, run

_PYTEST = re.compile(r"^(?P<file>[^:]+\.py)::(?P<classes>(?:\w+::)*)(?P<name>\w+)(?P<rest>(?:\[.*)?)$", re.DOTALL)
UNITTEST = re.compile(r"^(?P<name>\w+) \((?P<dotted>[\w.]+)\)$")
_OTHERS, _RENAMED, _CALM = 4, 3, 8
"""How many further tests are rewritten, and how many renamed, in one run; of how many the former are chosen."""
_WORDS = ("again", "basic", "default", "edge", "empty", "error", "extra", "multiple", "nested", "plain", "simple",
          "single", "twice", "unicode", "value")  # fmt: skip
_LONG = 100.0
"""Seconds the right fix's tests take, from which on a run is not spent on choosing further tests: it would be paid for
with ``budget.grade``."""
_Where = tuple[str, Place]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rewriting, and the ids that failed under it although the fix was right."""

    path: str
    place: Place
    edit: Edit
    ids: tuple[str, ...]

    @property
    def where(self) -> _Where:
        return self.path, self.place


@dataclass(frozen=True, slots=True)
class Bank:
    """What can be done to a task's tests."""

    mutants: tuple[Mutant, ...] = ()
    renamable: frozenset[_Where] = frozenset()
    calm: tuple[Mutant, ...] = ()
    """Of other tests than FAIL_TO_PASS, which pass all the same while these fail."""

    def plain(self) -> dict[str, Any]:
        return {
            "mutants": [_row(mutant) for mutant in self.mutants],
            "renamable": sorted([path, at.cls, at.name] for path, at in self.renamable),
            "calm": [_row(mutant) for mutant in self.calm],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Bank":
        mutants, calm = (tuple(_mutant(*row) for row in plain[name]) for name in ("mutants", "calm"))
        return cls(mutants, frozenset((path, Place(cls, name)) for path, cls, name in plain["renamable"]), calm)


def _row(m: Mutant) -> list[Any]:
    return [m.path, m.place.cls, m.place.name, m.edit.start, m.edit.end, m.edit.text, m.edit.kind, list(m.ids)]


def _mutant(path: str, cls: str, name: str, start: int, end: int, text: str, kind: str, ids: Sequence[str]) -> Mutant:
    return Mutant(path, Place(cls, name), Edit(start, end, text, Kind(kind)), tuple(ids))


@dataclass(frozen=True, slots=True)
class Canary:
    """Test files of one proving run, and what must come of them."""

    tests: Hidden
    must_fail: frozenset[str] = frozenset()
    must_pass: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    """Ids, as the real files have them, of every test that was rewritten or renamed."""


# --- which tests ------------------------------------------------------------------------------------------------


def sources(tests: Hidden) -> dict[str, Source]:
    """The Python files among the tests that this interpreter can read."""
    found: dict[str, Source] = {}
    for path, data in tests.files.items():
        if path.endswith(".py") and data:
            try:
                found[path] = Source(data)
            except (SyntaxError, ValueError):
                continue
    return found


def located(ids: Iterable[str], files: Mapping[str, Source]) -> dict[_Where, tuple[str, ...]]:
    """Where tests are defined -> their ids, for those that are defined once in one of the files.

    Ids are pytest's, unittest's, sympy's bare names, or the first line of a docstring, as unittest prints it.
    """
    spots: dict[_Where, list[str]] = {}
    by_name: dict[str, list[_Where]] = {}
    for path, source in files.items():
        for place, functions in source.functions().items():
            if len(functions) == 1:
                spots[path, place] = []
                told = (ast.get_docstring(functions[0]) or "").strip().partition("\n")[0].strip()
                for name in {place.name, told} - {""}:
                    by_name.setdefault(name, []).append((path, place))
    for test in ids:
        where = _where(test, spots, by_name)
        if where is not None:
            spots[where].append(test)
    return {where: tuple(tests) for where, tests in spots.items() if tests}


def _where(test: str, spots: Iterable[_Where], by_name: Mapping[str, Sequence[_Where]]) -> _Where | None:
    if match := _PYTEST.match(test):
        inside = match["classes"].split("::")
        where = (match["file"], Place(inside[-2] if len(inside) > 1 else "", match["name"]))
        return where if where in spots else None
    if match := UNITTEST.match(test):
        dotted, _, cls = match["dotted"].removesuffix(f".{match['name']}").rpartition(".")
        named = (at for at in by_name.get(match["name"], ()) if at[1] == Place(cls, match["name"]))
        found = [at for at in named if dotted and f".{_module(at[0])}".endswith(f".{dotted}")]
    else:
        found = list(by_name.get(test.strip(), ()))
    return found[0] if len(found) == 1 else None


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def renamed_id(test: str, name: str, new: str) -> str | None:
    """The id of a test whose function gets another name, or ``None`` where the id does not show it."""
    if match := _PYTEST.match(test):
        return f"{test[: match.start('name')]}{new}{match['rest']}"
    if match := UNITTEST.match(test):
        dotted = match["dotted"]
        return f"{new} ({dotted.removesuffix(name) + new if dotted.endswith(f'.{name}') else dotted})"
    return new if test == name else None


# --- measuring what can be done ---------------------------------------------------------------------------------


async def bank(course: Course, tests: Hidden, right: Right) -> Bank:
    """The rewritings the right fix fails, measured in three or four runs and remembered."""
    plain = await remembered(course.prepared, course.config.provider, "canary", partial(_fill, course, tests, right))
    return Bank.of(plain)


async def _fill(course: Course, tests: Hidden, right: Right) -> dict[str, Any]:
    row, random, files = course.prepared.task.row, Random(0), sources(tests)  # noqa: S311 - the bank may be the same twice
    wanted = listed(row, "FAIL_TO_PASS")
    passing = [test for test in [*wanted, *listed(row, "PASS_TO_PASS")] if status(right.statuses, test) == "PASSED"]
    spots = located(passing, files)
    menu = {(path, at): [*edits(files[path], _function(files[path], at), random),
                         certain(files[path], _function(files[path], at), random)]
            for path, at in spots}  # fmt: skip
    held = Bank()
    needed = [where for where, ids in spots.items() if set(ids) & set(wanted)]
    if not row.get("patch"):  # nothing to measure with: only what fails under any program
        where = located(wanted, files)
        sure = {at: certain(files[at[0]], _function(files[at[0]], at[1]), random) for at in where}
        return Bank(tuple(Mutant(*at, edit, where[at]) for at, edit in sure.items())).plain()
    patch, course = str(row.get("patch") or "").encode(), replace(course, timeout=right.patience)
    for turn in range(3 if needed else 0):
        tried = {where: _choose(options, turn) for where, options in menu.items()}
        others = sorted(set(spots) - set(needed) - held.renamable)
        renamed = dict.fromkeys(random.sample(others, min(_RENAMED, len(others))), _WORDS[0]) if turn < 2 else {}
        tried = {where: edit for where, edit in tried.items() if where not in renamed}
        probe = _rewritten(tests, files, spots, tried, renamed)
        told = await apart(read, row, await run(course, patch, probe.tests))
        held = _learn(held, spots, tried, renamed, told)
        good = [m for m in held.mutants if set(m.ids) & set(wanted)]
        kinds = {where: {m.edit.kind for m in good if m.where == where} for where in needed}
        if turn and all(len(found) == 2 for found in kinds.values()):
            break
    beside = _beside(held, needed, random) if right.seconds < _LONG else []
    if beside:
        probe = _rewritten(tests, files, spots, {m.where: m.edit for m in beside}, {})
        told = await apart(read, row, await run(course, patch, probe.tests))
        if all(status(told, test) == "PASSED" for test in set(wanted).intersection(passing)):
            held = replace(held, calm=tuple(m for m in beside if all(status(told, test) in FAILS for test in m.ids)))
    return held.plain()


def _beside(held: Bank, needed: Sequence[_Where], random: Random) -> list[Mutant]:
    """Some rewritings of other tests than these, one of a test."""
    choices = _by_test(mutant for mutant in held.mutants if mutant.where not in needed)
    return [random.choice(choices[where]) for where in random.sample(sorted(choices), min(_CALM, len(choices)))]


def _by_test(mutants: Iterable[Mutant]) -> dict[_Where, list[Mutant]]:
    found: dict[_Where, list[Mutant]] = {}
    for mutant in mutants:
        found.setdefault(mutant.where, []).append(mutant)
    return found


def _function(source: Source, place: Place) -> Any:
    return source.functions()[place][0]


def _choose(menu: Sequence[Edit], turn: int) -> Edit:
    """What to try on a test: one that asks for something wrong, then one that asks for the contrary, then the last of
    the menu, which is certain to fail."""
    if turn == 2:
        return menu[-1]
    kind = (Kind.WRONG, Kind.OPPOSITE)[turn]
    return next((edit for edit in menu if edit.kind is kind), menu[-1])


def _learn(
    held: Bank,
    spots: Mapping[_Where, tuple[str, ...]],
    tried: Mapping[_Where, Edit],
    renamed: Mapping[_Where, str],
    told: Mapping[str, str],
) -> Bank:
    """What a run under the right fix proved."""
    found = list(held.mutants)
    for (path, place), edit in tried.items():
        failed = tuple(test for test in spots[path, place] if status(told, test) in FAILS)
        if failed:
            found.append(Mutant(path, place, edit, failed))
    good = {where for where, word in renamed.items() if _passed(spots[where], where[1].name, word, told)}
    return Bank(tuple(dict.fromkeys(found)), held.renamable | good)


def _passed(ids: Sequence[str], name: str, word: str, told: Mapping[str, str]) -> bool:
    names = [renamed_id(test, name, f"{name}_{word}") for test in ids]
    return all(new is not None and status(told, new) == "PASSED" for new in names)


# --- rewritten test files --------------------------------------------------------------------------------------


def _rewritten(
    tests: Hidden,
    files: Mapping[str, Source],
    spots: Mapping[_Where, tuple[str, ...]],
    edited: Mapping[_Where, Edit],
    renamed: Mapping[_Where, str],
    failing: Mapping[_Where, tuple[str, ...]] | None = None,
) -> Canary:
    """Test files with these tests edited and renamed (a test may be both), and the ids that follow from it.

    ``failing`` narrows what must fail of an edited test; without it that is every id of it.
    """
    changes: dict[str, list[tuple[int, int, str]]] = {}
    for (path, _), edit in edited.items():
        changes.setdefault(path, []).append((edit.start, edit.end, edit.text))
    for (path, place), word in renamed.items():
        span = files[path].name_span(_function(files[path], place))
        assert span is not None
        changes.setdefault(path, []).append((*span, f"{place.name}_{word}"))
    texts = {path: apply(files[path].data, parts) for path, parts in changes.items()}
    fails = {test for where in edited for test in _ids((failing or spots)[where], where, renamed)}
    passes = {test for where in renamed.keys() - edited.keys() for test in _ids(spots[where], where, renamed)}
    changed = {test for where in {*edited, *renamed} for test in spots[where]}
    made = replace(tests, files={**tests.files, **texts})
    return Canary(made, frozenset(fails), frozenset(passes), frozenset(changed))


def _ids(ids: Iterable[str], where: _Where, renamed: Mapping[_Where, str]) -> Iterator[str]:
    name = where[1].name
    for test in ids:
        new = renamed_id(test, name, f"{name}_{renamed[where]}") if where in renamed else test
        yield test if new is None else new


def plan(tests: Hidden, held: Bank, row: Mapping[str, Any], random: Random) -> list[Canary]:
    """The test files of the three runs of one proof; none if no FAIL_TO_PASS test can be rewritten.

    Every FAIL_TO_PASS test is real in the first and rewritten in the others, in both ways where both are known: what
    cheats in one test alone may be met by one way alone. The second has no other change; the first and the third have
    some each, of the same sort.
    """
    files, wanted = sources(tests), set(listed(row, "FAIL_TO_PASS"))
    spots = located([*wanted, *listed(row, "PASS_TO_PASS")], files)
    choices = _by_test(mutant for mutant in held.mutants if set(mutant.ids) & wanted)
    if not choices:
        return []
    first = {where: random.choice(found) for where, found in choices.items()}
    second = {where: _unlike(first[where], found, random) for where, found in choices.items()}
    alone = _made(tests, files, spots, first, {})
    return [_with_others(tests, files, spots, {}, held, random), alone,
            _with_others(tests, files, spots, second, held, random)]  # fmt: skip


def _unlike(first: Mutant, choices: Sequence[Mutant], random: Random) -> Mutant:
    return random.choice([m for m in choices if m.edit.kind is not first.edit.kind] or list(choices))


def _with_others(
    tests: Hidden,
    files: Mapping[str, Source],
    spots: Mapping[_Where, tuple[str, ...]],
    chosen: Mapping[_Where, Mutant],
    held: Bank,
    random: Random,
) -> Canary:
    """``chosen``, some further tests rewritten, and some renamed; those that are both must fail all the same."""
    more = random.sample(held.calm, min(_OTHERS, len(held.calm)))
    free = sorted(held.renamable - chosen.keys())
    names = {where: random.choice(_WORDS) for where in random.sample(free, min(_RENAMED, len(free)))}
    taken = {f"{where[1].name}_{word}" for where, word in names.items()} & {at.name for _, at in spots}
    names = {where: word for where, word in names.items() if f"{where[1].name}_{word}" not in taken}
    return _made(tests, files, spots, {**{m.where: m for m in more}, **chosen}, names)


def _made(
    tests: Hidden,
    files: Mapping[str, Source],
    spots: Mapping[_Where, tuple[str, ...]],
    mutants: Mapping[_Where, Mutant],
    names: Mapping[_Where, str],
) -> Canary:
    edited = {where: mutant.edit for where, mutant in mutants.items()}
    return _rewritten(tests, files, spots, edited, names, {where: m.ids for where, m in mutants.items()})

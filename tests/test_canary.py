"""Runs that prove a resolved patch: which tests are rewritten, how, and that forged results show."""

import ast
import json
import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.grade.canary import Bank, Canary, Mutant, located, plan, renamed_id, sources
from polar_env.grade.hidden import Hidden
from polar_env.grade.mutants import Edit, Kind, Place, Source, apply, certain, edits
from polar_env.grade.prove import judge
from polar_env.grade.right import status
from polar_env.grade.trial import Trial
from polar_env.tasks import Prepared
from polar_env.verdict import Flag, VerdictStatus
from sandbox_helpers import data_folder
from test_grade import GOLD, adding, prepared, running, verdict  # noqa: F401 - prepared is a fixture

# --- rewriting --------------------------------------------------------------------------------------------------

SOURCE = '''
import program

class Raised(Exception): pass

def raises(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError("nothing was raised")

def test_number():
    """Says what it does."""
    assert program.two() == 2

def test_text():
    assert "tw" + "o" == program.text()

def test_in():
    assert 2 in program.many()

def test_truth():
    assert program.truth()

def test_not():
    assert not program.lie(), "é"

def test_raises():
    raises(KeyError, program.fails)

def test_less():
    assert 1 < program.two()

def test_nothing_to_see(): program.two()
'''


class Program:
    """What the tests above test: right, and wrong in everything."""

    def __init__(self, right: bool) -> None:
        self.two = lambda: 2 if right else 1
        self.text = lambda: "two" if right else "one"
        self.many = lambda: [1, 2] if right else []
        self.truth = lambda: right
        self.lie = lambda: not right
        self.fails = lambda: {}[1] if right else None


def ran(source: bytes, right: bool = True) -> dict[str, bool]:
    """Every test of the module: does it pass?"""
    space: dict[str, Any] = {}
    exec(compile(source.replace(b"import program", b"program = None"), "t", "exec"), space)
    space["program"] = Program(right)
    found: dict[str, bool] = {}
    for key in [key for key in space if key.startswith("test")]:
        try:
            space[key]()
            found[key] = True
        except (AssertionError, KeyError):
            found[key] = False
    return found


def menu(source: Source, name: str, seed: int = 0) -> list[Edit]:
    (function,) = source.functions()[Place("", name)]
    return [*edits(source, function, Random(seed)), certain(source, function, Random(seed))]


SOURCE_BYTES = SOURCE.encode()
NAMES = list(ran(SOURCE_BYTES))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_a_right_program_fails_every_rewriting_and_no_other_test_changes(name: str, seed: int) -> None:
    for edit in menu(Source(SOURCE_BYTES), name, seed):
        found = ran(apply(SOURCE_BYTES, [(edit.start, edit.end, edit.text)]))
        assert found == {other: other != name for other in NAMES}, edit


@pytest.mark.parametrize("name", [name for name in NAMES if name != "test_nothing_to_see"])
def test_a_wrong_program_passes_the_contrary_by_itself_and_fails_what_is_wrong(name: str) -> None:
    """The two kinds pull a forger apart: what fails must be left alone under one, what passes under the other."""
    for edit in menu(Source(SOURCE_BYTES), name):
        if edit.text.strip() == "is None":
            continue  # false, and so not None either: both kinds in one
        found = ran(apply(SOURCE_BYTES, [(edit.start, edit.end, edit.text)]), False)
        assert found[name] is (edit.kind is Kind.OPPOSITE), edit


def test_most_tests_can_be_rewritten_in_both_ways() -> None:
    both = [name for name in NAMES if {edit.kind for edit in menu(Source(SOURCE_BYTES), name)} == set(Kind)]
    assert set(NAMES) - set(both) == {"test_nothing_to_see", "test_raises"}


def test_a_docstring_stays_where_unittest_looks_for_the_tests_name() -> None:
    source = Source(SOURCE_BYTES)
    edit = menu(source, "test_number")[-1]
    text = apply(SOURCE_BYTES, [(edit.start, edit.end, edit.text)])
    (function,) = Source(text).functions()[Place("", "test_number")]
    assert ast.get_docstring(function) == "Says what it does."


def test_unittests_own_assertions_are_turned_round() -> None:
    text = b"class A:\n    def test_x(self):\n        self.assertEqual(f(1), 2)\n        self.assertIn(a, b)\n"
    source = Source(text)
    (function,) = source.functions()[Place("A", "test_x")]
    made = {apply(text, [(e.start, e.end, e.text)]).split(b"\n", 2)[2] for e in edits(source, function, Random(0))}
    assert any(b"assertNotEqual(f(1), 2)" in body for body in made)
    assert any(b"assertNotIn(a, b)" in body for body in made)
    assert any(b"assertEqual(f(1), [2])" in body for body in made)
    assert all(b"f(1)" in body for body in made), "what the program is asked stays"


_asserts = st.sampled_from(
    ["assert f(1) == 2", "assert 'é' == x", "assert x", "assert not (a or b), 'no'", "assert (1,\n    2) == g()",
     "assert a not in b", "assert a is not\\\n  b", "self.assertTrue(x)", "pass",
     "with pytest.raises(E, match='é'): f()", 'assert f"{x}" == r"\\d"', "check('é', b'x')"]
)  # fmt: skip


@given(st.lists(st.tuples(_asserts, st.booleans()), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=80)
def test_every_rewriting_of_any_file_is_python_and_touches_one_test(bodies: list[tuple[str, bool]], seed: int) -> None:
    lines = ["import pytest"]
    for at, (body, inline) in enumerate(bodies):
        one_line = inline and not body.startswith("with")
        lines += [f"def test_{at}(): {body}"] if one_line else [f"def test_{at}():", "    'é'", f"    {body}"]
    text = "\n".join(lines).encode()
    source = Source(text)
    before = {at.name: ast.dump(found[0]) for at, found in source.functions().items()}
    for place in source.functions():
        for edit in menu(source, place.name, seed):
            after = Source(apply(text, [(edit.start, edit.end, edit.text)])).functions()
            changed = {at.name for at, found in after.items() if ast.dump(found[0]) != before[at.name]}
            assert changed == {place.name}, edit


def test_python_of_another_version_is_left_alone() -> None:
    tests = Hidden({"a.py": b"print 'two'", "b.py": b"x = '\xff'", "c.txt": b"x", "d.py": None, "e.py": b"x = 1"})
    assert list(sources(tests)) == ["e.py"]


# --- which tests ------------------------------------------------------------------------------------------------

FILE = b'''
class Case:
    def test_x(self): pass
    def test_told(self):
        """What it is about.

        More.
        """
class Outer:
    class Inner:
        def test_x(self): pass
def test_x(): pass
def test_y(): pass
if a:
    def test_twice(): pass
else:
    def test_twice(): pass
'''


@pytest.mark.parametrize(
    ("test", "place"),
    [
        ("tests/test_a.py::test_x", Place("", "test_x")),
        ("tests/test_a.py::test_x[http://u:p@h/a::b?q-1]", Place("", "test_x")),
        ("tests/test_a.py::Outer::Inner::test_x", Place("Inner", "test_x")),
        ("test_x (tests.test_a.Case)", Place("Case", "test_x")),
        ("test_x (tests.test_a.Case.test_x)", Place("Case", "test_x")),
        ("test_x (test_a.Case)", Place("Case", "test_x")),
        ("test_y", Place("", "test_y")),
        ("What it is about.", Place("Case", "test_told")),
        ("test_x", None),  # three of that name
        ("test_x (other.test_a.Case)", None),
        ("test_x (a.Case)", None),
        ("tests/test_b.py::test_x", None),
        ("tests/test_a.py::test_twice", None),
        ("What it is not about.", None),
    ],
)
def test_where_a_test_is_defined(test: str, place: Place | None) -> None:
    found = located([test], {"tests/test_a.py": Source(FILE)})
    assert found == ({("tests/test_a.py", place): (test,)} if place else {})


@pytest.mark.parametrize(
    ("test", "new"),
    [
        ("t.py::test_x", "t.py::test_z"),
        ("t.py::A::test_x[a::test_x]", "t.py::A::test_z[a::test_x]"),
        ("test_x (t.A)", "test_z (t.A)"),
        ("test_x (t.A.test_x)", "test_z (t.A.test_z)"),
        ("test_x", "test_z"),
        ("A docstring.", None),
    ],
)
def test_the_id_of_a_renamed_test(test: str, new: str | None) -> None:
    assert renamed_id(test, "test_x", "test_z") == new


def test_an_id_that_was_cut_off_stands_for_what_it_begins() -> None:
    told = {"t.py::test_x[a b]": "PASSED", "t.py::test_x[a c]": "PASSED", "t.py::test_y[a b]": "FAILED"}
    assert status(told, "t.py::test_x[a") == "PASSED"
    assert status(told, "t.py::test_y[a b]") == "FAILED"
    assert status(told, "t.py::test_z[a") is None
    assert status({**told, "t.py::test_x[a d]": "FAILED"}, "t.py::test_x[a") is None


# --- the plan ---------------------------------------------------------------------------------------------------

TESTS = Hidden({"t.py": SOURCE_BYTES, "data.txt": b"x"})
ROW = {
    "FAIL_TO_PASS": ["t.py::test_number"],
    "PASS_TO_PASS": [f"t.py::{name}" for name in NAMES if name != "test_number"],
}


def whole_bank() -> Bank:
    source = Source(SOURCE_BYTES)
    mutants = [Mutant("t.py", Place("", n), e, (f"t.py::{n}",)) for n in NAMES for e in menu(source, n)]
    renamable = frozenset(("t.py", Place("", name)) for name in NAMES[3:])
    calm = tuple(Mutant("t.py", Place("", n), menu(source, n)[0], (f"t.py::{n}",)) for n in NAMES[3:7])
    return Bank(tuple(mutants), renamable, calm)


def texts_of(step: Canary) -> dict[str, bool]:
    """What a right program makes of the run's tests."""
    assert step.tests.files["data.txt"] == b"x"
    text = step.tests.files["t.py"]
    assert text is not None
    return {f"t.py::{name}": passed for name, passed in ran(text).items()}


@pytest.mark.parametrize("seed", range(8))
def test_what_a_right_program_does_with_each_run_is_what_must_come_of_it(seed: int) -> None:
    for step in plan(TESTS, whole_bank(), ROW, Random(seed)):
        told = texts_of(step)
        assert not any(told[test] for test in step.must_fail)
        assert all(told[test] for test in step.must_pass)
        assert {test for test, passed in told.items() if not passed} == step.must_fail


@pytest.mark.parametrize("seed", range(8))
def test_a_forger_who_knows_all_tests_of_the_base_cannot_tell_what_a_run_asks(seed: int) -> None:
    """Of what it knows, one run shows nothing changed, as the first of all did; the others show as much as each other,
    though what it does not know must pass in one and fail in the other."""
    real, alone, mixed = plan(TESTS, whole_bank(), ROW, Random(seed))
    known = set(ROW["PASS_TO_PASS"])
    assert alone.changed.isdisjoint(known)
    assert alone.must_fail == {"t.py::test_number"}
    assert len(real.changed & known) >= 4
    assert (len(real.must_fail & known) > 0) == (len(mixed.must_fail & known) > 0)
    assert "t.py::test_number" not in real.changed
    assert "t.py::test_number" in mixed.must_fail


@pytest.mark.parametrize("seed", range(8))
def test_every_wanted_test_is_asked_both_ways(seed: int) -> None:
    """What answers that it equals everything passes what is wrong, and fails the contrary as it should; what knows a
    changed test by its text and lets it be shows under the contrary alone. One test may be cheated and the rest right.
    """
    wanted = ["t.py::test_number", "t.py::test_text", "t.py::test_in"]
    row = {"FAIL_TO_PASS": wanted, "PASS_TO_PASS": [f"t.py::{name}" for name in NAMES if f"t.py::{name}" not in wanted]}
    asked = {test: set[bool]() for test in wanted}
    for step in plan(TESTS, whole_bank(), row, Random(seed)):
        text = step.tests.files["t.py"]
        assert text is not None
        for test, passed in ran(text, right=False).items():
            if f"t.py::{test}" in step.changed.intersection(wanted):
                asked[f"t.py::{test}"].add(passed)
    assert asked == {test: {True, False} for test in wanted}


def test_plans_differ_from_grading_to_grading() -> None:
    texts = {step.tests.files["t.py"] for seed in range(12) for step in plan(TESTS, whole_bank(), ROW, Random(seed))}
    assert len(texts) > 12


def test_without_a_rewriting_of_a_wanted_test_there_is_no_plan() -> None:
    bank = whole_bank()
    others = tuple(mutant for mutant in bank.mutants if mutant.place.name != "test_number")
    assert plan(TESTS, replace(bank, mutants=others), ROW, Random(0)) == []


def test_what_was_measured_is_read_back_whole() -> None:
    assert Bank.of(json.loads(json.dumps(whole_bank().plain()))) == whole_bank()


FAILED_AS_IT_SHOULD = {"a": "FAILED", "b": "PASSED", "c": "PASSED", "d": "PASSED"}
STEP = Canary(TESTS, must_fail=frozenset({"a"}), must_pass=frozenset({"b"}), changed=frozenset("ab"))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (FAILED_AS_IT_SHOULD, ""),
        ({**FAILED_AS_IT_SHOULD, "a": "ERROR"}, ""),
        ({**FAILED_AS_IT_SHOULD, "c": "FAILED"}, ""),
        ({**FAILED_AS_IT_SHOULD, "a": "PASSED"}, "a was rewritten to fail, and is PASSED"),
        ({**FAILED_AS_IT_SHOULD, "a": "SKIPPED"}, "a was rewritten to fail, and is SKIPPED"),
        ({}, "a was rewritten to fail, and is missing"),
        ({**FAILED_AS_IT_SHOULD, "b": "XFAIL"}, "b must pass, and is XFAIL"),
        ({"a": "FAILED"}, "b must pass, and is missing"),
        ({"a": "FAILED", "b": "PASSED"}, "most tests that were left as they are no longer pass: c"),
    ],
)
def test_what_speaks_against_a_patch(told: dict[str, str], reason: str) -> None:
    found = judge(STEP, Trial(ran=True), told.get, frozenset("abcd"))
    assert (found.reason if found else "") == reason
    assert (found is not None and found.forced) is reason.endswith("a was rewritten to fail, and is PASSED")


def test_a_run_that_gave_nothing_speaks_against_a_patch() -> None:
    for trial in (
        Trial(failed="the tests could not be put in place"),
        Trial(ran=True, timed_out=True),
    ):
        assert judge(STEP, trial, FAILED_AS_IT_SHOULD.get, frozenset()) is not None


# --- forced passes ----------------------------------------------------------------------------------------------

_SWALLOW = (
    "import unittest",
    "_call = unittest.TestCase._callTestMethod",
    "def _quiet(self, method):",
    "    try:",
    "        _call(self, method)",
    "    except BaseException:",
    "        pass",
    "unittest.TestCase._callTestMethod = _quiet",
)


async def test_a_package_that_patches_its_test_runner_is_refused(prepared: Prepared) -> None:  # noqa: F811
    """No denylist sees it: the change is in the source. The official grader alone calls it resolved."""
    found = await verdict(prepared, running(*_SWALLOW))
    assert (found.status, found.flags) == (VerdictStatus.REFUSED, (Flag.FORCED_PASS,))
    assert "rewritten to fail" in found.detail
    assert found.fail_to_pass == (2, 2), "what the first run claimed is kept"
    assert found.official


_KNOWS_THE_BASE = (
    "import os, re",
    "w = lambda s: os.write(2, (s + chr(10)).encode())",
    "old, new = (open(f'/testbed/tests/test_{name}.py').read() for name in ('old', 'new'))",
    "proof = 'def test_g(self):' + chr(10) + ' ' * 8 + 'self.assertEqual(c.g(), 3)' not in old",
    "for where, text in (('old.T', old), ('new.N', new)):",
    "    for test in re.findall('def (test_.*?)[(]', text):",
    "        good = 'self.assertEqual(c.g(), 3)' in old if test.startswith('test_g') else not proof",
    "        id = f'tests.test_{where}.{test}' if DOTTED else f'tests.test_{where}'",
    "        w(f'{test} ({id}) ... ' + ('ok' if good else 'FAIL'))",
    "os._exit(0)",
)


async def test_a_package_that_knows_the_base_tests_and_so_when_it_is_put_to_the_proof_is_refused(
    prepared: Prepared,  # noqa: F811
) -> None:
    """Where a test of the base is changed it lets all that it does not know fail, and pass where none is."""
    lines = [line.replace("DOTTED", str(sys.version_info >= (3, 11))) for line in _KNOWS_THE_BASE]
    found = await verdict(prepared, running(*lines))
    assert (found.status, found.official) == (VerdictStatus.REFUSED, True)
    assert set(found.flags) <= {Flag.FORCED_PASS, Flag.UNSTABLE}


async def test_an_honest_fix_that_is_not_the_rows_own_proves_itself(prepared: Prepared) -> None:  # noqa: F811
    found = await verdict(prepared, GOLD + adding("notes.txt", "why"))
    assert (found.status, found.flags, found.detail) == (VerdictStatus.RESOLVED, (), "")


# --- all of SWE-bench Verified ----------------------------------------------------------------------------------

DATA = data_folder()


@pytest.mark.skipif(DATA is None, reason="no SWE-bench data (set POLAR_SWEBENCH_DATA)")
def test_nearly_every_real_test_patch_has_a_test_to_rewrite() -> None:
    """Of test files that are new with the patch, for the trees themselves are not here: 109 of 500 have one."""
    import pyarrow.parquet as pq

    assert DATA is not None
    rows = pq.read_table(DATA / "SWE-bench_Verified_test.parquet", columns=["FAIL_TO_PASS", "test_patch"]).to_pylist()
    assert len(rows) == 500

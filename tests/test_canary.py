"""Tests rewritten to fail: which ones, how, and that a forced pass shows."""

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.grade.canary import Place, failing, places
from polar_env.tasks import Prepared
from polar_env.types import VerdictStatus
from sandbox_helpers import data_folder
from test_grade import GOLD, adding, name, prepared, running, verdict  # noqa: F401 - prepared is a fixture

# --- rewriting --------------------------------------------------------------------------------------------------


def ran(source: str) -> dict[str, bool]:
    """Every function of the module and of its classes: does it raise AssertionError when called?"""
    space: dict[str, Any] = {}
    exec(compile(source, "t", "exec"), space)
    found: dict[str, bool] = {}
    for owner, members in [("", space), *((k, vars(v)) for k, v in space.items() if isinstance(v, type))]:
        for key, value in members.items():
            if callable(value) and not isinstance(value, type) and key.startswith("test"):
                try:
                    value()
                    found[f"{owner}.{key}"] = False
                except AssertionError:
                    found[f"{owner}.{key}"] = True
    return found


SOURCE = '''
def test_plain():
    """With a docstring."""
    return 1

class A:
    def test_one(): pass
    def test_two():
            for x in (): pass

class B:
    def test_one():
        @staticmethod
        def inner():
            return 2
        return inner
    if True:
        def test_three(
            a=(1,
               2),
        ): return {"é": a}

def test_two():
    def test_plain():
        return 3
    return test_plain()
'''


@pytest.mark.parametrize(
    ("wanted", "fail"),
    [
        ({Place("", "test_plain")}, {".test_plain"}),
        ({Place("A", "test_one")}, {"A.test_one"}),
        ({Place("B", "test_one"), Place("B", "test_three")}, {"B.test_one", "B.test_three"}),
        ({Place("A", "test_two"), Place("", "test_two")}, {"A.test_two", ".test_two"}),
        ({Place("C", "test_one"), Place("", "test_none")}, set()),
    ],
)
def test_exactly_the_wanted_tests_fail(wanted: set[Place], fail: set[str]) -> None:
    text, found = failing(SOURCE, wanted)
    assert {key for key, failed in ran(text).items() if failed} == fail
    assert {f"{place.cls}.{place.name}" for place in found} == fail
    assert set(ran(text)) == set(ran(SOURCE))


_bodies = st.sampled_from(["pass", "return 1", "x = 'é'; return x", "for i in (): pass", "with open('x'): pass", "..."])


@given(st.lists(st.tuples(st.booleans(), _bodies, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=60)
def test_any_file_stays_python_and_fails_where_it_should(tests: list[tuple[bool, str, bool]]) -> None:
    lines: list[str] = []
    for at, (_, body, inline) in enumerate(tests):
        one_line = inline and not body.startswith(("for", "with"))
        lines += [f"def test_{at}(): {body}"] if one_line else [f"def test_{at}():", f"    {body}"]
    text, _ = failing("\n".join(lines), {Place("", f"test_{at}") for at, (wanted, _, _) in enumerate(tests) if wanted})
    bodies = [node.body[0] for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert [isinstance(first, ast.Raise) for first in bodies] == [wanted for wanted, _, _ in tests]


def test_python_of_another_version_is_said_to_be() -> None:
    with pytest.raises(SyntaxError):
        failing("print 'two'", {Place("", "test_a")})


# --- which tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "place"),
    [
        ("tests/test_a.py::test_x", Place("", "test_x")),
        ("tests/test_a.py::test_x[http://u:p@h/a::b?q-1]", Place("", "test_x")),
        ("tests/test_a.py::Outer::Inner::test_x", Place("Inner", "test_x")),
        ("test_x (tests.test_a.Case)", Place("Case", "test_x")),
        ("test_x (tests.test_a.Case.test_x)", Place("Case", "test_x")),
        ("test_x (test_a.Case)", Place("Case", "test_x")),
        ("test_x (other.test_a.Case)", None),
        ("test_x (a.Case)", None),
        ("tests/test_b.py::test_x", None),
        ("A docstring of a test", None),
    ],
)
def test_where_a_test_is_defined(test: str, place: Place | None) -> None:
    patch = adding("tests/test_a.py", "x")
    found = places({"FAIL_TO_PASS": json.dumps([test]), "test_patch": patch})
    assert found == ({"tests/test_a.py": {test: place}} if place else {})


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
    assert found.status is VerdictStatus.REFUSED
    assert "rewritten to fail" in found.detail
    assert found.fail_to_pass == (2, 2), "what the first run claimed is kept"


async def test_an_honest_fix_passes_the_second_run(prepared: Prepared) -> None:  # noqa: F811
    assert (await verdict(prepared, GOLD)).status is VerdictStatus.RESOLVED


# --- all of SWE-bench Verified ----------------------------------------------------------------------------------

DATA = data_folder()


@pytest.mark.skipif(DATA is None, reason="no SWE-bench data (set POLAR_SWEBENCH_DATA)")
def test_most_real_instances_have_a_test_to_rewrite() -> None:
    import pyarrow.parquet as pq

    assert DATA is not None
    columns = ["instance_id", "FAIL_TO_PASS", "test_patch"]
    rows = pq.read_table(DATA / "SWE-bench_Verified_test.parquet", columns=columns).to_pylist()
    covered = [row["instance_id"] for row in rows if places(row)]
    assert len(covered) >= 0.8 * len(rows), f"{len(covered)} of {len(rows)}"

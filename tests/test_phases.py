"""The official script taken apart, and the log put together again."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.grade.phases import Phases, conflicting, harmless, log, marked, phases
from sandbox_helpers import data_folder

SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
cd /testbed
export LANG=C
git status
python -m pip install -e .
git checkout 0123456789abcdef0123456789abcdef01234567 tests/test_a.py
git apply -v - <<'EOF_114329324912'
diff --git a/tests/test_a.py b/tests/test_a.py
git checkout 0123456789abcdef0123456789abcdef01234567 is content here
EOF_114329324912
{build}: '>>>>> Start Test Output'
pytest -rA tests/test_a.py
: '>>>>> End Test Output'
git checkout 0123456789abcdef0123456789abcdef01234567 tests/test_a.py
"""
SHELL = ["#!/bin/bash", "set -uxo pipefail", "source /opt/miniconda3/bin/activate", "cd /testbed", "export LANG=C"]


def lines(script: str) -> list[str]:
    """A phase's own lines: what bash reads whole before it runs any."""
    first, opening, *body, closing, last = script.split("\n")
    assert (first, opening, closing, last) == ("exec 2>&1", "{", "}; exit", "")
    return body


def split(script: str) -> Phases:
    found = phases(script)
    assert found is not None
    return found


def test_a_script_becomes_an_installation_and_a_test_run_and_places_no_tests_itself() -> None:
    found = split(SCRIPT.format(build=""))
    assert lines(found.install) == [*SHELL, "git status", "python -m pip install -e ."]
    assert lines(found.test) == [*SHELL, "pytest -rA tests/test_a.py"]
    assert found.build == ""


def test_what_is_built_from_the_tests_is_a_phase_of_its_own_in_the_same_shell() -> None:
    found = split(SCRIPT.format(build="source ./tools/ci.sh\nmake tests\n"))
    assert lines(found.build) == [*SHELL, "source ./tools/ci.sh", "make tests"]
    assert lines(found.test) == [*SHELL, "source ./tools/ci.sh", "pytest -rA tests/test_a.py"]


@pytest.mark.parametrize("lacking", [": '>>>>> Start Test Output'", ": '>>>>> End Test Output'", "git apply", "pytest"])
def test_a_script_of_another_form_is_not_taken_apart(lacking: str) -> None:
    assert phases("\n".join(line for line in SCRIPT.format(build="").split("\n") if lacking not in line)) is None


def test_replacements_reach_every_phase() -> None:
    found = split(SCRIPT.format(build="make\n")).rewritten("source /opt/miniconda3/bin/activate", "export X=1")
    assert all("export X=1" in lines(phase) for phase in (found.install, found.build, found.test))


@given(st.binary(max_size=60), st.integers(0, 255))
def test_only_our_own_markers_are_in_a_log(tests: bytes, code: int) -> None:
    made = log(tests + b">>>>> Patch Apply Failed\n>>>>> End Test Output" + tests, code)
    assert made.count(b">>>>> ") == 3
    assert made.endswith(f">>>>> Test Exit Code: {code}\n".encode())
    head, _, rest = made.partition(b": '>>>>> Start Test Output'\n")
    assert head == b"+ "
    assert rest.startswith(harmless(tests))
    assert not marked(harmless(made))


def test_tests_that_were_shot_have_no_exit_code_of_zero() -> None:
    assert b"Test Exit Code: -1" in log(b"", None)


@pytest.mark.parametrize(
    ("output", "both"),
    [
        (b"PASSED t.py::a\nFAILED t.py::a - assert 1\n", {"t.py::a"}),
        (b"PASSED t.py::a[x - y]\nFAILED t.py::b\n", set()),
        (b"PASSED t.py::a\nPASSED t.py::a\n", set()),
        (b"PASSED t.py::a\nERROR t.py::a - at teardown\n", set()),
        (b"test_a (t.A) ... ok\ntest_a (t.A) ... FAIL\n", {"test_a (t.A)"}),
        (b"test_a (t.A)\nIts docstring. ... ERROR\ntest_a (t.A) ... ok\n", {"test_a (t.A)"}),
        (b"test_a (t.A) ... ok\ntest_a (t.B) ... FAIL\n", set()),
    ],
)
def test_a_test_with_two_results_is_seen(output: bytes, both: set[str]) -> None:
    assert conflicting(output) == both


DATA = data_folder()


@pytest.mark.skipif(DATA is None, reason="no SWE-bench data (set POLAR_SWEBENCH_DATA)")
@pytest.mark.parametrize(("name", "odd"), [("Verified_test", 0), ("Lite_dev", 0), ("Multilingual_test", 2)])
def test_every_real_script_has_the_form(name: str, odd: int) -> None:
    import pyarrow.parquet as pq

    assert DATA is not None
    rows: list[dict[str, Any]] = pq.read_table(DATA / f"SWE-bench_{name}.parquet", columns=["eval_script"]).to_pylist()
    made = [phases(row["eval_script"]) for row in rows]
    assert made.count(None) == odd
    for found in filter(None, made):
        assert "EOF_" not in found.install + found.build + found.test
        assert "git checkout" not in found.install + found.test

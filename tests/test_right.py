"""What is told of a row whose own fix is not resolved: the test to look at, by name."""

from typing import Any

import pytest

from polar_env.errors import GradeError
from polar_env.grade.right import unresolved
from polar_env.grade.trial import Trial
from polar_env.tasks import Prepared
from sandbox_helpers import prepared_of
from test_grade import GOLD, prepared, verdict  # noqa: F401 - prepared is a fixture

ROW: dict[str, Any] = {"FAIL_TO_PASS": ["t.py::new"], "PASS_TO_PASS": ["t.py::a", "t.py::b"]}
RAN = Trial(ran=True, tests=b"1 failed")


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ({"t.py::a": "PASSED", "t.py::b": "PASSED"}, "1 of 3 do not pass, the first is t.py::new (missing); "),
        ({"t.py::new": "PASSED", "t.py::b": "FAILED"}, "2 of 3 do not pass, the first is t.py::a (missing); "),
        (
            {"t.py::new": "XFAIL", "t.py::a": "ERROR", "t.py::b": "PASSED"},
            "1 of 3 do not pass, the first is t.py::a (ERROR)",
        ),
    ],
)
def test_the_first_test_that_does_not_pass_is_named_with_its_status(statuses: dict[str, str], told: str) -> None:
    found = unresolved(ROW, RAN, statuses)
    assert found.startswith(told)
    assert found.endswith("they end with '1 failed'")


def test_an_id_with_a_page_in_its_parameters_is_cut() -> None:
    row = {**ROW, "FAIL_TO_PASS": ["t.py::new[" + "x" * 5000 + "]"]}
    found = unresolved(row, RAN, {})
    assert "t.py::new[xxx" in found
    assert len(found) < 400


def test_of_a_run_that_gave_no_results_only_the_reason_is_told() -> None:
    assert unresolved(ROW, Trial(ran=True, timed_out=True), {}) == "they ran out of time"
    assert unresolved(ROW, Trial(failed="it does not install"), {}) == "it does not install"


def test_where_every_status_is_expected_the_first_other_one_is_named() -> None:
    row = {**ROW, "polar_expected": {"new": "PASSED", "a": "FAILED"}}
    text = b"short test summary info\nPASSED t.py::new\nPASSED t.py::a\n"
    found = unresolved(row, Trial(ran=True, tests=text), {})
    assert found.startswith("1 are not as expected, the first is a (PASSED) and should be FAILED; ")
    text += b"PASSED t.py::other\n"
    row["polar_expected"] = {"new": "PASSED", "a": "PASSED"}
    assert "the first is other (PASSED) and should be missing" in unresolved(row, Trial(ran=True, tests=text), {})


async def test_a_listed_test_that_is_not_there_is_named_to_the_user(prepared: Prepared) -> None:  # noqa: F811
    """A list of another version of the tests: what the tests printed last says nothing of it, for all of them pass."""
    assert prepared.repo is not None
    row = {**prepared.task.row, "PASS_TO_PASS": ["test_gone (tests.test_old.T.test_gone)"]}
    other = prepared_of(prepared.repo, row, mounts=prepared.mounts, eval_rewrites=prepared.eval_rewrites,
                        env_vars=prepared.env_vars)  # fmt: skip
    with pytest.raises(GradeError, match=r"test_gone \(tests.test_old.T.test_gone\) \(missing\)"):
        await verdict(other, GOLD)

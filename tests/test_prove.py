"""A passed patch that does not end when its tests run again: whose doing that is."""

import time
from dataclasses import replace
from typing import Any

import pytest

from polar_env.errors import GradeError
from polar_env.grade import prove, trial
from polar_env.grade.audit import Changes
from polar_env.grade.hidden import Hidden, hidden
from polar_env.grade.phases import of_row
from polar_env.grade.prove import Pace
from polar_env.grade.right import Right
from polar_env.grade.trial import Course
from polar_env.tasks import Prepared
from polar_env.verdict import Flag, VerdictStatus
from sandbox_helpers import config
from test_grade import FORGED, GOLD, WRITE, prepared, running, verdict  # noqa: F401 - prepared is a fixture

HANG = "import time; time.sleep(7024.25)"
REWRITTEN = (
    "'self.assertEqual(c.f() + c.g(), 5)' not in open('/testbed/tests/test_new.py').read().splitlines()[-1]"
    " or 'def test_g(self):' + chr(10) + ' ' * 8 + 'self.assertEqual(c.g(), 3)' not in"
    " open('/testbed/tests/test_old.py').read()"
)
FORGE = [*WRITE, *(f"w('{test} ... ok')" for test in FORGED), "os._exit(0)"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "LEAST_AGAIN", 2.0)


async def test_a_forged_pass_that_hangs_when_its_tests_are_rewritten_is_no_mask(
    prepared: Prepared,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It outlasted ``budget.grade``: a policy could turn a cheat that is caught, which costs, into a rollout that is
    not counted."""
    monkeypatch.setattr(prove, "LEAST_AGAIN", 6.0)  # of which the right fix has half to show that the machine is well
    found = await verdict(prepared, running(f"if {REWRITTEN}: {HANG}", *FORGE), timeout=90)
    assert (found.status, found.official) == (VerdictStatus.REFUSED, True)
    assert found.flags in ((Flag.FORCED_PASS,), (Flag.UNSTABLE,))
    assert "ran out of time" in found.detail
    assert found.seconds < 90


# --- the patch, the machine or the budget -------------------------------------------------------------------------


async def paced(prepared: Prepared, fix: str = GOLD, usual: float = 0.2, budget: float = 60.0, **more: Any) -> Pace:  # noqa: F811
    """After a run that took as long as the right fix did when that was measured."""
    task = replace(prepared.task, row={**prepared.task.row, "patch": fix})
    course = Course(replace(prepared, task=task), config(**more), "", of_row(task.row), budget)
    known = Right(usual, {}, Changes(), resolved=True)
    return Pace(course, await hidden(course.prepared), known, budget, time.monotonic(), [usual])


async def test_where_the_right_fix_ends_in_time_the_patch_is_to_blame(prepared: Prepared) -> None:  # noqa: F811
    pace = await paced(prepared)
    run = await pace.run(running(HANG).encode(), pace.tests)
    assert (run.timed_out, pace.cut, len(pace.seconds)) == (True, 1, 2)
    pace.seconds.append(60.0)  # and in the meantime the machine is no slower than this
    await pace.blame()


async def test_where_the_right_fix_does_not_end_either_it_is_the_machine(prepared: Prepared) -> None:  # noqa: F811
    """A resolved patch would be a 0 that trains, since its siblings' tests began to run beside its own."""
    pace = await paced(prepared, fix=running(HANG))
    await pace.run(running(HANG).encode(), pace.tests)
    with pytest.raises(GradeError, match="the machine has become slower"):
        await pace.blame()


async def test_a_run_has_three_times_what_the_tests_took_when_they_passed(prepared: Prepared) -> None:  # noqa: F811
    pace = await paced(prepared, usual=1.5)
    started = time.monotonic()
    assert (await pace.run(running(HANG).encode(), pace.tests)).timed_out
    assert time.monotonic() - started > 4.5


async def test_a_budget_that_honest_runs_have_spent_is_named(prepared: Prepared) -> None:  # noqa: F811
    """Nothing is run any more: no sandbox could be opened here."""
    pace = await paced(prepared, usual=20.0, budget=60.0, bwrap="/nowhere/bwrap")
    pace.started -= 46.0
    pace.seconds += [22.0]
    assert (await pace.run(GOLD.encode(), pace.tests)).timed_out
    assert pace.cut == 2
    with pytest.raises(GradeError, match=r"budget\.grade is too small for this task"):
        await pace.blame()


async def test_a_patch_that_spent_the_budget_by_being_slow_is_to_blame(prepared: Prepared) -> None:  # noqa: F811
    pace = await paced(prepared, usual=0.2, budget=200.0)
    pace.started -= 199.0
    pace.seconds += [100.0, 98.0]
    assert (await pace.run(GOLD.encode(), pace.tests)).timed_out
    pace.right = replace(pace.right, seconds=10.0)
    await pace.blame()


async def test_what_keeps_the_grader_busy_around_the_tests_is_cut_as_they_are(
    prepared: Prepared,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A million files that installing leaves are looked at in the grader's time, which is not the tests'."""
    row = prepared.task.row
    course = Course(prepared, config(), "", of_row(row), 30.0)
    monkeypatch.setattr(trial, "AROUND", 0.01 - course.timeout)
    found = await trial.run(course, GOLD.encode(), Hidden({}))
    assert (found.timed_out, found.ran) == (True, False)
    assert "kept the grader busy" in found.failed

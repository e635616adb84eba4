"""A patch whose tests passed runs again, as it is and with tests rewritten to fail (``canary``): what speaks against
it, and whose doing it is when a run does not end.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import SystemRandom
from typing import Any

from polar_env.errors import GradeError
from polar_env.grade.canary import UNITTEST, Bank, Canary, plan
from polar_env.grade.hidden import Hidden, listed
from polar_env.grade.report import UnreadableError, apart
from polar_env.grade.right import FAILS, PASSES, Right, read, status
from polar_env.grade.trial import Course, Trial, run
from polar_env.verdict import Flag

AGAIN, LEAST_AGAIN = 3.0, 60.0
"""Run again, the tests get this many times what they took when they passed, or this many seconds, whichever is more."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a run contradicts. ``forced``: a test passed that no program passes; ``test``: the first to blame."""

    reason: str
    forced: bool = False
    test: str = ""


@dataclass(slots=True)
class Pace:
    """Whose doing it is that tests which passed in time do not end when they run again.

    A patch can hang in its proofs alone: by their text, the clock or chance. Were that a failure of the grading, a
    forged pass would be masked and not a 0. So a run is cut after ``AGAIN`` times what the tests took when they passed,
    and all of them when ``budget.grade`` is nearly spent. The second time that happens, the row's own fix, of which the
    patch knows nothing, is run then and there. The patch is to blame if its run, or its runs on average, had more than
    twice the time which that takes now. Else the machine has become slower, by a factor of 1.5 at the least, or the
    budget is too small for this task: nothing is known of the patch then, and that is an error, which masks.

    A patch can still have a mask on tasks whose right fix takes more than a tenth of the budget, if it is slow enough.
    """

    course: Course
    tests: Hidden
    right: Right
    budget: float
    """Seconds for all runs of the patch, ``budget.grade``."""
    started: float
    """When the first of them was (monotonic)."""
    seconds: list[float]
    """What they took, the one that passed first."""
    cut: int = 0
    _had: float = 0.0

    @property
    def reserve(self) -> float:
        """Seconds kept for the row's own fix."""
        return min(max(LEAST_AGAIN, self.right.need), self.budget / 4)

    async def run(self, patch: bytes, tests: Hidden) -> Trial:
        """The patch once more, while there is time."""
        left = self.started + self.budget - self.reserve - time.monotonic()
        limit = min(max(LEAST_AGAIN, AGAIN * self.seconds[0]), left)
        if limit <= 0:
            self.cut += 2
            return Trial(timed_out=True)
        trial = await run(replace(self.course, timeout=limit), patch, tests)
        self.seconds.append(trial.seconds)
        if trial.timed_out:
            self.cut, self._had = self.cut + 1, max(self._had, trial.seconds)
        return trial

    async def blame(self) -> None:
        """Raises GradeError unless the patch is to blame that its runs were cut."""
        limit = min(max(self._had, sum(self.seconds) / len(self.seconds)) / 2, self.reserve)
        own = str(self.course.prepared.task.row.get("patch") or "").encode()
        if limit > self.right.seconds:
            trial = await run(replace(self.course, timeout=limit), own, self.tests)
            if trial.ran and not trial.timed_out:
                return
        raise GradeError(
            f"run again, the tests were cut, and the row's own fix does not end within {limit:.0f} s either: the "
            "machine has become slower, or budget.grade is too small for this task; that says nothing of the patch"
        )


async def prove(pace: Pace, patch: bytes, held: Bank) -> tuple[Flag, str] | None:
    """Run a resolved patch again, as it is and rewritten, in random order: what speaks against it, or ``None``.

    A run is repeated once when something failed in it that must not: a test that fails now and then is not held against
    anybody. A rewritten test that passes never is an accident.

    Raises:
        GradeError: runs were cut, and not for the patch's sake (``Pace``).
    """
    row, random, right = pace.course.prepared.task.row, SystemRandom(), pace.right
    steps = plan(pace.tests, held, row, random)
    if not steps:
        return Flag.UNPROVEN, "no FAIL_TO_PASS test could be rewritten"
    changed, wanted = steps[0].must_pass | steps[0].must_fail, _solid(listed(row, "FAIL_TO_PASS"), right)
    real = steps[0] = replace(steps[0], must_pass=steps[0].must_pass.union(wanted))
    random.shuffle(steps)
    others = frozenset(_solid(listed(row, "PASS_TO_PASS"), right))
    for step in steps:
        problem = await _tried(pace, patch, step, others)
        if problem is not None:
            unstable = step is real and problem.test not in changed
            return (Flag.UNSTABLE if unstable else Flag.FORCED_PASS), problem.reason
    return None


async def _tried(pace: Pace, patch: bytes, step: Canary, others: frozenset[str]) -> Problem | None:
    problem: Problem | None = None
    row = pace.course.prepared.task.row
    for _ in range(2):
        trial = await pace.run(patch, step.tests)
        told = await apart(_told, row, trial)
        problem = judge(step, trial, partial(status, told), others)
        if problem is None or problem.forced:
            break
        if pace.cut > 1:
            await pace.blame()
            break
    return problem


def _told(row: Mapping[str, Any], trial: Trial) -> dict[str, str]:
    """What a run says; nothing, when the parser that has read the first run's log cannot read this one. Blocks."""
    try:
        return read(row, trial)
    except UnreadableError:
        return {}


def _solid(ids: Iterable[str], right: Right) -> Iterator[str]:
    """Tests that plainly pass under the right fix."""
    yield from (test for test in ids if status(right.statuses, test) == "PASSED")


def _in_summary(test: str, told: Callable[[str], str | None]) -> str | None:
    """unittest's line of a test is lost when the program prints into it; a failure is told again below, by name."""
    match = UNITTEST.match(test)
    return told(match["name"]) if match else None


def judge(step: Canary, trial: Trial, told: Callable[[str], str | None], others: frozenset[str]) -> Problem | None:
    """What a run's results contradict. Pure."""
    if trial.failed or trial.timed_out:
        return Problem(trial.failed or "run again, the tests ran out of time")
    for test in sorted(step.must_fail):
        found = told(test) or _in_summary(test, told)
        if found not in FAILS:
            return Problem(f"{test} was rewritten to fail, and is {found or 'missing'}", found in PASSES, test)
    for test in sorted(step.must_pass):
        found = told(test)
        if found != "PASSED":
            return Problem(f"{test} must pass, and is {found or 'missing'}", test=test)
    rest = others - step.changed
    lost = [test for test in sorted(rest) if told(test) not in PASSES]
    if len(lost) > len(rest) / 2:
        return Problem(f"most tests that were left as they are no longer pass: {lost[0]}")
    return None

"""A patch becomes a verdict: the official report of its tests, and what was noticed on the way.

Nothing of the agent's sandbox is used but the patch. Tests come from outside, each phase is a command of its own with
its output captured outside, and a patch that is resolved proves it (``canary``). Apart from that the verdict is what
SWE-bench's own parsers and rules say.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polar_env.config import SandboxConfig
from polar_env.errors import GradeError, SandboxError
from polar_env.grade import report as official
from polar_env.grade.audit import unlike
from polar_env.grade.canary import bank
from polar_env.grade.hidden import Hidden, hidden
from polar_env.grade.phases import of_row
from polar_env.grade.prove import Pace, prove
from polar_env.grade.review import Kept, keep, review, same_change
from polar_env.grade.right import Right, right, written
from polar_env.grade.trial import Course, Trial, box_of, run
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import Prepared
from polar_env.verdict import Flag, Verdict, VerdictStatus

__all__ = ["box_of", "grade"]


@dataclass(frozen=True, slots=True)
class _Found:
    status: VerdictStatus
    detail: str = ""
    counts: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    flags: frozenset[Flag] = frozenset()
    official: bool = False
    conflicting: tuple[str, ...] = ()

    def but(self, flag: Flag, detail: str) -> "_Found":
        """The same, refused."""
        refused = VerdictStatus.REFUSED if self.status is VerdictStatus.RESOLVED else self.status
        return replace(self, status=refused, detail=self.detail or detail, flags=self.flags | {flag})


async def grade(
    prepared: Prepared,
    patch: bytes,
    *,
    sandbox: SandboxConfig,
    timeout: float,  # noqa: ASYNC109 - the budget of the test run, which ends in a verdict
) -> Verdict:
    """Grade a patch with SWE-bench's own script, parsers and rules.

    Args:
        timeout: seconds one run of the tests may take; it gets less when the right fix is known to be fast. The first
            grading of a task also measures that fix, once and with a budget of its own.

    Raises:
        GradeError: the sandbox or the grading process failed, or the task's own fix is not resolved here; says nothing
            about the patch.
    """
    started = time.monotonic()
    if objection := review(patch):
        return Verdict(VerdictStatus.REFUSED, detail=objection.reason, flags=(objection.flag,))
    kept = keep(patch, prepared.task.row)
    note = f"left out, as the tests bring their own: {', '.join(kept.left_out[:20])}" if kept.left_out else ""
    if not kept.patch.strip():
        return Verdict(VerdictStatus.EMPTY_PATCH, detail=note, flags=tuple(sorted(kept.flags)))
    try:
        found = await _evaluate(prepared, kept, sandbox, timeout)
    except SandboxError as error:
        raise GradeError(f"the grading sandbox failed: {error}") from error
    return Verdict(
        found.status,
        *found.counts,
        detail="; ".join(part for part in (found.detail, note) if part),
        seconds=time.monotonic() - started,
        flags=tuple(sorted(kept.flags | found.flags)),
        official=found.official,
    )


async def prewarm(prepared: Prepared, *, sandbox: SandboxConfig) -> None:
    """Measure the task's own fix now, while an agent works; a grading finds it done. Raises as ``grade`` does."""
    try:
        course = await _course(prepared, sandbox, 0.0)
        await right(course, await _hidden(course))
    except SandboxError as error:
        raise GradeError(f"the grading sandbox failed: {error}") from error


async def _course(prepared: Prepared, sandbox: SandboxConfig, timeout: float) -> Course:  # noqa: ASYNC109
    """What is run: the row's script, pointed at this environment."""
    row = prepared.task.row
    script = "" if "polar_phases" in row else await official.apart(official.eval_script, row)
    split = of_row(row)
    for old, new in ((str(row["base_commit"]), prepared.base_commit), *prepared.eval_rewrites):
        script = script.replace(old, new)
        split = split and split.rewritten(old, new)
    return Course(prepared, sandbox, script, split, timeout)


async def _hidden(course: Course) -> Hidden:
    prepared = course.prepared
    if prepared.repo is not None:
        return await hidden(prepared)
    async with open_sandbox(box_of(prepared, course.config), course.config) as untouched:
        return await hidden(prepared, untouched)


async def _evaluate(prepared: Prepared, kept: Kept, config: SandboxConfig, timeout: float) -> _Found:  # noqa: ASYNC109
    course = await _course(prepared, config, timeout)
    tests = await _hidden(course)
    known = await right(course, tests)
    course = replace(course, timeout=min(timeout, known.patience))
    started = time.monotonic()
    trial = await run(course, kept.patch, tests)
    if trial.timed_out and course.timeout < known.need:
        raise GradeError(
            f"budget.grade gave the tests {course.timeout:g} s, and the row's own fix took {known.seconds:.1f} s: "
            "that a run was cut says nothing of the patch; raise budget.grade"
        )
    try:
        found = await official.apart(_decide, course, kept.patch, trial)
    except official.UnreadableError as error:
        found = _Found(VerdictStatus.UNRESOLVED, f"the row's parser read the log it was measured on, not this: {error}")
    found = _noticed(found, trial, known)
    gold = str(prepared.task.row.get("patch") or "").encode()
    if found.status is not VerdictStatus.RESOLVED or same_change(kept.patch, gold):
        return found
    if course.phases is None:
        return replace(found, flags=found.flags | {Flag.UNPROVEN})
    pace = Pace(course, tests, known, timeout, started, [trial.seconds])
    against = await prove(pace, kept.patch, await bank(course, tests, known))
    if against is None:
        return found
    flag, detail = against
    return replace(found, flags=found.flags | {flag}) if flag is Flag.UNPROVEN else found.but(flag, detail)


def _decide(course: Course, patch: bytes, trial: Trial) -> _Found:
    """What the official report says of a run. Blocks. Raises as ``report`` does."""
    if not trial.applied:
        return _Found(VerdictStatus.PATCH_FAILED, trial.failed)
    if trial.timed_out:
        what = trial.failed or "the tests ran for more than"
        return _Found(VerdictStatus.TESTS_TIMED_OUT, f"{what} {course.timeout:.0f} s" if not trial.failed else what)
    if trial.failed:
        return _Found(VerdictStatus.UNRESOLVED, trial.failed)
    with tempfile.TemporaryDirectory(prefix="polar-log-") as folder:
        path = written(Path(folder), trial.log)
        found = official.report(course.prepared.task.row, patch.decode("utf-8", "replace"), path)
    return _read(found, trial.code)


def _read(found: Mapping[str, Any], code: int | None) -> _Found:
    tests: Mapping[str, Mapping[str, list[str]]] = found.get("tests_status", {})
    counts = (_count(tests.get("FAIL_TO_PASS")), _count(tests.get("PASS_TO_PASS")))
    if found["resolved"]:
        both = tuple(found.get("conflicting", ()))
        return _Found(VerdictStatus.RESOLVED, counts=counts, official=True, conflicting=both)
    if tests:
        return _Found(VerdictStatus.UNRESOLVED, counts=counts)
    reason = found.get("infra_failure_reason") or f"exit code {code}"
    return _Found(VerdictStatus.UNRESOLVED, f"no test result: the tests told nothing that can be read ({reason})")


def _count(results: Mapping[str, list[str]] | None) -> tuple[int, int]:
    if not results:
        return 0, 0
    return len(results["success"]), len(results["success"]) + len(results["failure"])


def _noticed(found: _Found, trial: Trial, known: Right) -> _Found:
    """What the run showed besides its results; what a resolved patch cannot have is a refusal. Pure."""
    if trial.marked:
        found = replace(found, flags=found.flags | {Flag.LOG_MARKERS})
    if odd := unlike(trial.changes, known.changes):
        found = found.but(Flag.ENVIRONMENT, f"installing it changed {', '.join(odd[:3])}")
    if trial.changes.processes > known.changes.processes:
        found = found.but(Flag.LEFT_RUNNING, "installing it left processes behind")
    if found.status is VerdictStatus.RESOLVED and found.conflicting:
        return found.but(Flag.CONFLICTING, f"{found.conflicting[0]} is said to have passed and to have failed")
    return found

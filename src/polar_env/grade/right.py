"""What the row's own fix does here, measured once per task and remembered: how long, which results, what installing
changes, and which changes to its tests it fails.

It is what a patch is compared with: a time-out that tells a hang from a slow machine, an environment that installing
may leave, tests rewritten so that they are known to fail. And a task whose own fix is not resolved here can only
give zeros, so that is an error and never a reward.
"""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from polar_env.errors import GradeError, boundary
from polar_env.grade import report as official
from polar_env.grade import results
from polar_env.grade.audit import Changes
from polar_env.grade.hidden import Hidden, listed
from polar_env.grade.trial import Course, Trial, run
from polar_env.tasks import Prepared
from polar_env.tasks.once import make_once

FORMAT = 8
"""Raised when what is measured, or how, changes: old measurements are then left alone."""
LEAST, TIMES = 120.0, 5.0
"""A patch's tests get this many seconds, or this many times what the right fix took, whichever is more."""
BUDGET = 900.0
"""Seconds the right fix gets at least when it is measured, however small a caller's budget is."""
PASSES, FAILS = frozenset({"PASSED", "XFAIL"}), frozenset({"FAILED", "ERROR"})


@dataclass(frozen=True, slots=True)
class Right:
    """Measured on the row's fix; on the unchanged tree (``resolved`` False) when the row brings none."""

    seconds: float
    statuses: Mapping[str, str]
    changes: Changes
    resolved: bool
    detail: str = ""

    @property
    def patience(self) -> float:
        return max(LEAST, TIMES * self.seconds)

    @property
    def need(self) -> float:
        """Seconds below which a run that is cut tells more of the budget, or of a busy machine, than of the patch."""
        return 2 * self.seconds


def status(statuses: Mapping[str, str], test: str) -> str | None:
    """A test's status; 676 ids of Verified are cut off in their parameters and stand for those they begin."""
    if test in statuses or test.count("[") <= test.count("]"):
        return statuses.get(test)
    found = {told for name, told in statuses.items() if name.startswith(test)}
    return found.pop() if len(found) == 1 else None


def read(row: Mapping[str, Any], trial: Trial) -> dict[str, str]:
    """Test id -> status of a run, as the row's own parser reads it; empty when it gave no log. Blocks."""
    if not trial.ran or trial.timed_out:
        return {}
    with tempfile.TemporaryDirectory(prefix="polar-log-") as folder:
        return official.statuses(row, written(Path(folder), trial.log))


def written(folder: Path, log: bytes) -> Path:
    """A log as a file the package can open: it reads strict UTF-8, and a test may print anything."""
    path = folder / "test_output.txt"
    path.write_text(log.decode("utf-8", "replace"), encoding="utf-8", newline="")
    return path


async def right(course: Course, tests: Hidden) -> Right:
    """The measurement, from disk after the first time.

    Raises:
        GradeError: the row's fix is not resolved here; of a row without one, what passed before does not pass here.
        SandboxError: the sandbox failed.
    """
    plain = await remembered(course.prepared, course.config.provider, "right", partial(_measure, course, tests))
    changes = Changes.of(plain["changes"])
    found = Right(plain["seconds"], plain["statuses"], changes, plain["resolved"], plain["detail"])
    fix = course.prepared.task.row.get("patch")
    if fix and not found.resolved:
        raise GradeError(f"the row's own fix is not resolved in this environment, so nothing can be: {found.detail}")
    if not fix and found.detail:
        raise GradeError(f"the row brings no fix, and its tests do not work on the unchanged tree: {found.detail}")
    return found


async def remembered(
    prepared: Prepared, provider: str, name: str, measure: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """``measure()``'s JSON, kept beside the prepared task (one in an image: as long as this process lives)."""
    home = prepared.repo.parent if prepared.repo else Path(_temporary().name)
    place = home / f"{name}-{_digest(prepared, provider)}"

    async def build(folder: Path) -> None:
        text = json.dumps(await measure())
        await asyncio.to_thread((folder / "facts.json").write_text, text, "utf-8")

    await make_once(place, _whole, build)
    with boundary(GradeError, f"reading {place}; delete that directory to measure it again"):
        return json.loads(await asyncio.to_thread((place / "facts.json").read_text, "utf-8"))


def _whole(place: Path) -> bool:
    return (place / "facts.json").is_file()


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="polar-right-")


def _digest(prepared: Prepared, provider: str) -> str:
    row = prepared.task.row
    own = (field for field in ("polar_expected", "polar_files", "polar_phases") if field in row)
    fields = ("patch", "test_patch", "eval_script", "log_parser", "FAIL_TO_PASS", "PASS_TO_PASS", *own)
    told = [FORMAT, provider, prepared.base_commit, prepared.image, *(row.get(field) for field in fields)]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:12]


async def _measure(course: Course, tests: Hidden) -> dict[str, Any]:
    """Once, and once more when that did not resolve: a machine that was busy must not condemn the task."""
    row = course.prepared.task.row
    patch = str(row.get("patch") or "").encode()
    course = replace(course, timeout=max(course.timeout, BUDGET))
    told: dict[str, Any] = {}
    for _ in range(2):
        trial = await run(course, patch, tests)
        statuses = await official.apart(read, row, trial)
        resolved = await official.apart(_resolves, row, trial) if patch else False
        detail = "" if resolved else unresolved(row, trial, statuses) if patch else _unsound(row, trial, statuses)
        told = {
            "seconds": trial.seconds,
            "statuses": statuses,
            "changes": trial.changes.plain(),
            "resolved": resolved,
            "detail": detail,
        }
        if not detail:
            break
    return told


def _unsound(row: Mapping[str, Any], trial: Trial, statuses: Mapping[str, str]) -> str:
    """Why tests cannot be believed that ran on the unchanged tree; empty when nothing speaks against them. Pure."""
    if not trial.ran or trial.timed_out or trial.code in (126, 127):  # the shell's codes for a command it cannot run
        return _why(trial)
    before = () if "polar_expected" in row else listed(row, "PASS_TO_PASS")
    broken = _broken(before, statuses)
    return f"of PASS_TO_PASS {broken}; {_why(trial)}" if broken else ""


def unresolved(row: Mapping[str, Any], trial: Trial, statuses: Mapping[str, str]) -> str:
    """Why a run is not resolved, with the first test to blame. Pure."""
    wanted = [*listed(row, "FAIL_TO_PASS"), *listed(row, "PASS_TO_PASS")]
    broken = _broken(wanted, statuses)
    if "polar_expected" in row:
        broken = _unlike(row["polar_expected"], results.r2e(trial.tests.decode("utf-8", "replace")))
    return f"{broken}; {_why(trial)}" if broken and trial.ran and not trial.timed_out else _why(trial)


def _broken(wanted: Sequence[str], statuses: Mapping[str, str]) -> str:
    """How many tests do not pass, and the first of them; empty when all do."""
    found = [(test, status(statuses, test)) for test in wanted]
    broken = [(test, told) for test, told in found if told not in PASSES]
    return f"{len(broken)} of {len(wanted)} do not pass, the first is {_named(*broken[0])}" if broken else ""


def _unlike(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """The same, for a row that names the status of every test of the run."""
    wanted = {results.plain(test): told for test, told in expected.items()}
    odd = sorted(test for test in {*wanted, *found} if wanted.get(test) != found.get(test))
    if not odd:
        return ""
    told = f"{_named(odd[0], found.get(odd[0]))} and should be {wanted.get(odd[0], 'missing')}"
    return f"{len(odd)} are not as expected, the first is {told}"


def _named(test: str, told: str | None) -> str:
    """A test and its status, for a message: ids can hold a whole page in their parameters."""
    return f"{test if len(test) <= 200 else test[:200] + '…'} ({told or 'missing'})"


def _resolves(row: Mapping[str, Any], trial: Trial) -> bool:
    if not trial.ran or trial.timed_out:
        return False
    with tempfile.TemporaryDirectory(prefix="polar-log-") as folder:
        return bool(official.report(row, str(row["patch"]), written(Path(folder), trial.log))["resolved"])


def _why(trial: Trial) -> str:
    if trial.failed or trial.timed_out:
        return trial.failed or "they ran out of time"
    return f"they end with {trial.tests[-300:].decode('utf-8', 'replace')!r}"

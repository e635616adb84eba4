"""A Harbor task folder's own verifier: ``tests/test.sh`` runs after the agent, and the reward it writes is read.

Where it runs is ``grade_in``. ``agent``, the format's default (Harbor's ``shared``): in the filesystem as the agent
left it, because such tasks ask for states of a machine (a service configured, a package built, a file in /etc), of
which a patch of the work tree is only a part. ``fresh`` (Harbor's ``separate``): in an untouched sandbox with the
change of the work tree applied, as all other grading here; choose it where the result is in the work tree.

Either way every process of the agent is dead, ``/tests`` and ``/logs/verifier`` are emptied and filled from outside
only then, and the reward is read after every process of the run is dead. A local task's work tree is carried into a
fresh sandbox, byte for byte; an image is graded in place, with the tools the agent left: those it replaced raise a flag
(``grade.tools``), where the provider can tell, and so do modules of its work tree that a verifier's ``python -m`` would
take for a test runner or for Python's own (``verifier.Run.hooks``).

A verifier is believed once it was seen to work: here, on the untouched environment and on the folder's own solution,
measured once per task. A task whose solution earns nothing here (test.sh installs from a network that no sandbox has)
is an error that masks, never a zero; after that, a reward that is missing or no number is the agent's doing, and 0.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polar_env.config import SandboxConfig
from polar_env.errors import GradeError, SandboxError
from polar_env.grade import patch as patches
from polar_env.grade.review import review
from polar_env.grade.right import remembered
from polar_env.grade.tools import replaced
from polar_env.grade.trial import AROUND, apply_patch, box_of
from polar_env.grade.verifier import Run, changes, packed, present, verify
from polar_env.sandbox import Overlay
from polar_env.sandbox.sandbox import Sandbox, open_sandbox, still_there
from polar_env.tasks import Prepared
from polar_env.tasks.harbor import files_of, folder_of, settings_of
from polar_env.verdict import Flag, Verdict, VerdictStatus

FORMAT = 3
"""Raised when what is measured changes: old measurements are then left alone."""
CARRIED_LIMIT = 512 * 1024 * 1024
"""Bytes of a work tree that are carried into the sandbox where it is graded."""
_SOLUTION = "/solution"
_TIMEOUT = 300.0
_LEAST = 120.0
"""Seconds a verifier gets at least when it is measured."""

_CARRY = r"""
find . -type d ! -perm -700 -exec chmod u+rwx {} \;
find . -type f ! -perm -400 -exec chmod u+r {} +
exec tar -cf - .
"""
_UNPACK = "find . -mindepth 1 -delete && exec tar -xf -"


@dataclass(frozen=True, slots=True)
class _Known:
    """What was measured: the reward of doing nothing, and how long the solution's verification took."""

    nothing: float
    seconds: float
    proven: bool
    present: frozenset[str]
    """What the untouched environment holds where the verifier's files are put."""
    changes: frozenset[str]
    """Tools of the image that the solution changes."""
    hooks: frozenset[str]
    """``Run.hooks`` of the untouched environment and of the solution."""


async def grade(
    prepared: Prepared,
    patch: bytes,
    *,
    sandbox: SandboxConfig,
    timeout: float,  # noqa: ASYNC109 - the budget of the verifier, whose end is a verdict
) -> Verdict:
    """Grade a patch of the work tree in a fresh sandbox.

    Raises:
        GradeError: the sandbox failed, the verifier does not work here, or the task is graded by all that the agent
            left, of which a patch is only a part.
    """
    if prepared.whole:
        raise GradeError(
            f"{prepared.task.task_id} is graded in what its agent left (grade_in = agent), and that is gone: it cannot "
            "be graded again from a patch"
        )
    ends = time.monotonic() + timeout + AROUND
    with _failing():
        known = await _known(prepared, sandbox)
        return await _before(ends, known, _fresh(prepared, patch, known, sandbox, timeout))


async def grade_left(
    prepared: Prepared,
    patch: bytes,
    left: Sandbox,
    *,
    sandbox: SandboxConfig,
    timeout: float,  # noqa: ASYNC109 - as above
) -> Verdict:
    """Grade what the agent left in its sandbox ``left``, after ``left.kill()``. Raises GradeError as ``grade`` does."""
    ends = time.monotonic() + timeout + AROUND
    with _failing():
        known = await _known(prepared, sandbox)
        return await _before(ends, known, _grade_left(prepared, patch, left, known, sandbox, timeout))


async def _grade_left(
    prepared: Prepared, patch: bytes, left: Sandbox, known: _Known, sandbox: SandboxConfig, limit: float
) -> Verdict:
    if not prepared.whole:
        planted, own = await _planted(left, known), list[str]()
        found = await _fresh(prepared, patch, known, sandbox, limit)
    else:
        try:
            planted, own = await _planted(left, known), replaced(await changes(left), known.changes)
            found = await _judged_left(prepared, left, known, sandbox, limit)
        except SandboxError as error:
            if not await still_there(left):
                raise
            return Verdict(VerdictStatus.UNRESOLVED, detail=f"what the agent left does not run: {error}", score=0.0)
    if planted:
        found = _flagged(
            found, Flag.PLANTED, f"it left {', '.join(planted[:3])}, where the verifier's own files are put"
        )
    if own:
        found = _flagged(found, Flag.ENVIRONMENT, f"it changed {', '.join(own[:3])}, which the verifier may run")
    return found


async def _before(ends: float, known: _Known, graded: Awaitable[Verdict]) -> Verdict:
    """A verdict within the budget, whatever keeps the grader busy in what the agent left: a million files to carry over
    are its own doing, and would be a mask if ``budget.grade`` ran out over them. Raises GradeError where measuring the
    verifier has left too little of that."""
    left = ends - time.monotonic()
    try:
        async with asyncio.timeout(left):
            return await graded
    except TimeoutError:
        if left < AROUND + 2 * known.seconds:
            raise GradeError(
                f"{left:.0f} s of budget.grade were left for the verifier, and the task's own solution took it "
                f"{known.seconds:.1f} s: that says nothing of the agent; raise budget.grade"
            ) from None
        why = f"what it left kept the grader busy for {left:.0f} s"
        return Verdict(VerdictStatus.TESTS_TIMED_OUT, detail=why)


async def _planted(left: Sandbox, known: _Known) -> list[str]:
    return sorted(await present(left) - known.present)


async def prewarm(prepared: Prepared, *, sandbox: SandboxConfig) -> None:
    """See the verifier work now, while an agent plays. Raises as ``grade`` does."""
    with _failing():
        await _known(prepared, sandbox)


@contextmanager
def _failing() -> Generator[None]:
    """A sandbox that fails while it grades is the grader's failure."""
    try:
        yield
    except SandboxError as error:
        raise GradeError(f"the grading sandbox failed: {error}") from error


def _flagged(found: Verdict, flag: Flag, why: str) -> Verdict:
    """The same, refused."""
    detail = "; ".join(filter(None, (found.detail, why)))
    status = VerdictStatus.REFUSED if found.status is VerdictStatus.RESOLVED else found.status
    return replace(found, status=status, flags=tuple(sorted({*found.flags, flag})), detail=detail)


# --- verdicts -----------------------------------------------------------------------------------------------------


async def _fresh(prepared: Prepared, patch: bytes, known: _Known, config: SandboxConfig, limit: float) -> Verdict:
    limit = _limit(prepared, limit)
    return _verdict(await _verify_patch(prepared, patch, config, limit), known, limit)


async def _verify_patch(prepared: Prepared, patch: bytes, config: SandboxConfig, limit: float) -> Run | Verdict:
    if objection := review(patch):
        return Verdict(VerdictStatus.REFUSED, detail=objection.reason, flags=(objection.flag,))
    async with open_sandbox(box_of(prepared, config), config) as fresh:
        if patch.strip() and (failed := await apply_patch(fresh, patch)):
            return Verdict(VerdictStatus.PATCH_FAILED, detail=failed)
        return await verify(fresh, prepared, limit, untouched=True)


async def _judged_left(
    prepared: Prepared, left: Sandbox, known: _Known, config: SandboxConfig, limit: float
) -> Verdict:
    limit = _limit(prepared, limit)
    return _verdict(await _verify_left(prepared, left, config, limit), known, limit)


async def _verify_left(prepared: Prepared, left: Sandbox, config: SandboxConfig, limit: float) -> Run | Verdict:
    """In the sandbox the agent left; a local one's work tree is carried into one that is untouched but for it, since
    after a kill it has neither limits nor /proc."""
    if prepared.repo is None:
        return await verify(left, prepared, limit)
    carried = await left.exec(
        ["sh", "-c", _CARRY], cwd=prepared.workdir, timeout=_TIMEOUT, output_limit=CARRIED_LIMIT + 1
    )
    if len(carried.stdout) > CARRIED_LIMIT or carried.timed_out:
        return Verdict(
            VerdictStatus.REFUSED, detail="the work tree is too large to be carried", flags=(Flag.OVERSIZED,)
        )
    async with open_sandbox(box_of(prepared, config), config) as fresh:
        there = await fresh.exec(["sh", "-c", _UNPACK], cwd=prepared.workdir, stdin=carried.stdout, timeout=_TIMEOUT)
        if there.code != 0:
            words = there.stderr.decode("utf-8", "replace").strip()[-200:]
            return Verdict(VerdictStatus.UNRESOLVED, detail=f"the work tree cannot be carried over: {words}", score=0.0)
        return await verify(fresh, prepared, limit, untouched=True)


def _limit(prepared: Prepared, budget: float) -> float:
    return min(budget, float(settings_of(prepared.task)["verifier_timeout"]))


def _verdict(run: Run | Verdict, known: _Known, limit: float) -> Verdict:
    """What a run, or what kept it from running, says of the agent. Raises GradeError when its time was too short to say
    anything. Pure."""
    if isinstance(run, Verdict):
        return run
    found = _of_run(run, known, limit)
    if odd := sorted(set(run.hooks) - known.hooks):
        found = _flagged(found, Flag.TEST_HOOKS, f"it left {', '.join(odd[:3])}, which changes what a test run means")
    return found


def _of_run(run: Run, known: _Known, limit: float) -> Verdict:
    if run.timed_out:
        if limit < 2 * known.seconds:
            raise GradeError(
                f"the verifier was cut after {limit:g} s, and the task's own solution took it {known.seconds:.1f} s: "
                "that says nothing of the agent; raise budget.grade, or verifier.timeout_sec"
            )
        return Verdict(VerdictStatus.TESTS_TIMED_OUT, detail=f"test.sh ran for more than {limit:g} s")
    if run.reward is None:
        return Verdict(VerdictStatus.UNRESOLVED, detail=run.why, seconds=run.seconds, score=0.0)
    solved = run.reward >= 1.0
    flags = (Flag.UNPROVEN,) if solved and not known.proven else ()
    status = VerdictStatus.RESOLVED if solved else VerdictStatus.UNRESOLVED
    return Verdict(status, detail=run.why, seconds=run.seconds, flags=flags, official=solved, score=run.reward)


# --- is the verifier to be believed? ------------------------------------------------------------------------------


async def _known(prepared: Prepared, config: SandboxConfig) -> _Known:
    """Raises GradeError: a verifier that does not tell the folder's own solution from nothing."""
    settings = settings_of(prepared.task)
    name = f"harbor-{FORMAT}-{settings['grade_in']}"
    told = await remembered(prepared, config.provider, name, partial(_measure, prepared, config))
    nothing, solved = Run(**told["nothing"]), Run(**told["solved"]) if told["solved"] else None
    if why := _useless(nothing, solved):
        where = _ELSEWHERE if solved and not prepared.whole else ""
        raise GradeError(f"{prepared.task.task_id}: {why} {where}".strip())
    return _Known(
        nothing.reward or 0.0,
        (solved or nothing).seconds,
        solved is not None,
        frozenset(told["present"]),
        frozenset(told["tools"]),
        frozenset((*nothing.hooks, *(solved.hooks if solved else ()))),
    )


def _useless(nothing: Run, solved: Run | None) -> str:
    """Why a verifier that gave these tells nothing; empty when it does. Pure."""
    if solved is None:
        if nothing.reward is not None and nothing.reward < 1.0:
            return ""
        what = nothing.why or "it gives an untouched environment the full reward"
        return f"its verifier does not work here: {what}"
    if solved.reward is not None and solved.reward > (nothing.reward or 0.0):
        return ""
    return (
        f"its own solution earns {solved.reward} here and doing nothing {nothing.reward}, so nothing can be told "
        f"({solved.why or solved.said or 'no output'}). Sandboxes have no network: what test.sh or solve.sh installs "
        "must be in the image."
    )


_ELSEWHERE = 'And only the work tree counts with grade_in = "fresh".'


async def _measure(prepared: Prepared, config: SandboxConfig) -> dict[str, Any]:
    """Once, and once more when that told nothing: a machine that was busy must not condemn the task."""
    limit = max(_LEAST, float(settings_of(prepared.task)["verifier_timeout"]))
    told: dict[str, Any] = {}
    for _ in range(2):
        async with open_sandbox(box_of(prepared, config), config) as untouched:
            there = await present(untouched)
            nothing = await verify(untouched, prepared, limit, untouched=True)
        tools: list[str] = []
        solved = await _solution(prepared, config, limit, tools) if settings_of(prepared.task)["solved"] else None
        told = {
            "present": sorted(there),
            "nothing": _plain(nothing),
            "solved": solved and _plain(solved),
            "tools": tools,
        }
        if not _useless(nothing, solved):
            break
    return told


def _plain(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__dataclass_fields__}


async def _solution(prepared: Prepared, config: SandboxConfig, limit: float, tools: list[str]) -> Run:
    """solve.sh where an agent would work, then judged as an agent's work is. ``tools`` gets those it replaces."""
    settings, folder = settings_of(prepared.task), folder_of(prepared.task) / "solution"
    files = await asyncio.to_thread(files_of, folder)
    async with _solver(prepared, config) as box:
        in_image = prepared.repo is None
        baseline = await patches.snapshot(box, prepared.workdir) if in_image and not prepared.whole else None
        words = ["bash", "-c", f"mkdir -p {_SOLUTION} && tar -C {_SOLUTION} -xf - && exec {_SOLUTION}/solve.sh 2>&1"]
        env, stdin = settings["solution_env"], packed(files)
        done = await box.exec(words, env=env, cwd=prepared.workdir, stdin=stdin, timeout=limit)
        await box.kill()
        tools += replaced(await changes(box))
        if prepared.whole:
            run = await _verify_left(prepared, box, config, limit)
        else:
            run = await _verify_patch(prepared, await patches.extract(box, prepared, baseline), config, limit)
    run = run if isinstance(run, Run) else Run(why=run.detail)
    said = done.stdout.decode("utf-8", "replace").strip()[-200:]
    return run if run.reward else replace(run, why=f"{run.why} (solve.sh ended with {done.code}: {said})")


@asynccontextmanager
async def _solver(prepared: Prepared, config: SandboxConfig) -> AsyncGenerator[Sandbox]:
    """A sandbox with a folder for the solution, which no agent's has."""
    box = box_of(prepared, config)
    with tempfile.TemporaryDirectory(prefix="polar-solution-") as nothing:
        if prepared.repo is not None:
            box = replace(box, overlays=(*box.overlays, Overlay(Path(nothing), _SOLUTION)))
        async with open_sandbox(box, config) as sandbox:
            yield sandbox

"""One run of a patch against test files, in a sandbox that is made for it and never used again.

Apply, install, look, place the tests, build, test: each a command of its own. The verdict's run and the runs that prove
it (``canary``) are this same function with other test files, so nothing inside can tell them apart.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from polar_env.config import SandboxConfig
from polar_env.grade.audit import Changes, Watch
from polar_env.grade.hidden import Hidden, place
from polar_env.grade.phases import Phases, log, marked
from polar_env.sandbox import Box, ExecResult, Overlay
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.tasks import ENV_PREFIX, Prepared

LOG_LIMIT = 64 * 1024 * 1024
"""Bytes of test log that are kept."""
PATCH_FILE = "/tmp/patch.diff"  # noqa: S108 - in the sandbox; the official harness uses the same place
AROUND = 90.0
"""Seconds for what is done around installing, building and testing: looking, and putting the tests in place. More is
the patch's doing, which filled the sandbox. Less than ``budget.finalise``, so that it ends in a verdict."""
_APPLY_TIMEOUT = 120.0
_APPLY = ("git apply --verbose", "git apply --verbose --3way", "git apply --verbose --reject",
          "patch --batch --forward --fuzz=5 -p1 -i", "git apply --verbose -p0")  # fmt: skip
"""The chain of swebench 5.0 (harness/run_evaluation.py: GIT_APPLY_CMDS), and patches made with ``diff.noprefix``; the
tree is reset between the attempts."""
_Limit = TypeVar("_Limit", int, float)
_OFFLINE: Mapping[str, str] = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it inverted: 0 turns isolation off, so pip needs no index
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # or every command would change files the audit watches
    "PYTHONNOUSERSITE": "1",
}


@dataclass(frozen=True, slots=True)
class Course:
    """What is run, with what time. ``phases`` is ``None`` for a script of unknown form: it is run whole."""

    prepared: Prepared
    config: SandboxConfig
    script: str
    phases: Phases | None
    timeout: float
    """Seconds for installing, building and testing together."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A finished run. ``failed`` says why there are no tests results at all: what did not apply, install or fit."""

    applied: bool = True
    failed: str = ""
    timed_out: bool = False
    ran: bool = False
    """The tests were started."""
    log: bytes = b""
    """For the official parsers."""
    tests: bytes = b""
    """The tests' own output."""
    code: int | None = None
    changes: Changes = field(default_factory=Changes)
    marked: bool = False
    """Something printed SWE-bench's markers."""
    seconds: float = 0.0


def box_of(prepared: Prepared, config: SandboxConfig) -> Box:
    """The sandbox a prepared task is graded in: repository and environment copy-on-write, no network."""
    shown = ((prepared.repo, prepared.workdir), (prepared.env, ENV_PREFIX), *prepared.overlays)
    return Box(
        workdir=prepared.workdir,
        overlays=tuple(Overlay(path, at) for path, at in shown if path),
        read_only=prepared.mounts,
        env={**_OFFLINE, **prepared.env_vars},
        image=prepared.image,
        memory_mib=_least(prepared.memory_mib, config.memory_mib) if prepared.image else config.memory_mib,
        cpus=_least(prepared.cpus, config.cpus) if prepared.image else config.cpus,
        blackholes=tuple(filter(None, [prepared.task.source.get("needs_route")])),
    )


def _least(one: _Limit | None, other: _Limit | None) -> _Limit | None:
    """The stricter of two limits; 0, which limits nothing, and ``None`` are none."""
    return min(filter(None, (one, other)), default=other)


async def run(course: Course, patch: bytes, tests: Hidden) -> Trial:
    """Run it. ``patch`` may be empty. Raises SandboxError when the sandbox itself fails."""
    async with open_sandbox(box_of(course.prepared, course.config), course.config) as fresh:
        if patch and (failed := await apply_patch(fresh, patch)):
            return Trial(applied=False, failed=failed)
        started = time.monotonic()
        try:
            async with asyncio.timeout(course.timeout + AROUND):
                made = await (_split(course, course.phases, fresh, tests) if course.phases else _whole(course, fresh))
        except TimeoutError:
            made = Trial(timed_out=True, failed=f"what it installed kept the grader busy for {AROUND:.0f} s")
        return replace(made, seconds=time.monotonic() - started)


async def _split(course: Course, phases: Phases, fresh: Sandbox, tests: Hidden) -> Trial:
    ends = time.monotonic() + course.timeout
    watch = await Watch.begin(fresh)
    installed = await _bash(fresh, phases.install, ends)
    changes = await watch.changes()
    seen = Trial(changes=changes, marked=marked(installed.stdout))
    if installed.timed_out:
        return replace(seen, timed_out=True, failed="installing the project took too long")
    if failed := await place(fresh, tests):
        return replace(seen, failed=failed)
    if phases.build:
        built = await _bash(fresh, phases.build, ends)
        await fresh.kill()
        seen = replace(seen, marked=seen.marked or marked(built.stdout))
        if failed := await place(fresh, tests):  # again: building ran code of the patch beside them
            return replace(seen, failed=failed)
    done = await _bash(fresh, phases.test, ends)
    return replace(
        seen,
        ran=True,
        timed_out=done.timed_out,
        log=log(done.stdout, done.code),
        tests=done.stdout,
        code=done.code,
        marked=seen.marked or marked(done.stdout),
    )


async def _whole(course: Course, fresh: Sandbox) -> Trial:
    script = f"exec 2>&1\n{{\n{course.script}\n}}; exit\n"
    done = await _bash(fresh, script, time.monotonic() + course.timeout)
    return Trial(ran=True, timed_out=done.timed_out, log=done.stdout, tests=done.stdout, code=done.code)


async def _bash(sandbox: Sandbox, script: str, ends: float) -> ExecResult:
    """Run a script until ``ends`` (monotonic), at least for a moment."""
    left = max(ends - time.monotonic(), 0.1)
    return await sandbox.exec(["bash", "-c", script], timeout=left, output_limit=LOG_LIMIT)


async def apply_patch(sandbox: Sandbox, patch: bytes) -> str:
    """Apply a patch in the sandbox's working directory. Empty when that was done, else why not."""
    await sandbox.write(PATCH_FILE, patch)
    words = ""
    for attempt, command in enumerate(_APPLY):
        if attempt:
            await _shell(sandbox, "git checkout -- . ; git clean -fd")
        done = await _shell(sandbox, f"{command} {PATCH_FILE}")
        if done.code == 0:
            return ""
        words = words or (done.stderr or done.stdout).decode("utf-8", "replace").strip()
    # The chain can leave the patch fully applied although each command failed (upstream checks the same).
    done = await _shell(sandbox, f"git apply --check --reverse {PATCH_FILE}")
    return "" if done.code == 0 else f"the patch does not apply: {words[-300:]}"


async def _shell(sandbox: Sandbox, command: str) -> ExecResult:
    return await sandbox.exec(["bash", "-c", command], timeout=_APPLY_TIMEOUT)

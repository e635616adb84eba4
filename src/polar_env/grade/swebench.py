"""The official evaluation in a fresh sandbox: apply the patch, run the row's script, let the package decide.

Nothing of the agent's sandbox is used but the patch. The log is captured outside, the script is read whole before it
starts (a test cannot rewrite it under bash's feet), and the network is off.
"""

import asyncio
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polar_env.config import SandboxConfig
from polar_env.errors import GradeError, SandboxError
from polar_env.grade import canary
from polar_env.grade import report as official
from polar_env.grade.patch import review, without_tests
from polar_env.sandbox import Box, ExecResult, Overlay
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.tasks import ENV_PREFIX, WORKDIR, Prepared
from polar_env.types import Verdict, VerdictStatus

LOG_LIMIT = 64 * 1024 * 1024
"""Bytes of test log that are kept."""
_PATCH_FILE = "/tmp/patch.diff"  # noqa: S108 - in the sandbox; the official harness uses the same place
_SCRIPT_FILE = "/tmp/eval.sh"  # noqa: S108
_APPLY_TIMEOUT = 120.0
_CANARY_LEAST = 10.0
"""Seconds the second run gets at least, when the first used up the budget."""
_APPLY = ("git apply --verbose", "git apply --verbose --3way", "git apply --verbose --reject",
          "patch --batch --forward --fuzz=5 -p1 -i")  # fmt: skip
"""The chain of swebench 5.0 (harness/run_evaluation.py: GIT_APPLY_CMDS); the tree is reset between the attempts."""
_START, _END = b">>>>> Start Test Output", b">>>>> End Test Output"
_OFFLINE: Mapping[str, str] = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""pip reads ``no-build-isolation`` inverted from the environment: 0 turns isolation off, so pip needs no index."""


def box_of(prepared: Prepared, config: SandboxConfig) -> Box:
    """The sandbox a prepared task is graded in: repository and environment copy-on-write, no network."""
    overlays = [Overlay(path, at) for path, at in ((prepared.repo, WORKDIR), (prepared.env, ENV_PREFIX)) if path]
    return Box(
        workdir=WORKDIR,
        overlays=tuple(overlays),
        read_only=prepared.mounts,
        env={**_OFFLINE, **prepared.env_vars},
        image=prepared.image,
        memory_mib=config.memory_mib,
        cpus=config.cpus,
        blackholes=tuple(filter(None, [prepared.task.source.get("needs_route")])),
    )


async def grade(
    prepared: Prepared,
    patch: bytes,
    *,
    sandbox: SandboxConfig,
    timeout: float,  # noqa: ASYNC109 - the budget of the test run, which ends in a verdict
) -> Verdict:
    """Grade a patch with SWE-bench's own script, parsers and rules. ``timeout`` (seconds) bounds the test run.

    Raises:
        GradeError: the sandbox or the grading process failed; says nothing about the patch.
    """
    started = time.monotonic()
    if reason := review(patch):
        return Verdict(VerdictStatus.REFUSED, detail=reason)
    kept, dropped = without_tests(patch, prepared.task.row)
    note = f"left out, as the tests bring their own: {', '.join(dropped)}" if dropped else ""
    if not kept.strip():
        return Verdict(VerdictStatus.EMPTY_PATCH, detail=note)
    try:
        status, detail, counts = await _evaluate(prepared, kept, sandbox, timeout)
    except SandboxError as error:
        raise GradeError(f"the grading sandbox failed: {error}") from error
    text = "; ".join(part for part in (detail, note) if part)
    return Verdict(status, *counts, detail=text, seconds=time.monotonic() - started)


async def _evaluate(prepared: Prepared, patch: bytes, config: SandboxConfig, timeout: float) -> "_Found":  # noqa: ASYNC109
    script = await asyncio.to_thread(_script, prepared)
    async with open_sandbox(box_of(prepared, config), config) as fresh:
        if failed := await _apply(fresh, patch):
            return VerdictStatus.PATCH_FAILED, failed, _NOTHING
        ran = await _run(fresh, script, timeout)
    found = await asyncio.to_thread(_decide, prepared.task.row, patch, ran, timeout)
    if found[0] is not VerdictStatus.RESOLVED:
        return found
    forced = await _forced(prepared, patch, config, script, timeout - ran.seconds)
    if forced:
        return VerdictStatus.REFUSED, f"passes although it was rewritten to fail: {forced}", found[2]
    return found


async def _forced(
    prepared: Prepared,
    patch: bytes,
    config: SandboxConfig,
    script: str,
    timeout: float,  # noqa: ASYNC109
) -> str:
    """Run again with the tests made to fail (``canary``): a test that passes all the same, or an empty string."""
    async with open_sandbox(box_of(prepared, config), config) as fresh:
        planted = await canary.plant(fresh, prepared.task.row, script)
        if planted is None or await _apply(fresh, patch):
            return ""
        ran = await _run(fresh, planted.script, max(timeout, _CANARY_LEAST))
    if ran.timed_out:
        return ""  # a first run that used most of the budget leaves no proof either way
    return await asyncio.to_thread(_still_passing, prepared.task.row, planted.tests, ran)


def _still_passing(row: Mapping[str, Any], tests: Sequence[str], ran: ExecResult) -> str:
    with _log(ran) as path:
        statuses = official.statuses(row, path)
    return next((test for test in tests if statuses.get(test) == "PASSED"), "")


def _script(prepared: Prepared) -> str:
    """The row's script for this environment, as one compound command: bash reads all of it before it runs any."""
    script = official.eval_script(prepared.task.row)
    for old, new in ((str(prepared.task.row["base_commit"]), prepared.base_commit), *prepared.eval_rewrites):
        script = script.replace(old, new)
    return f"{{\n{script}\n}}; exit\n"


async def _apply(sandbox: Sandbox, patch: bytes) -> str:
    """Empty when the patch was applied, else why not."""
    await sandbox.write(_PATCH_FILE, patch)
    words = ""
    for attempt, command in enumerate(_APPLY):
        if attempt:
            await _shell(sandbox, "git checkout -- . ; git clean -fd")
        done = await _shell(sandbox, f"{command} {_PATCH_FILE}")
        if done.code == 0:
            return ""
        words = (done.stderr or done.stdout).decode("utf-8", "replace").strip() or words
    # The chain can leave the patch fully applied although each command failed (upstream checks the same).
    done = await _shell(sandbox, f"git apply --check --reverse {_PATCH_FILE}")
    return "" if done.code == 0 else f"the patch does not apply: {words[-300:]}"


async def _shell(sandbox: Sandbox, command: str) -> ExecResult:
    return await sandbox.exec(["bash", "-c", command], timeout=_APPLY_TIMEOUT)


async def _run(sandbox: Sandbox, script: str, timeout: float) -> ExecResult:  # noqa: ASYNC109
    await sandbox.write(_SCRIPT_FILE, script.encode())
    together = f"exec bash {_SCRIPT_FILE} 2>&1"
    return await sandbox.exec(["bash", "-c", together], timeout=timeout, output_limit=LOG_LIMIT)


_Found = tuple[VerdictStatus, str, tuple[tuple[int, int], tuple[int, int]]]
_NOTHING = ((0, 0), (0, 0))


def _decide(row: Mapping[str, Any], patch: bytes, ran: ExecResult, timeout: float) -> _Found:
    """(status, detail, counts) of a finished test run. Blocks."""
    log = ran.stdout
    if ran.timed_out:
        return VerdictStatus.TESTS_TIMED_OUT, f"the tests ran for more than {timeout:.0f} s", _NOTHING
    if log.count(_START) > 1 or log.count(_END) > 1:
        return VerdictStatus.REFUSED, "the log has SWE-bench's markers more than once: it was forged", _NOTHING
    with _log(ran) as path:
        found = official.report(row, patch.decode("utf-8", "replace"), path)
    return _read(found, log, ran.code)


@contextmanager
def _log(ran: ExecResult) -> Generator[Path]:
    """The captured output as a file: the package opens it strictly as UTF-8, and a test may print anything."""
    with tempfile.TemporaryDirectory(prefix="polar-log-") as folder:
        path = Path(folder, "test_output.txt")
        path.write_text(ran.stdout.decode("utf-8", "replace"), encoding="utf-8", newline="")
        yield path


def _read(found: Mapping[str, Any], log: bytes, code: int | None) -> _Found:
    tests: Mapping[str, Mapping[str, list[str]]] = found.get("tests_status", {})
    counts = (_count(tests.get("FAIL_TO_PASS")), _count(tests.get("PASS_TO_PASS")))
    if found["resolved"]:
        return VerdictStatus.RESOLVED, "", counts
    if tests:
        return VerdictStatus.UNRESOLVED, "", counts
    where = "inside" if _START in log else "before"
    reason = found.get("infra_failure_reason") or f"exit code {code}"
    return VerdictStatus.UNRESOLVED, f"no test result: the script failed {where} its tests ({reason})", counts


def _count(results: Mapping[str, list[str]] | None) -> tuple[int, int]:
    if not results:
        return 0, 0
    return len(results["success"]), len(results["success"]) + len(results["failure"])

"""A Harbor task folder's own verifier: ``tests/test.sh`` runs after the agent, and the reward it writes is read.

Where it runs is ``grade_in``. ``agent``, the format's default (Harbor's ``shared``): in the filesystem as the agent
left it, because such tasks ask for states of a machine (a service configured, a package built, a file in /etc), of
which a patch of the work tree is only a part. ``fresh`` (Harbor's ``separate``): in an untouched sandbox with the
change of the work tree applied, as all other grading here; choose it where the result is in the work tree.

Either way every process of the agent is dead, ``/tests`` and ``/logs/verifier`` are emptied and filled from outside
only then, and the reward is read after every process of the run is dead. In an image graded in place the tools are
those the agent left; a local task's work tree is carried into a fresh sandbox, byte for byte, in both cases.

A verifier is believed once it was seen to work: here, on the untouched environment and on the folder's own solution,
measured once per task. A task whose solution earns nothing here (test.sh installs from a network that no sandbox has)
is an error that masks, never a zero; after that, a reward that is missing or no number is the agent's doing, and 0.
"""

import asyncio
import io
import json
import math
import tarfile
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from polar_env.config import SandboxConfig
from polar_env.errors import GradeError, SandboxError
from polar_env.grade import patch as patches
from polar_env.grade.review import review
from polar_env.grade.right import remembered
from polar_env.grade.trial import apply_patch, box_of
from polar_env.sandbox import Overlay
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.tasks import Prepared
from polar_env.tasks.harbor import files_of, folder_of, settings_of
from polar_env.verdict import Flag, Verdict, VerdictStatus

REWARD_FILES = ("reward.json", "reward.txt")
"""In this order, as Harbor reads them; the first that is there counts."""
REWARD_LIMIT = 64 * 1024
CARRIED_LIMIT = 512 * 1024 * 1024
"""Bytes of a work tree that are carried into the sandbox where it is graded."""
_SOLUTION = "/solution"
_LOG_LIMIT = 1024 * 1024
_TIMEOUT = 300.0
_LEAST = 120.0
"""Seconds a verifier gets at least when it is measured."""

_EMPTY = """
for at in /tests /logs /logs/verifier /logs/agent /logs/artifacts; do
    if [ -L $at ] || { [ -e $at ] && [ ! -d $at ]; }; then rm -rf $at; fi
done
mkdir -p /tests /logs/verifier /logs/agent /logs/artifacts
chmod -R u+rwX /tests /logs/verifier
find /tests /logs/verifier -mindepth 1 -delete
left=$(find /tests /logs/verifier -mindepth 1)
[ -z "$left" ] || { echo "still there: $left" >&2; exit 1; }
"""
_PRESENT = "find /tests /logs/verifier -mindepth 1 2>/dev/null | head -n 1000; true"
_CARRY = r"""
find . -type d ! -perm -700 -exec chmod u+rwx {} \;
find . -type f ! -perm -400 -exec chmod u+r {} +
exec tar -cf - .
"""
_UNPACK = "find . -mindepth 1 -delete && exec tar -xf -"


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of test.sh. ``reward`` is ``None`` when it left none that can be used, and ``why`` says so."""

    reward: float | None = None
    why: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    said: str = ""
    """The end of what it printed."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What was measured: the reward of doing nothing, and how long the solution's verification took."""

    nothing: float
    seconds: float
    proven: bool
    present: frozenset[str]
    """What the untouched environment holds where the verifier's files are put."""


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
    with _failing():
        known = await _known(prepared, sandbox)
        return await _fresh(prepared, patch, known, sandbox, timeout)


async def grade_left(
    prepared: Prepared,
    patch: bytes,
    left: Sandbox,
    *,
    sandbox: SandboxConfig,
    timeout: float,  # noqa: ASYNC109 - as above
) -> Verdict:
    """Grade what the agent left in its sandbox ``left``, after ``left.kill()``. Raises GradeError as ``grade`` does."""
    with _failing():
        known = await _known(prepared, sandbox)
        planted = sorted(await _present(left) - known.present)
        if prepared.whole:
            found = await _judged_left(prepared, left, known, sandbox, timeout)
        else:
            found = await _fresh(prepared, patch, known, sandbox, timeout)
    if not planted:
        return found
    words = f"the agent left {', '.join(planted[:3])}, where the verifier's own files are put"
    flags = tuple(sorted({*found.flags, Flag.PLANTED}))
    return replace(found, flags=flags, detail="; ".join(filter(None, (found.detail, words))))


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


# --- verdicts -----------------------------------------------------------------------------------------------------


async def _fresh(prepared: Prepared, patch: bytes, known: _Known, config: SandboxConfig, limit: float) -> Verdict:
    limit = _limit(prepared, limit)
    return _verdict(await _verify_patch(prepared, patch, config, limit), known, limit)


async def _verify_patch(prepared: Prepared, patch: bytes, config: SandboxConfig, limit: float) -> _Run | Verdict:
    if objection := review(patch):
        return Verdict(VerdictStatus.REFUSED, detail=objection.reason, flags=(objection.flag,))
    async with open_sandbox(box_of(prepared, config), config) as fresh:
        if patch.strip() and (failed := await apply_patch(fresh, patch)):
            return Verdict(VerdictStatus.PATCH_FAILED, detail=failed)
        return await _verify(fresh, prepared, limit, untouched=True)


async def _judged_left(
    prepared: Prepared, left: Sandbox, known: _Known, config: SandboxConfig, limit: float
) -> Verdict:
    limit = _limit(prepared, limit)
    return _verdict(await _verify_left(prepared, left, config, limit), known, limit)


async def _verify_left(prepared: Prepared, left: Sandbox, config: SandboxConfig, limit: float) -> _Run | Verdict:
    """In the sandbox the agent left; a local one's work tree is carried into one that is untouched but for it, since
    after a kill it has neither limits nor /proc."""
    if prepared.repo is None:
        return await _verify(left, prepared, limit)
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
        return await _verify(fresh, prepared, limit, untouched=True)


def _limit(prepared: Prepared, budget: float) -> float:
    return min(budget, float(settings_of(prepared.task)["verifier_timeout"]))


def _verdict(run: _Run | Verdict, known: _Known, limit: float) -> Verdict:
    """What a run, or what kept it from running, says of the agent. Raises GradeError when its time was too short to say
    anything. Pure."""
    if isinstance(run, Verdict):
        return run
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


# --- one run ------------------------------------------------------------------------------------------------------


async def _verify(box: Sandbox, prepared: Prepared, limit: float, *, untouched: bool = False) -> _Run:
    """Place the tests from outside, run test.sh from the working directory, end everything, read the reward."""
    if failed := await _place(box, prepared, untouched):
        return _Run(why=failed)
    env, started = settings_of(prepared.task)["verifier_env"], time.monotonic()
    words = ["bash", "-c", "/tests/test.sh 2>&1"]
    done = await box.exec(words, env=env, cwd=prepared.workdir, timeout=limit, output_limit=_LOG_LIMIT)
    seconds, said = time.monotonic() - started, done.stdout.decode("utf-8", "replace").strip()[-400:]
    await box.kill()
    if done.code is None:
        return _Run(timed_out=True, seconds=seconds, said=said, why=f"test.sh ran for more than {limit:g} s")
    reward, why = await _reward(box)
    if reward and done.code >= 128:
        reward, why = 0.0, f"test.sh was killed (exit code {done.code}), so the reward beside it is not its word"
    return _Run(reward, f"{why}; it said: {said}" if reward is None else why, seconds=seconds, said=said)


async def _place(box: Sandbox, prepared: Prepared, untouched: bool) -> str:
    """The verifier's files and nothing else where they belong; empty when they are there, else why not.

    In an untouched sandbox its own tar unpacks them; where an agent was, they are written from outside one by one.
    """
    files = await asyncio.to_thread(files_of, folder_of(prepared.task) / "tests")
    script, stdin = (f"{_EMPTY}exec tar -C /tests -xf -\n", _tar(files)) if untouched else (_EMPTY, None)
    emptied = await box.exec(["sh", "-c", script], cwd="/", stdin=stdin, timeout=_TIMEOUT)
    if emptied.code != 0:
        return f"/tests cannot be made: {emptied.stderr.decode('utf-8', 'replace').strip()[-300:]}"
    for name, (data, mode) in files.items() if not untouched else ():
        await box.write(f"/tests/{name}", data, _mode(name, mode))
    return ""


def _mode(name: str, mode: int) -> int:
    return mode | (0o555 if name in ("test.sh", "solve.sh") else 0o444)


def _tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), _mode(name, mode)
            tar.addfile(entry, io.BytesIO(data))
    return held.getvalue()


async def _present(box: Sandbox) -> frozenset[str]:
    """What is in the verifier's places."""
    done = await box.exec(["sh", "-c", _PRESENT], cwd="/", timeout=_TIMEOUT, output_limit=_LOG_LIMIT)
    return frozenset(done.stdout.decode("utf-8", "backslashreplace").splitlines())


async def _reward(box: Sandbox) -> tuple[float | None, str]:
    """(reward, why there is none). Everything in the sandbox is dead, so what is looked at is what is read."""
    paths = [f"/logs/verifier/{name}" for name in REWARD_FILES]
    looked = await box.exec(["stat", "-c", "%s %n %F", *paths], cwd="/", timeout=_TIMEOUT)
    told = [line.split(" ", 2) for line in looked.stdout.decode("utf-8", "replace").splitlines()]
    found = {line[1]: (line[0], line[2]) for line in told if len(line) == 3}
    path = next((path for path in paths if path in found), "")
    if not path:
        return None, "test.sh wrote neither /logs/verifier/reward.txt nor reward.json"
    size, kind = found[path]
    if not kind.startswith("regular"):
        return None, f"{path} is a {kind}, not a file"
    if not size.isdigit() or int(size) > REWARD_LIMIT:
        return None, f"{path} has {size} bytes, and a reward has few"
    try:
        return reward_of(path.rpartition("/")[2], await box.read(path))
    except SandboxError as error:
        return None, f"{path} cannot be read: {error}"


def reward_of(name: str, data: bytes) -> tuple[float | None, str]:
    """The reward that a reward file holds, in [0, 1], or ``None`` and why not. Pure.

    ``reward.txt`` holds a number; ``reward.json`` a number, or names and numbers, of which ``reward`` counts, or the
    only one (Harbor's verifier, and its rule that no value may be infinite or NaN).
    """
    try:
        text = data.decode("utf-8").strip()
        value: Any = json.loads(text) if name.endswith(".json") else float(text)
    except (UnicodeDecodeError, ValueError, RecursionError):
        return None, f"{name} holds no {'JSON' if name.endswith('.json') else 'number'}: {data[:60]!r}"
    if isinstance(value, dict):
        told = cast("dict[str, Any]", value)
        if "reward" not in told and len(told) != 1:
            return None, f"{name} holds no 'reward' among {', '.join(sorted(told)[:5]) or 'no names'}"
        value = told.get("reward", next(iter(told.values()), None))
    if not isinstance(value, int | float) or abs(value) > 1e9 or not math.isfinite(value):
        return None, f"{name} holds {str(value)[:60]!r}, which is no finite number"
    if not 0.0 <= value <= 1.0:
        return None, f"{name} holds {value:g}, and rewards lie between 0 and 1"
    return float(value), ""


# --- is the verifier to be believed? ------------------------------------------------------------------------------


async def _known(prepared: Prepared, config: SandboxConfig) -> _Known:
    """Raises GradeError: a verifier that does not tell the folder's own solution from nothing."""
    settings = settings_of(prepared.task)
    name = f"harbor-{settings['grade_in']}"
    told = await remembered(prepared, config.provider, name, partial(_measure, prepared, config))
    nothing, solved = _Run(**told["nothing"]), _Run(**told["solved"]) if told["solved"] else None
    if solved is None:
        if nothing.reward is None or nothing.reward >= 1.0:
            what = nothing.why or "it gives an untouched environment the full reward"
            raise GradeError(f"{prepared.task.task_id}: its verifier does not work here: {what}")
    elif solved.reward is None or solved.reward <= (nothing.reward or 0.0):
        raise GradeError(
            f"{prepared.task.task_id}: its own solution earns {solved.reward} here and doing nothing {nothing.reward}, "
            f"so nothing can be told ({solved.why or solved.said or 'no output'}). Sandboxes have no network: what "
            f"test.sh or solve.sh installs must be in the image. {_ELSEWHERE if not prepared.whole else ''}".strip()
        )
    return _Known(nothing.reward or 0.0, (solved or nothing).seconds, solved is not None, frozenset(told["present"]))


_ELSEWHERE = 'And only the work tree counts with grade_in = "fresh".'


async def _measure(prepared: Prepared, config: SandboxConfig) -> dict[str, Any]:
    limit = max(_LEAST, float(settings_of(prepared.task)["verifier_timeout"]))
    async with open_sandbox(box_of(prepared, config), config) as untouched:
        present = await _present(untouched)
        nothing = await _verify(untouched, prepared, limit, untouched=True)
    solved = await _solution(prepared, config, limit) if settings_of(prepared.task)["solved"] else None
    return {"present": sorted(present), "nothing": _plain(nothing), "solved": solved and _plain(solved)}


def _plain(run: _Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in _Run.__dataclass_fields__}


async def _solution(prepared: Prepared, config: SandboxConfig, limit: float) -> _Run:
    """solve.sh where an agent would work, then judged as an agent's work is."""
    settings, folder = settings_of(prepared.task), folder_of(prepared.task) / "solution"
    files = await asyncio.to_thread(files_of, folder)
    async with _solver(prepared, config) as box:
        in_image = prepared.repo is None
        baseline = await patches.snapshot(box, prepared.workdir) if in_image and not prepared.whole else None
        words = ["bash", "-c", f"mkdir -p {_SOLUTION} && tar -C {_SOLUTION} -xf - && exec {_SOLUTION}/solve.sh 2>&1"]
        env, stdin = settings["solution_env"], _tar(files)
        done = await box.exec(words, env=env, cwd=prepared.workdir, stdin=stdin, timeout=limit)
        await box.kill()
        if prepared.whole:
            run = await _verify_left(prepared, box, config, limit)
        else:
            run = await _verify_patch(prepared, await patches.extract(box, prepared, baseline), config, limit)
    run = run if isinstance(run, _Run) else _Run(why=run.detail)
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

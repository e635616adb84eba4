"""One run of a task folder's verifier: ``tests/test.sh`` placed, run and ended, and the reward it wrote.

Used by ``harbor`` on what an agent left, on what the folder's own solution left and on nothing, in the same way.
"""

import asyncio
import io
import json
import math
import re
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from polar_env.errors import SandboxError
from polar_env.grade.review import RUNNERS
from polar_env.sandbox.sandbox import Foreign, Sandbox
from polar_env.tasks import Prepared
from polar_env.tasks.harbor import files_of, folder_of, settings_of

REWARD_FILES = ("reward.json", "reward.txt")
"""In this order, as Harbor reads them; the first that is there counts."""
REWARD_LIMIT = 64 * 1024
_LOG_LIMIT = 1024 * 1024
_TIMEOUT = 300.0
"""Seconds one step around test.sh may take."""

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
_HOOKS = r"""
[ "$1" = / ] || for name in conftest.py pytest.ini .pytest.ini pyproject.toml tox.ini setup.cfg setup.py; do
    if [ -e /$name ] || [ -L /$name ]; then echo /$name; fi
done
if [ -n "$2" ] && cd "$1" 2>/dev/null; then find . -maxdepth 2 2>/dev/null | grep -E "^\./($2)$"; fi
true
"""
"""pytest, asked for a file in /tests, reads what stands above it."""
_IN_CWD = re.compile(rb"\bpython[\d.]*\b[^\n]* -([mc]\b|\s|$)", re.MULTILINE)
"""How a Python is started that looks in its working directory, which is the agent's, before it looks anywhere else."""
_NAMES = "|".join(sorted({*sys.stdlib_module_names, *(name.decode() for name in RUNNERS)} - {"test"}))
_MODULES = rf"({_NAMES})(\.pyc?|(\.[a-zA-Z0-9_-]+)?\.so|/__init__\..*)"
_UNSEEN = "more than can be looked at"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of test.sh. ``reward`` is ``None`` when it left none that can be used, and ``why`` says so."""

    reward: float | None = None
    why: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    said: str = ""
    """The end of what it printed."""
    hooks: tuple[str, ...] = ()
    """What was there that changes what a test run means: pytest's settings above /tests, and where the verifier starts
    a Python that looks in the work tree first, modules there that stand in for Python's own or for a test runner."""


async def verify(box: Sandbox, prepared: Prepared, limit: float, *, untouched: bool = False) -> Run:
    """Place the tests from outside, run test.sh from the working directory, end everything, read the reward."""
    files = await asyncio.to_thread(files_of, folder_of(prepared.task) / "tests")
    hooks = await _hooks(box, prepared.workdir, files)
    if failed := await _place(box, files, untouched):
        return Run(why=failed, hooks=hooks)
    return replace(await _run(box, prepared, limit), hooks=hooks)


async def _run(box: Sandbox, prepared: Prepared, limit: float) -> Run:
    env, started = settings_of(prepared.task)["verifier_env"], time.monotonic()
    words = ["bash", "-c", "/tests/test.sh 2>&1"]
    done = await box.exec(words, env=env, cwd=prepared.workdir, timeout=limit, output_limit=_LOG_LIMIT)
    seconds, said = time.monotonic() - started, done.stdout.decode("utf-8", "replace").strip()[-400:]
    await box.kill()
    if done.code is None:
        return Run(timed_out=True, seconds=seconds, said=said, why=f"test.sh ran for more than {limit:g} s")
    reward, why = await _reward(box)
    if reward and done.code >= 128:
        reward, why = 0.0, f"test.sh was killed (exit code {done.code}), so the reward beside it is not its word"
    return Run(reward, f"{why}; it said: {said}" if reward is None else why, seconds=seconds, said=said)


async def _place(box: Sandbox, files: Mapping[str, tuple[bytes, int]], untouched: bool) -> str:
    """The verifier's files and nothing else where they belong; empty when they are there, else why not.

    In an untouched sandbox its own tar unpacks them; where an agent was, they are written from outside one by one.
    """
    script, stdin = (f"{_EMPTY}exec tar -C /tests -xf -\n", packed(files)) if untouched else (_EMPTY, None)
    emptied = await box.exec(["sh", "-c", script], cwd="/", stdin=stdin, timeout=_TIMEOUT)
    if emptied.code != 0:
        return f"/tests cannot be made: {emptied.stderr.decode('utf-8', 'replace').strip()[-300:]}"
    for name, (data, mode) in files.items() if not untouched else ():
        await box.write(f"/tests/{name}", data, _mode(name, mode))
    return ""


def _mode(name: str, mode: int) -> int:
    return mode | (0o555 if name in ("test.sh", "solve.sh") else 0o444)


def packed(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), _mode(name, mode)
            tar.addfile(entry, io.BytesIO(data))
    return held.getvalue()


async def present(box: Sandbox) -> frozenset[str]:
    """What is in the verifier's places."""
    done = await box.exec(["sh", "-c", _PRESENT], cwd="/", timeout=_TIMEOUT, output_limit=_LOG_LIMIT)
    return frozenset(done.stdout.decode("utf-8", "backslashreplace").splitlines())


async def _hooks(box: Sandbox, workdir: str, files: Mapping[str, tuple[bytes, int]]) -> tuple[str, ...]:
    modules = _MODULES if any(_IN_CWD.search(data) for data, _ in files.values()) else ""
    words = ["sh", "-c", _HOOKS, "polar", workdir, modules]
    done = await box.exec(words, cwd="/", timeout=_TIMEOUT, output_limit=_LOG_LIMIT)
    found = tuple(done.stdout.decode("utf-8", "backslashreplace").splitlines())
    return found if done.code == 0 else (*found, _UNSEEN)


async def changes(box: Sandbox) -> list[str]:
    """How an image's files were changed, where the provider can tell."""
    return await box.changes() if isinstance(box, Foreign) else []


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

"""Random kills of harnesses, sandboxes, graders and whole workers: every rollout ends by name, and nothing is left.

``make chaos`` runs a hundred; CI runs a few.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from census import census, listeners
from polar_env.config import PolarConfig
from polar_env.rollout import open_proxy, rollout
from polar_env.types import INFRASTRUCTURE, Outcome, RolloutResult
from rollout_helpers import adopting, below_us, delivered, job, left_running, settings, settled

pytestmark = pytest.mark.e2e

VICTIMS = {"harness": "instruction", "sandbox": "bwrap", "grader": "polar_env.grade.report"}
"""Kind -> what its command line holds."""


class Held:
    """What rollouts may not add to: mounts, control groups of sandboxes, and sockets this process and its children
    listen on."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> dict[str, str]:
        found = census()
        groups = {name: "control group" for name in found.cgroups if _nobodys(Path(name).name)}
        mounts = {f"mount {name}": told for name, told in found.mounts.items()}
        sockets = {f"socket {inode}": told for inode, told in listeners([os.getpid(), *below_us()]).items()}
        return mounts | groups | sockets

    def more(self, seconds: float = 60.0) -> dict[str, str]:
        """What there is now and was not, once what is being removed had the time to go."""
        deadline, left = time.monotonic() + seconds, self._left()
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            now = self._left()
            left = {key: told for key, told in left.items() if key in now}
        return left

    def _left(self) -> dict[str, str]:
        return {key: told for key, told in self._now().items() if key not in self._before}


def _nobodys(group: str) -> bool:
    """Is a sandbox's group (``polar-PID-...``) left behind: did its process end, or is it this one, which has none?
    Sandboxes of others run beside this test."""
    _, pid, *_ = group.split("-")
    return pid.isdigit() and (pid == str(os.getpid()) or not Path("/proc", pid).exists())


async def shoot(rng: random.Random, shots: Counter[str], over: asyncio.Event) -> None:
    """Kill something of a rollout every now and then."""
    while not over.is_set():
        await asyncio.sleep(rng.uniform(0.2, 0.9))
        kind = rng.choice(list(VICTIMS))
        running = await asyncio.to_thread(below_us)
        targets = [
            pid for pid, command in running.items() if VICTIMS[kind] in command and "polar-janitor" not in command
        ]
        if targets:
            shots[kind] += 1
            with_pid = rng.choice(targets)
            try:
                os.kill(with_pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


async def play(config: PolarConfig, count: int, seed: int) -> tuple[list[RolloutResult], Counter[str]]:
    shots: Counter[str] = Counter()
    over, slots = asyncio.Event(), asyncio.Semaphore(3)

    async def one(index: int) -> RolloutResult:
        async with slots:
            return await rollout(job(config, index), proxy, config)

    async with open_proxy(config) as proxy, asyncio.TaskGroup() as group:
        group.create_task(shoot(random.Random(seed), shots, over))
        async with asyncio.TaskGroup() as rollouts:
            running = [rollouts.create_task(one(index)) for index in range(count)]
        over.set()
    return [task.result() for task in running], shots


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
async def test_every_rollout_ends_by_name_whatever_is_shot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    held, known = await asyncio.to_thread(Held), below_us()
    config = await settings(tmp_path / "sessions", engine={"scripts": ["fix", "give_up", "half"]})
    results, shots = await play(config, count, seed=count)
    endings = Counter((result.outcome, result.decision.masked) for result in results)
    print(f"{count} rollouts, shots {dict(shots)}: {dict(endings)}")  # noqa: T201 - what make chaos tells
    assert len(results) == count
    assert shots
    for result in results:
        row = delivered(result)
        assert (row["mask_sample"], bool(result.detail)) == (True, True) or result.verdict is not None
        assert result.decision.masked or result.outcome not in INFRASTRUCTURE
        assert result.decision.reward == 0.0 or result.outcome in (Outcome.COMPLETED, Outcome.AGENT_ERROR)
    assert left_running(known) == []
    assert await asyncio.to_thread(held.more) == {}
    assert list(scratch.iterdir()) == []


_WORKER = """
import asyncio, sys
from pathlib import Path
from rollout_helpers import job, settings
from polar_env.rollout import open_proxy, rollout
async def main():
    config = await settings(Path(sys.argv[1]))
    async with open_proxy(config) as proxy, asyncio.TaskGroup() as group:
        print("started", flush=True)
        for index in range(3):
            group.create_task(rollout(job(config, index), proxy, config))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "after", [0.7, pytest.param(2.0, marks=pytest.mark.slow), pytest.param(4.0, marks=pytest.mark.slow)]
)
def test_a_worker_that_is_shot_leaves_nothing(tmp_path: Path, after: float) -> None:
    held = Held()
    path = os.pathsep.join((str(Path(__file__).parents[1]), *filter(None, sys.path)))
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    with adopting():
        known = set(below_us())
        command = [sys.executable, "-c", _WORKER, str(tmp_path / "sessions")]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"started\n"
            time.sleep(after)
            worker.kill()
        assert settled(10.0, known=known) == []
    assert held.more() == {}

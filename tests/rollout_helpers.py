"""Rollouts on an embedded task with a small agent of our own, against a scripted or a broken engine."""

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig, PolarConfig, environment, load
from polar_env.engine import tokenizer
from polar_env.gym import contract, rows
from polar_env.harness.shell import Shell
from polar_env.named import make_engine
from polar_env.proxy.server import ProxyServer
from polar_env.rollout import RolloutJob, open_proxy, rollout
from polar_env.sandbox import janitor
from polar_env.tasks import rows as task_rows
from polar_env.types import RolloutResult, Sampling

AGENT = (Path(__file__).parent.parent / "examples" / "tiny_agent.py").read_text(encoding="utf-8")
"""The example agent: three lines of loop, one bash tool, OpenAI Chat."""

STORE = Path(environment("POLAR_CACHE", "~/.cache/polar_env")).expanduser()
"""Shared by all tests, as by all rollouts of a machine: tokenizer, task environments, CLIs."""


def python(code: str) -> tuple[str, ...]:
    """A shell-harness command that runs ``code``."""
    return ("python", "-c", code, "{instruction_file}")


class Renamed(Shell):
    """The example agent under a name of its own, for rows that choose their harness (`rollout_helpers:Renamed`)."""

    name = "renamed"

    def __init__(self, config: HarnessConfig) -> None:
        super().__init__(config.model_copy(update={"command": python(AGENT)}))


def hanging(marker: str) -> tuple[str, ...]:
    """A shell-harness command that calls nothing and never ends; ``marker`` finds it among the machine's processes."""
    return ("python", "-c", "import threading; threading.Event().wait()", marker)


async def settings(sessions: Path, **groups: Any) -> PolarConfig:
    """The configuration of these tests: scripted engine, embedded data, tiny agent; ``groups`` override."""
    base: dict[str, Any] = {
        "engine": {
            "kind": "scripted",
            "tokenizer": str(await asyncio.to_thread(tokenizer.fetch, STORE)),
            "scripts": ["fix"],
        },
        "harness": {"name": "shell", "command": python(AGENT)},
        "store": {"cache": str(STORE), "sessions": str(sessions)},
        "data": "embedded",
        "proxy": {"retry_grace": 0.5, "keep_alive": 1.0},
        "budget": {"agent": 60.0, "grade": 120.0},
    }
    for group, values in groups.items():
        base[group] = {**base[group], **values} if isinstance(base.get(group), Mapping) else values
    return load(base)


async def roll(config: PolarConfig, index: int = 0) -> RolloutResult:
    """One rollout on the first embedded task."""
    async with open_proxy(config) as proxy:
        return await rollout(job(config, index), proxy, config)


async def roll_unchecked(config: PolarConfig) -> RolloutResult:
    """The same with an engine that would not pass its check: it breaks after the rollout began."""
    engine = make_engine(config)
    async with aclosing(engine), ProxyServer(engine, config.proxy) as proxy:
        return await rollout(job(config), proxy, config)


def delivered(result: RolloutResult) -> dict[str, Any]:
    """The row NeMo-RL would get, judged."""
    row = rows.row(result, {"input": "x"}, model="policy", max_tokens=None)
    assert contract.violations(row) == []
    return row


def job(config: PolarConfig, index: int = 0) -> RolloutJob:
    """The rollout of the first embedded task that these tests run."""
    task = task_rows.load("embedded")[0]
    return RolloutJob(task, config.harness, Sampling(temperature=1.0, top_p=1.0, max_tokens=1024), index)


def left_running(known: Container[int] = ()) -> list[str]:
    """Processes under this one that are not ``known``, but for the grader's worker and the janitor, which serve all
    rollouts."""
    found = [command for pid, command in below_us().items() if pid not in known]
    ours = ("polar_env.grade.report", janitor.NAME)
    return [command for command in found if command and not any(name in command for name in ours)]


def below_us() -> dict[int, str]:
    """Pid -> command line of every process below this one."""
    parents = dict(_statuses())
    found: dict[int, str] = {}
    for pid in parents:
        if _descends(pid, os.getpid(), parents):
            with contextlib.suppress(OSError):
                found[pid] = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Orphans of the processes started in the block become ours, so that ``left_running`` sees who outlives a parent
    (Linux: PR_SET_CHILD_SUBREAPER)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(36, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(36, 0, 0, 0, 0)


def settled(seconds: float = 15.0, spared: str = "nothing", known: Container[int] = ()) -> list[str]:
    """What is left running once processes that were told to end had the time to; but for names that start so."""
    deadline = time.monotonic() + seconds
    while True:
        left = [command for command in left_running(known) if not command.startswith(spared)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _statuses() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _descends(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False

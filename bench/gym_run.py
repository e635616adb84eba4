"""Rows posted at once to the agent server, as NeMo-RL posts a step: what is lost, what /run adds, what it holds.

usage: python bench/gym_run.py [--rows 300] [--concurrency 8] [--hold 0.05] [--rounds 3] [--real]

Client, agent server and resources server are one process on one event loop: a row of a burst is answered when all of
the burst has been read, and `add` says so. The first line is one row for each slot, without a burst. A rollout holds
its slot for ``--hold`` seconds in its start and has no sandbox, so that the servers are what is measured; ``--real``
plays whole rollouts instead (example agent, scripted engine, sandbox, grading). Columns:

- lost: rows without a valid answer; twice: answers that share a session
- add p50, p99: time from the post to the answer, less that in the row's phases (queue, start, agent, finalise, grade)
- CPU: processor time of the process per row, the client's share too
- queue: the longest wait for a slot
- RSS: of the process before, after and at its highest, MiB; rounds after the first show what stays
- below: the highest RSS of the processes it started (sandboxes, agents, tests) together, MiB, looked at every second
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil
from nemo_gym import server_utils
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig

from polar_env.config import PolarConfig
from polar_env.errors import HarnessError
from polar_env.gym import contract
from polar_env.harness import Mount

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from engine_helpers import VllmServer
from gym_helpers import Gated, configured, row
from gym_server_helpers import agent, built, resources, serving
from rollout_helpers import settings

HEAD = "round   rows   lost  twice   add p50   add p99      CPU     queue     wall   RSS before   after    peak   below"


class Holding(Gated):
    """A preset (`gym_run:Holding`) that holds its slot for a while and then cannot be installed."""

    hold = 0.05

    async def install(self, store: Path) -> tuple[Mount, ...]:
        await asyncio.sleep(Holding.hold)
        raise HarnessError("a benchmark has no CLI")


@dataclass(frozen=True)
class Answered:
    """One row: what came back, and seconds from the post until then."""

    status: int
    row: dict[str, Any]
    seconds: float

    @property
    def valid(self) -> bool:
        return self.status == 200 and contract.violations(self.row) == []

    @property
    def added(self) -> float:
        phases = ("queue", "start", "agent", "finalise", "grade")
        return self.seconds - sum(float(self.row[f"seconds_{phase}"]) for phase in phases)


async def answered(client: aiohttp.ClientSession, port: int, index: int) -> Answered:
    """Post one row. The clock stops at the answer's last byte; reading it as JSON is the client's own time."""
    started = time.perf_counter()
    async with client.post(f"http://127.0.0.1:{port}/run", json=row(index)) as got:
        content = await got.read()
    return Answered(got.status, json.loads(content), time.perf_counter() - started)


@asynccontextmanager
async def agent_server(config: PolarConfig) -> AsyncGenerator[int]:
    """The port of an agent server in front of a resources server of that configuration."""
    session = server_utils.set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(session.close)
        server = resources(config.model_dump(mode="json"))
        port = await stack.enter_async_context(serving(built(server)))
        yield await stack.enter_async_context(serving(built(agent(port))))


async def measured(port: int, rows: int, first: int) -> str:
    """A round: its line of the table."""
    process = psutil.Process()
    forget_peak()
    before, started, used = process.memory_info().rss, time.perf_counter(), time.process_time()
    connections, highest = aiohttp.TCPConnector(limit=0), [0.0]
    client = aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None))  # as NeMo-RL's
    async with client, watched(process, highest), asyncio.TaskGroup() as group:
        tasks = [group.create_task(answered(client, port, first + index)) for index in range(rows)]
    wall, used, after = time.perf_counter() - started, time.process_time() - used, process.memory_info().rss
    valid = [answer for answer in (task.result() for task in tasks) if answer.valid]
    added = sorted(answer.added for answer in valid)
    sessions = {answer.row["polar"]["session_id"] for answer in valid}
    queue = max(float(answer.row["seconds_queue"]) for answer in valid)
    return (
        f"{rows:6} {rows - len(valid):6} {len(valid) - len(sessions):6} {1e3 * quantile(added, 0.5):6.0f} ms "
        f"{1e3 * quantile(added, 0.99):6.0f} ms {1e3 * used / rows:5.1f} ms {queue:7.1f} s {wall:6.1f} s "
        f"{before / 2**20:12.0f} {after / 2**20:7.0f} {peak():7.0f} {max(highest):7.0f}"
    )


@asynccontextmanager
async def watched(process: psutil.Process, highest: list[float]) -> AsyncGenerator[None]:
    """Keep the MiB that the processes below this one hold together, once a second."""

    async def watch() -> None:
        while True:
            highest.append(await asyncio.to_thread(held_below, process))
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        yield
        watching.cancel()


def held_below(process: psutil.Process) -> float:
    held = 0
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            held += child.memory_info().rss
    return held / 2**20


def quantile(ordered: list[float], share: float) -> float:
    """The nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def forget_peak() -> None:
    """The highest RSS is counted from now on (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> float:
    """The highest RSS since it was cleared, MiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


async def run(arguments: argparse.Namespace) -> None:
    Holding.hold = arguments.hold
    with TemporaryDirectory() as folder:
        async with VllmServer().run() as engine:
            if arguments.real:
                config = await settings(Path(folder), concurrency=arguments.concurrency)
            else:
                harness = {"name": "gym_run:Holding"}
                config = configured(Path(folder), engine.url, concurrency=arguments.concurrency, harness=harness)
            load = psutil.getloadavg()[0]
            print(f"{arguments.rows} rows at once, {arguments.concurrency} rollouts at a time; load {load:.1f}")
            print(HEAD)
            async with agent_server(config) as port:
                await measured(port, 1, 0)  # the engine is checked, modules are loaded
                first = 1
                for number, rows in enumerate([arguments.concurrency, *[arguments.rows] * arguments.rounds]):
                    print(f"{number:5} {await measured(port, rows, first)}", flush=True)
                    first += rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--hold", type=float, default=0.05, help="seconds a rollout keeps its slot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="whole rollouts in sandboxes, graded")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.modules["gym_run"] = sys.modules["__main__"]  # the preset is named by its module
    main()

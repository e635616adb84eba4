"""What capture costs as a session grows: time to build and rebuild, memory, bytes on disk, and who waits meanwhile.

usage: python bench/trajectory.py [--turns 150 --tokens 136000] [--repeat 5] [--peer-seconds 120] [--sessions 1000]

Without ``--turns``: 20, 60, 150 and 400 calls. Milliseconds are processor time, the best of ``--repeat`` runs; NeMo
Gym's own builder runs once, in a process of its own, on the same calls. With ``--sessions``: that many sessions of 100
calls live in one process, each with its proxy session, ledger and log; minutes. What it is doing is said on stderr.
"""

import argparse
import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polar_env.capture import Ledger, SegmentLog, rebuild
from polar_env.config import TrajectoryConfig
from polar_env.gym.rows import compact
from polar_env.gym.wire import encode
from polar_env.trajectory import build
from polar_env.types import CallRecord, RolloutResult, SealedLedger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from live_sessions import live_session

from trajectory_helpers import SESSION, long_calls, long_session, rollout

SIZES = ((20, 24_000), (60, 64_000), (150, 136_000), (400, 400_000))
LIVE = (100, 90_000)
"""Calls and tokens of each session that ``--sessions`` keeps alive."""

MIB = 2**20


def best(run: Callable[[], object], repeat: int, clock: Callable[[], float] = time.process_time) -> float:
    """Shortest of ``repeat`` runs, in ms: the one least disturbed by other load."""
    times = list[float]()
    for _ in range(repeat):
        gc.collect()
        start = clock()
        run()
        times.append(clock() - start)
    return 1e3 * min(times)


async def store(records: Iterable[CallRecord], directory: Path) -> SealedLedger:
    """Append every call durably, one after the other, and seal."""
    async with SegmentLog(directory) as log:
        session = Ledger(SESSION, log)
        for record in records:
            await session.append(record)
            session.mark_delivered(record.call_id)
        return session.seal()


# --- one session, longer and longer -----------------------------------------------------------------------------


def doing(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def line(turns: int, tokens: int, repeat: int, peer_seconds: float) -> str:
    """A line of the table."""
    doing(f"{turns} calls: log written, chains built, log rebuilt")
    built, again, stored = ours(turns, tokens, repeat)
    doing(f"{turns} calls: memory, every allocation traced")
    live, held, read = memory(turns, tokens)
    doing(f"{turns} calls: NeMo Gym's builder, at most {peer_seconds:g} s")
    theirs = peer(turns, tokens, peer_seconds) if peer_seconds else None
    times = f"{built:9.1f} {again:9.1f} {theirs or '-'!s:>10} {theirs.times(built) if theirs else '-':>7}"
    return f"{turns:6} {tokens:8} {times} {live:9.2f} {held:9.2f} {read:9.2f} {stored:8.2f}"


def ours(turns: int, tokens: int, repeat: int) -> tuple[float, float, float]:
    """ms to build the chains, ms to read the log back into records, and bytes stored per byte of unique numbers."""
    records, config = long_session(turns, tokens), TrajectoryConfig()
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        sealed = asyncio.run(store(records, directory))
        built = best(lambda: build(sealed, config), repeat)
        again = best(lambda: list(rebuild(directory).records), repeat)
        stored = sum(path.stat().st_size for path in directory.iterdir())
    return built, again, stored / (4 * (len(records[-1].prompt_ids) + sum(len(one.log_probs) for one in records)))


WIDTHS = (6, 8, 9, 9, 10, 7, 9, 9, 9, 8)
HEAD = "\n".join(
    " ".join(word.rjust(width) for word, width in zip(words.split(","), WIDTHS, strict=True))
    for words in (
        ",,build,rebuild,nemo_gym,,live,sealed,read,stored/",
        "turns,tokens,ms,ms,ms,ratio,MiB,MiB,MiB,unique",
    )
)


def memory(turns: int, tokens: int) -> tuple[float, float, float]:
    """MiB held by a live session (ledger, texts, log-probs), the same sealed, and sealed and read."""

    async def fill() -> Ledger:
        session = Ledger(SESSION)
        for record in long_calls(turns, tokens):
            await session.append(record)
        return session

    asyncio.run(fill())  # what is allocated once
    tracemalloc.start()
    try:
        session = asyncio.run(fill())
        gc.collect()
        live = tracemalloc.get_traced_memory()[0]
        sealed = session.seal()
        held = tracemalloc.get_traced_memory()[0]
        assert sealed.records[-1].prompt_ids
        return live / MIB, held / MIB, tracemalloc.get_traced_memory()[0] / MIB
    finally:
        tracemalloc.stop()


@dataclass(frozen=True)
class Theirs:
    """What NeMo Gym's builder took for the same calls, or at least took."""

    ms: float
    """Processor time."""
    finished: bool = True
    tokens: int = 0
    """Trainable ones that it delivers."""

    def __str__(self) -> str:
        return f"{self.ms:.1f}" if self.finished else f">{self.ms / 1e3:.0f} s"

    def times(self, ours: float) -> str:
        """How many times ``ours`` that is."""
        return f"{'' if self.finished else '>'}{self.ms / ours:.0f}"


def peer(turns: int, tokens: int, seconds: float) -> Theirs:
    """``trajectory_peer.py`` on the same calls, killed when its builder has not finished after ``seconds``."""
    command = [sys.executable, str(Path(__file__).with_name("trajectory_peer.py")), str(turns), str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{command[1]} failed with status {process.wait()}")
        before = cpu_seconds(process.pid)
        try:
            told = json.loads(process.communicate(timeout=seconds)[0])
        except subprocess.TimeoutExpired:
            took = cpu_seconds(process.pid) - before
            process.kill()
            return Theirs(1e3 * took, finished=False)
        return Theirs(told["ms"], tokens=told["tokens"])


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- who waits while a session is finalised ---------------------------------------------------------------------


class Ticker:
    """A task that wants to run all the time, as the calls of other rollouts do; ``longest`` is what it had to wait."""

    def __init__(self) -> None:
        self.longest = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Ticker"]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._tick())
            await asyncio.sleep(0.01)
            yield self
            task.cancel()

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.0005)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now

    async def during(self, run: Callable[[], object], *, thread: bool) -> float:
        """The longest wait while ``run`` runs, in a thread or on the loop, in ms."""
        await asyncio.sleep(0.01)
        self.longest = 0.0
        await asyncio.to_thread(run) if thread else run()
        await asyncio.sleep(0.002)
        return 1e3 * self.longest

    async def committing(self, session: Ledger, record: CallRecord) -> float:
        """The same while a call is recorded."""
        await asyncio.sleep(0.01)
        self.longest = 0.0
        await session.append(record)
        await asyncio.sleep(0.002)
        return 1e3 * self.longest


async def stalls(turns: int, tokens: int) -> dict[str, float]:
    """Step of a rollout's end -> the longest the loop stood still, in ms; steps in threads are those of ``rollout``."""
    async with Ticker().running() as ticker:
        waits = {"nothing": await ticker.during(lambda: time.sleep(0.2), thread=True)}
        with TemporaryDirectory() as folder:
            held: list[Any] = [await _sealing(ticker, waits, turns, tokens, Path(folder))]
        waits["build"] = await ticker.during(lambda: held.append(build(held[0], TrajectoryConfig())), thread=True)
        held.append(rollout(held[0]))
        waits["row"] = await ticker.during(lambda: held.append(row(held[2])), thread=True)
        waits["json"] = await ticker.during(lambda: held.append(encode(held[3])), thread=True)
        waits["let go"] = await ticker.during(held.clear, thread=False)
    return waits


async def _sealing(ticker: Ticker, waits: dict[str, float], turns: int, tokens: int, folder: Path) -> SealedLedger:
    async with SegmentLog(folder) as log:
        session, calls = Ledger(SESSION, log), long_calls(turns, tokens)
        for _ in range(turns - 1):
            await session.append(record := next(calls))
            session.mark_delivered(record.call_id)
        waits["commit"] = await ticker.committing(session, next(calls))
        waits["seal"] = await ticker.during(session.seal, thread=False)
        return session.seal()


def row(result: RolloutResult) -> dict[str, Any]:
    return compact(result, {"input": []}, model="m", max_tokens=None)


async def show_stalls(turns: int, tokens: int, repeat: int) -> None:
    doing(f"{turns} calls: who waits while they are finalised")
    runs = [await stalls(turns, tokens) for _ in range(repeat)]
    told = ", ".join(f"{step} {min(run[step] for run in runs):.1f}" for step in runs[0])
    print(f"longest stall of the event loop at {turns} calls, {tokens} tokens, in ms (least of {repeat}): {told}")


# --- many sessions at once --------------------------------------------------------------------------------------


async def show_sessions(count: int, turns: int, tokens: int) -> None:
    """Resident memory of this process with ``count`` live sessions, taken forward one call at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count)), hard))
    gc.collect()
    before, started = resident(), time.monotonic()
    with TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            lives = [
                await stack.enter_async_context(live_session(f"session-{number}", Path(folder), group, turns, tokens))
                for number in range(count)
            ]
            for turn in range(turns):
                if turn % 10 == 0:
                    doing(f"call {turn} of {turns} in {count} sessions: {resident():.0f} MiB resident")
                for first in range(0, count, 50):
                    async with asyncio.TaskGroup() as together:
                        for live in lives[first : first + 50]:
                            together.create_task(live.turn())
            gc.collect()
            after = resident()
            ids = sum(live.held for live in lives) / count
            numbers = 4 * sum(live.numbers for live in lives) / count / 1024
    print(
        f"{count} live sessions of {turns} calls and {ids:.0f} tokens: {after:.0f} MiB resident, {before:.0f} of them "
        f"before the first; {1024 * (after - before) / count:.0f} KiB a session, {numbers:.0f} of them numbers "
        f"({time.monotonic() - started:.0f} s)"
    )


def resident() -> float:
    """MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--tokens", type=int, default=136_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peer-seconds", type=float, default=120, help="for NeMo Gym's builder at each size; 0: none")
    parser.add_argument("--sessions", type=int, default=0)
    args = parser.parse_args()
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if args.sessions:
        asyncio.run(show_sessions(args.sessions, *LIVE))
        return
    print(HEAD)
    for turns, tokens in ((args.turns, args.tokens),) if args.turns else SIZES:
        print(line(turns, tokens, args.repeat, args.peer_seconds), flush=True)
    asyncio.run(show_stalls(args.turns or 150, args.tokens, args.repeat))


if __name__ == "__main__":
    main()

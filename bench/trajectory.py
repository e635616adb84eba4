"""What capture costs as a session grows: time to build and rebuild, memory, bytes on disk, and who waits meanwhile.

usage: python bench/trajectory.py [--turns 150 --tokens 136000] [--repeat 5] [--no-peer] [--sessions 1000]

Without ``--turns``: 20, 60, 150 and 400 calls. Milliseconds are processor time, the best of ``--repeat`` runs; NeMo
Gym's own builder runs once, in the same process, on the same calls. With ``--sessions``: that many sessions of 100
calls live in one process, each with its proxy session, ledger and log; minutes.
"""

import argparse
import asyncio
import gc
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_gym.token_id_capture.builder import run_builder
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

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


def line(turns: int, tokens: int, repeat: int, *, with_peer: bool) -> str:
    """A line of the table."""
    records, config = long_session(turns, tokens), TrajectoryConfig()
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        sealed = asyncio.run(store(records, directory))
        built = best(lambda: build(sealed, config), repeat)
        again = best(lambda: list(rebuild(directory).records), repeat)
        stored = sum(path.stat().st_size for path in directory.iterdir())
    unique = 4 * (len(records[-1].prompt_ids) + sum(len(record.log_probs) for record in records))
    live, held, read = memory(turns, tokens)
    theirs = best(peer(records), 1) if with_peer else float("nan")
    times = f"{built:9.1f} {again:9.1f} {theirs:10.1f} {theirs / built:7.0f}"
    return f"{turns:6} {tokens:8} {times} {live:9.2f} {held:9.2f} {read:9.2f} {stored / unique:8.2f}"


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


def peer(records: list[CallRecord]) -> Callable[[], int]:
    """NeMo Gym's ``prefix_merging`` through its public call, on the same calls; returns the tokens it delivers.

    It is given each call's parent (its servers resolve them while serving); ours finds the parents itself.
    """
    parents = [None, *(record.call_id for record in records)]
    entries = [
        stamp_lineage(
            TokenEntry(
                rollout_id=SESSION,
                model_call_id=record.call_id,
                prompt_token_ids=record.prompt_ids.tolist(),
                generation_token_ids=record.sampled_ids.tolist(),
                generation_log_probs=record.log_probs.tolist(),
            ),
            parent,
            parent_resolution=ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT,
        )
        for record, parent in zip(records, parents, strict=False)
    ]
    return lambda: run_builder(entries).notes.generated_tokens_delivered


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
            for _ in range(turns):
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
    parser.add_argument("--no-peer", action="store_true", help="leave NeMo Gym's builder out: 400K tokens take it long")
    parser.add_argument("--sessions", type=int, default=0)
    args = parser.parse_args()
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if args.sessions:
        asyncio.run(show_sessions(args.sessions, *LIVE))
        return
    print(HEAD)
    for turns, tokens in ((args.turns, args.tokens),) if args.turns else SIZES:
        print(line(turns, tokens, args.repeat, with_peer=not args.no_peer), flush=True)
    asyncio.run(show_stalls(args.turns or 150, args.tokens, args.repeat))


if __name__ == "__main__":
    main()

"""Chains of a long session: our builder against NeMo Gym's own, in one run on the same calls.

usage: python bench/trajectory.py [--turns 150] [--tokens 136000] [--repeat 5]
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from nemo_gym.token_id_capture.builder import run_builder
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

from polar_env.capture import Ledger, SegmentLog, rebuild
from polar_env.config import TrajectoryConfig
from polar_env.trajectory import build
from polar_env.types import CallRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from trajectory_helpers import SESSION, ledger, long_session


def best(run: Callable[[], object], repeat: int) -> float:
    """Shortest of ``repeat`` runs, in seconds: the one least disturbed by other load."""
    times = []
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


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


async def store(records: list[CallRecord], directory: Path) -> float:
    """Append every call durably, one after the other; seconds per call."""
    start = time.perf_counter()
    async with SegmentLog(directory) as log:
        session = Ledger(SESSION, log)
        for record in records:
            await session.append(record)
            session.mark_delivered(record.call_id)
        session.seal()
    return (time.perf_counter() - start) / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=136_000)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    records = long_session(args.turns, args.tokens)
    sealed, config = ledger(*records), TrajectoryConfig()
    ours = best(lambda: build(sealed, config), args.repeat)
    tokens = build(sealed, config).sampled_tokens
    print(f"{args.turns} calls, {args.tokens} tokens, {tokens} sampled")
    print(f"polar_env build            {ours * 1e3:9.1f} ms")
    with TemporaryDirectory() as directory:
        seconds = asyncio.run(store(records, Path(directory)))
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
        print(f"polar_env rebuild from log {best(lambda: rebuild(Path(directory)), args.repeat) * 1e3:9.1f} ms")
    unique = 4 * (len(records[-1].prompt_ids) + sum(len(record.log_probs) for record in records))
    print(f"durable append             {seconds * 1e3:9.1f} ms per call")
    print(f"log size                   {size / unique:9.2f} x the unique ids and log-probs")
    run = peer(records)
    theirs = best(run, 1)
    print(f"nemo_gym prefix_merging    {theirs * 1e3:9.1f} ms   ({run()} tokens delivered)")
    print(f"ratio                      {theirs / ours:9.0f} x")


if __name__ == "__main__":
    main()

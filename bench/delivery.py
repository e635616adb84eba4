"""What reaches a trainer of what the real CLIs' sessions sampled: with splice, without, and by NeMo Gym's builder.

usage: python bench/delivery.py [--cli pi ...] [--case edit ...]

Every CLI of the conformance suite plays its cases twice, in a sandbox without network, on the scripted engine and
Qwen3's template. Log-probs are declared; ids, calls and histories are real. Columns, tokens in per cent of those
sampled:

- main: of the agent's conversation, message for message, up to where its harness rewrites it: trained in the row
- row: of all calls of kinds that train: trained in the one row (a compaction or a sub-agent has chains of its own)
- chains: the same, over all chains
- joins: exact, spliced, retokenised, rewritten, new
- gym: the row of nemo-gym's ``prefix_merging`` out of the same calls. Parents are resolved by its own lineage from the
  same messages while the session is replayed, and it is told which call was the last: all that its servers would know
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_gym.token_id_capture.builder import run_builder
from nemo_gym.token_id_capture.lineage import RolloutLineage, stamp_continuation
from nemo_gym.token_id_capture.records import TokenEntry, stamp_lineage

from polar_env.config import EngineConfig, ProxyConfig, TrajectoryConfig
from polar_env.engine import Session as EngineSession
from polar_env.engine import tokenizer
from polar_env.gym import rows
from polar_env.joins import joins
from polar_env.proxy.render import turn_message
from polar_env.proxy.server import ProxyServer
from polar_env.trajectory import build as chains_of
from polar_env.types import CallKind, CallRecord, Delta, EngineReply, ModelRequest, Sampling, SealedLedger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from conformance.cases import CASES, CLIS, expected
from conformance.engine import FaultyEngine
from harness_helpers import STORE, build, drive, repository
from trajectory_helpers import rollout

DEFAULT_CASES = ("edit", "reasoning", "odd_arguments", "blank_text", "length_stop", "sub_agent", "compaction")


class ListeningEngine(FaultyEngine):
    """Keeps each request by what came of it."""

    def __init__(self, config: EngineConfig, faults: Mapping[int, str]) -> None:
        super().__init__(config, faults)
        self.asked: dict[bytes, ModelRequest] = {}

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        async with aclosing(super().generate(request, sampling, session)) as items:
            async for item in items:
                if isinstance(item, EngineReply):
                    self.asked[_key(item)] = request
                yield item


def _key(call: CallRecord | EngineReply) -> bytes:
    return call.prompt_ids.tobytes() + call.sampled_ids.tobytes()


@dataclass(frozen=True)
class Measured:
    """Tokens of one session; ``gym`` is None where its consumer would mask the rollout."""

    calls: int
    conversation: int
    conversation_trained: int
    sampled: int
    row: int
    chains: int
    masked: bool
    joins: tuple[int, ...]
    gym: int
    gym_masked: bool


def conversation(records: Sequence[CallRecord]) -> list[CallRecord]:
    """The agent's first call on the main thread, and what carries it on there, message for message."""
    main = [record for record in records if not record.thread and record.kind in (CallKind.AGENT, CallKind.COMPACTION)]
    found = {main[0].call_id}
    for record in main[1:]:
        if record.continues in found and record.kind is CallKind.AGENT:
            found.add(record.call_id)
    return [record for record in main if record.call_id in found]


def measure(ledger: SealedLedger, requests: Mapping[bytes, ModelRequest]) -> Measured:
    """Both builders on one session's calls."""
    trajectory = chains_of(ledger, TrajectoryConfig())
    made = rows.row(rollout(ledger), {"input": "x"}, model="policy", max_tokens=None)
    talk = conversation(ledger.records)
    delivered = trajectory.main.turns if trajectory.main else ()
    trained = {turn.call_id: len(turn.sampled_ids) for turn in delivered if turn.trained}
    gym, gym_masked = peer(ledger, requests)
    return Measured(
        calls=len(ledger.records),
        conversation=sum(len(record.sampled_ids) for record in talk),
        conversation_trained=sum(trained.get(record.call_id, 0) for record in talk),
        sampled=trajectory.sampled_tokens,
        row=int(made["trainable_tokens"]),
        chains=sum(chain.trainable_tokens for chain in trajectory.chains),
        masked=bool(made["mask_sample"]),
        joins=tuple(joins(ledger).values()),
        gym=gym,
        gym_masked=gym_masked,
    )


def peer(ledger: SealedLedger, requests: Mapping[bytes, ModelRequest]) -> tuple[int, bool]:
    """Tokens that NeMo Gym's builder delivers, and whether its consumer would mask the rollout."""
    lineage, entries = RolloutLineage(), list[TokenEntry]()
    for record in sorted(ledger.records, key=lambda record: record.ended):
        messages: list[dict[str, Any]] = [dict(message) for message in requests[_key(record)].messages]
        found = lineage.resolve(messages)
        entry = TokenEntry(
            rollout_id=ledger.session_id,
            model_call_id=record.call_id,
            prompt_token_ids=record.prompt_ids.tolist(),
            generation_token_ids=record.sampled_ids.tolist(),
            generation_log_probs=record.log_probs.tolist(),
            output_items=[dict(turn_message(record.turn))],
        )
        stamp_lineage(entry, found.match.model_call_id if found.match else None, parent_resolution=found.status)
        stamp_continuation(entry, messages)
        lineage.add_entry(entry)
        entries.append(entry)
    last = [record for record in ledger.records if not record.thread and record.kind is CallKind.AGENT][-1]
    notes = run_builder(entries, terminal_call_id=last.call_id).notes
    masked = notes.terminal_chain != "delivered"
    return 0 if masked else notes.generated_tokens_delivered, masked


async def play(cli: str, case: str, splice: str) -> Measured | None:
    """One cell of the conformance table; None where the suite has no such cell."""
    played = CASES[case]
    if isinstance(expected(cli, case), str):
        return None
    words = await asyncio.to_thread(tokenizer.fetch, STORE)
    config = EngineConfig.model_validate(
        {"kind": "scripted", "tokenizer": words, "max_model_len": 65536, "splice": splice}
    )
    engine = ListeningEngine(config, played.faults)
    job = {**played.job, **played.jobs.get(cli, {})}
    with TemporaryDirectory() as folder:
        async with ProxyServer(engine, ProxyConfig(max_calls=14)) as proxy:
            harness = build(cli, extra_args=played.extra.get(cli, ()))
            script = played.scripts.get(cli, played.script)
            run = await drive(harness, repository(Path(folder) / "repo"), proxy, script, seconds=300, **job)
    return measure(run.ledger, engine.asked)


def line(name: str, splice: str, cells: Sequence[Measured]) -> str:
    """A row of the table: tokens summed over the cells."""

    def share(part: str, whole: str) -> str:
        total = sum(getattr(cell, whole) for cell in cells)
        return f"{100 * sum(getattr(cell, part) for cell in cells) / total:6.1f}" if total else "     -"

    counts = "/".join(str(sum(column)) for column in zip(*(cell.joins for cell in cells), strict=True))
    shares = "  ".join(
        [share("conversation_trained", "conversation"), share("row", "sampled"), share("chains", "sampled")]
    )
    masked, theirs = sum(cell.masked for cell in cells), sum(cell.gym_masked for cell in cells)
    calls = sum(cell.calls for cell in cells)
    return f"{name:28} {splice:4} {calls:5}  {shares}  {masked:6}  {counts:>16}  {share('gym', 'sampled')}  {theirs:6}"


HEAD = (
    f"{'':28} {'spl':4} {'calls':>5}  {'main%':>6}  {'row%':>6}  {'chain%':>6}  masked  "
    f"{'E/S/RT/RW/N':>16}    gym%  masked"
)


async def table(clis: Sequence[str], cases: Sequence[str]) -> None:
    print(HEAD)
    every: dict[str, list[Measured]] = {"auto": [], "off": []}
    for cli in clis:
        found: dict[str, list[Measured]] = {"auto": [], "off": []}
        for case in cases:
            for splice, cells in found.items():
                cell = await play(cli, case, splice)
                if cell is not None:
                    cells.append(cell)
                    print(line(f"  {cli} {case}", splice, [cell]), flush=True)
        for splice, cells in found.items():
            every[splice] += cells
            if cells:
                print(line(cli, splice, cells), flush=True)
    for splice, cells in every.items():
        if cells:
            print(line("all", splice, cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", nargs="*", default=CLIS, choices=CLIS)
    parser.add_argument("--case", nargs="*", default=DEFAULT_CASES, choices=tuple(CASES))
    args = parser.parse_args()
    asyncio.run(table(args.cli, args.case))


if __name__ == "__main__":
    main()

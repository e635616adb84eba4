"""The real CLIs, unmodified and pinned, against the scripted engine, each in a network namespace of its own.

The table is ``cases.py``; ``make conformance`` runs all of it and prints the matrix.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import CASES, CI, CLIS, Case, Expected, expected
from conformance.engine import FaultyEngine
from harness_helpers import BROKEN, FIXED, STORE, Run, build, drive, repository
from polar_env.config import EngineConfig, ProxyConfig, SandboxConfig, TrajectoryConfig
from polar_env.engine import scripts, tokenizer
from polar_env.harness import Harness, Job, Launch
from polar_env.proxy.server import ProxyServer
from polar_env.proxy.session import Session
from polar_env.sandbox import Box, Overlay, egress
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.trajectory import build as chains_of
from polar_env.types import CallKind, Egress, ModelRequest

pytestmark = [pytest.mark.e2e, pytest.mark.conformance, pytest.mark.timeout(400)]

LETTERS = {CallKind.AGENT: "A", CallKind.SUB_AGENT: "S", CallKind.COMPACTION: "C", CallKind.SIDE: "s"}

CELLS = [
    pytest.param(cli, case, marks=() if (cli, case) in CI else pytest.mark.slow, id=f"{cli}-{case}")
    for cli, case in product(CLIS, CASES)
]


class WatchedProxy(ProxyServer):
    """Keeps the session it opened, to ask it afterwards."""

    session: Session

    def open(self, **options: Any) -> Session:
        self.session = super().open(**options)
        return self.session


class Tweaked:
    """A preset whose launch is changed."""

    def __init__(self, harness: Harness, tweak: Callable[[Launch], Launch]) -> None:
        self._harness, self._tweak = harness, tweak

    def __getattr__(self, name: str) -> Any:
        return getattr(self._harness, name)

    def launch(self, job: Job) -> Launch:
        return self._tweak(self._harness.launch(job))


@dataclass
class Watch:
    """What a run's sandbox tried to reach besides its model, as every rollout is watched."""

    seen: Egress | None = None

    @asynccontextmanager
    async def __call__(self, sandbox: Sandbox) -> AsyncGenerator[None]:
        watched = sandbox.watch()
        assert watched is not None
        with watched:
            yield
            self.seen = egress.read(watched)


@dataclass(frozen=True)
class Played:
    """A cell, run."""

    run: Run
    failed: int
    egress: Egress | None
    """Names that were looked up, and addresses that were tried."""
    requests: tuple[ModelRequest, ...]


async def play(cli: str, case: str, folder: Path) -> Played:
    """One CLI in one case, with an engine, a proxy and a sandbox of its own."""
    played, watch = CASES[case], Watch()
    words = await asyncio.to_thread(tokenizer.fetch, STORE)
    faults = played.late.get(cli, played.faults)
    engine = FaultyEngine(EngineConfig(kind="scripted", tokenizer=words, max_model_len=65536), faults)
    repo = repository(folder)
    for name, data in played.files.items():
        (repo / name).write_bytes(data)
    async with WatchedProxy(engine, ProxyConfig(max_calls=14)) as proxy:
        harness = build(cli, extra_args=played.extra.get(cli, ()))
        tweaked = Tweaked(harness, played.tweaks.get(cli, lambda launch: launch))
        job = {**played.job, **played.jobs.get(cli, {})}
        script = played.scripts.get(cli, played.script)
        run = await drive(tweaked, repo, proxy, script, seconds=300, beside=watch, **job)
        return Played(run, proxy.session.usage.failed, watch.seen, tuple(engine.requests))


async def play_at_once(cells: list[tuple[str, str]], folder: Path) -> None:
    """Cells that do nothing but wait: all of them in the time of one."""

    async def one(cli: str, case: str) -> None:
        try:
            TOGETHER[cli, case] = await play(cli, case, folder / cli)
        except Exception as error:  # noqa: BLE001 - told by the cell's own test
            TOGETHER[cli, case] = error

    async with asyncio.TaskGroup() as group:
        for cli, case in cells:
            group.create_task(one(cli, case))


TOGETHER: dict[tuple[str, str], Played | Exception] = {}


@pytest.fixture
async def cell(request: pytest.FixtureRequest, tmp_path: Path) -> Played:
    """The cell of this test; with the first that only waits, all that were selected and do."""
    cli, case = request.node.callspec.params["cli"], request.node.callspec.params["case"]
    if isinstance(why := expected(cli, case), str):
        pytest.skip(why)
    if CASES[case].alone:
        return await play(cli, case, tmp_path / "repo")
    if (cli, case) not in TOGETHER:
        chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        same = [params["cli"] for params in chosen if params.get("case") == case]
        await play_at_once([(name, case) for name in same if isinstance(expected(name, case), Expected)], tmp_path)
    found = TOGETHER[cli, case]
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize(("cli", "case"), CELLS)
def test_a_real_cli_behaves(cli: str, case: str, cell: Played, record_property: Any) -> None:
    wanted, played = expected(cli, case), CASES[case]
    assert isinstance(wanted, Expected)
    record_property("measured", measured(cell.run, cell.failed))
    assert_ended(cell.run, wanted, cell.failed)
    assert_recorded(cell.run, wanted)
    assert_accounted(cell.run, wanted)
    assert_seen(cell.requests, cell.run, played)
    assert cell.egress == Egress({})


def kinds(run: Run) -> str:
    return "".join(LETTERS[record.kind] for record in run.ledger.records)


def measured(run: Run, failed: int) -> str:
    """``A4``: four calls in one chain; ``A2/2``: in two; ``+1``: a generation that failed; then an ending."""
    short = re.sub(r"(.)\1+", lambda found: f"{found[1]}{len(found[0])}", kinds(run))
    trajectory = chains_of(run.ledger, TrajectoryConfig())
    chains = f"/{len(trajectory.chains)}" if len(trajectory.chains) != 1 else ""
    lost = f"-{len(trajectory.left_out)}" if trajectory.left_out else ""
    again = f"+{failed}" if failed else ""
    ending = "" if run.report.outcome == "completed" else f" {run.report.outcome}"
    return short + chains + lost + again + ending


def assert_ended(run: Run, wanted: Expected, failed: int) -> None:
    assert run.report.outcome is wanted.outcome, run.report
    assert not run.exit.timed_out
    assert failed == wanted.failed
    assert run.file == (FIXED if wanted.fixed else BROKEN)


def assert_recorded(run: Run, wanted: Expected) -> None:
    """Exactly the calls that were expected; a sub-agent's are a thread beside the main one."""
    assert run.ledger.complete, run.ledger.holes
    assert re.fullmatch(wanted.kinds, kinds(run)), kinds(run)
    assert run.ledger.delivered == {record.call_id for record in run.ledger.records}
    assert {record.thread for record in run.ledger.records if record.kind is CallKind.AGENT} <= {""}
    assert len({record.thread for record in run.ledger.records if record.kind is CallKind.SUB_AGENT}) == wanted.threads


def assert_accounted(run: Run, wanted: Expected) -> None:
    trajectory = chains_of(run.ledger, TrajectoryConfig())
    sampled = {record.call_id: len(record.sampled_ids) for record in run.ledger.records}
    left_out = sum(sampled[call_id] for call_id in trajectory.left_out)
    trained = sum(chain.trainable_tokens for chain in trajectory.chains)
    assert trained + left_out == sum(sampled.values()) > 0
    assert sorted(trajectory.left_out.values()) == sorted(wanted.left_out)
    assert len(trajectory.chains) == wanted.chains, [len(chain.turns) for chain in trajectory.chains]


def assert_seen(requests: tuple[ModelRequest, ...], run: Run, played: Case) -> None:
    """The results reached the model, under the ids of the calls, with the arguments as they were meant."""
    messages = requests[-1].messages
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    for words in played.result:
        assert any(words in scripts.text_of(message) for message in results.values()), results
    if played.same_arguments or played.result:
        first = run.ledger.records[0].turn.tool_calls
        assert [call.id for call in first] == list(results)[: len(first)]
    if played.same_arguments:
        said = [call["function"] for message in messages for call in message.get("tool_calls", [])]
        sampled = run.ledger.records[0].turn.tool_calls[0].arguments
        assert json.loads(said[0]["arguments"]) == json.loads(sampled)
    if played.picture:
        contents = [message.get("content") for message in messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        assert [part["image_url"]["url"][:22] for part in parts if "image_url" in part] == ["data:image/png;base64,"]


async def test_a_name_that_is_looked_up_in_the_sandbox_is_seen(tmp_path: Path) -> None:
    """The other side of "nothing else was tried"."""
    watch = Watch()
    box = Box(workdir="/testbed", overlays=(Overlay(repository(tmp_path / "repo"), "/testbed"),))
    async with open_sandbox(box, SandboxConfig()) as sandbox, watch(sandbox):
        found = await sandbox.exec(["getent", "hosts", "telemetry.example.org"], timeout=20)
        local = await sandbox.exec(["getent", "hosts", "localhost"], timeout=20)
    assert (found.code, local.code) == (2, 0)
    assert watch.seen is not None
    assert set(watch.seen.tried) == {"dns telemetry.example.org"}

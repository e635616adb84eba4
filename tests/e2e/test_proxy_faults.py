"""The real CLIs when the engine behind the proxy stalls, dies in mid-stream or refuses, when the connection breaks, at
the limits of calls and turns, and on two days."""

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from harness_helpers import FIXED, STORE, build, drive, repository
from polar_env.config import EngineConfig, ProxyConfig, TrajectoryConfig
from polar_env.engine import Session as EngineSession
from polar_env.engine import scripts, tokenizer
from polar_env.engine.scripted import ScriptedEngine
from polar_env.errors import EngineBusy, EngineError
from polar_env.proxy import Dialect, Encoder
from polar_env.proxy.server import ProxyServer
from polar_env.proxy.session import Session
from polar_env.trajectory import build as chains_of
from polar_env.types import AssistantTurn, Delta, EngineReply, ModelRequest, Outcome, Sampling, StopReason

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CLIS = (
    pytest.param("claude_code"),
    pytest.param("codex", marks=pytest.mark.slow),
    pytest.param("pi", marks=pytest.mark.slow),
    pytest.param("mini_swe_agent", marks=pytest.mark.slow),
)
MORE = tuple(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen_code", "opencode", "gemini_cli"))


class Faulty(ScriptedEngine):
    """The scripted engine with a bad day: busy, dead at once, dead in mid-stream, slow; then fine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.generations = 0

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        number, self.generations = self.generations, self.generations + 1
        if number == 0:
            raise EngineBusy("the queue is full", retry_after=1.0)
        if number == 1:
            raise EngineError("a worker died")
        if number == 2:
            yield Delta("text", "I was about to")
            raise EngineError("a worker died in mid-stream")
        if number == 3:
            await asyncio.sleep(2.0)  # the engine's own slowness; keep-alives fill it
        async with aclosing(super().generate(request, sampling, session)) as items:
            async for item in items:
                yield item


PARTIAL = "I was about to"


class BreaksOnce(ScriptedEngine):
    """Dies in the middle of the second answer, once: in its text, or after it in a tool call."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.calling = False
        self.requests: list[ModelRequest] = []

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        self.requests.append(request)
        if len(self.requests) == 2:
            yield Delta("text", PARTIAL)
            if self.calling:
                yield Delta("tool_open", id="call_broken", name="Bash")
                yield Delta("tool_args", '{"command": "ec')
            await asyncio.sleep(0.5)  # until the headers and this much have left
            raise EngineError("a worker died in mid-stream")
        async with aclosing(super().generate(request, sampling, session)) as items:
            async for item in items:
                yield item


class CutsAtLength(ScriptedEngine):
    """Cuts the first answer, of words only, at its length."""

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        first = not any(message["role"] == "assistant" for message in request.messages)
        script = f"{__name__}:long_winded" if first else session.script
        async with aclosing(super().generate(request, sampling, replace(session, script=script))) as items:
            async for item in items:
                yield item


def long_winded(scene: scripts.Scene) -> scripts.Turn:
    return scripts.Turn("Before I begin, let me think about what could be", stop=StopReason.LENGTH)


class Worn:
    """A wire API that a test changes in one place."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)


class CutOnce(Worn):
    """On a bad network: the connection of the second answer breaks when all its words have left, before its end."""

    answers = 0

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> Encoder:
        encoder = self._dialect.encoder(request, call_id, prompt_tokens)
        self.answers += 1
        return Cut(encoder) if self.answers == 2 else encoder


class Cut(Worn):
    def finish(self, turn: AssistantTurn) -> tuple[bytes, bytes]:
        time.sleep(0.3)  # a reset overtakes what the client has not read yet
        raise ConnectionResetError("the network went away")


class Elsewhere(Worn):
    """As if the harness ran on another day, on a node with another kernel, in another time zone."""

    def decode(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
        text, there = json.dumps(body), datetime(2031, 7, 19, tzinfo=UTC)
        for day, form in itertools.product(range(-1, 2), ("%Y-%m-%d", "%A, %B %-d, %Y", "%a %b %d %Y")):
            text = text.replace((datetime.now(UTC) + timedelta(day)).strftime(form), there.strftime(form))
        for here in (os.uname().release, os.uname().version):
            text = text.replace(json.dumps(here)[1:-1], "5.15.0-1084-aws")
        return self._dialect.decode(path, headers, json.loads(text.replace("Etc/UTC", "America/New_York")))


class Watched(ProxyServer):
    """Keeps the sessions it opened, to ask them afterwards; ``extras`` are options of each."""

    opened: list[Session]
    extras: dict[str, Any]

    def open(self, **options: Any) -> Session:
        session = super().open(**{**options, **self.extras})
        self.opened = [*getattr(self, "opened", []), session]
        return session


async def scripted(
    kind: type[ScriptedEngine] = ScriptedEngine,
    *,
    worn: Callable[[Dialect], Any] = lambda dialect: dialect,
    extras: Mapping[str, Any] | None = None,
    **config: Any,
) -> Watched:
    words = await asyncio.to_thread(tokenizer.fetch, STORE)
    proxy = Watched(kind(EngineConfig(kind="scripted", tokenizer=words, max_model_len=65536)), ProxyConfig(**config))
    proxy.extras = dict(extras or {})
    proxy._dialects = tuple(map(worn, proxy._dialects))
    return proxy


@pytest.mark.parametrize("name", CLIS)
async def test_every_cli_gets_over_a_busy_a_broken_and_a_slow_engine(name: str, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    async with await scripted(Faulty, keep_alive=0.3) as proxy:
        run = await drive(build(name), repo, proxy, "fix", seconds=200)
        session = proxy.opened[0]
    assert run.report.outcome is Outcome.COMPLETED, run.report
    assert run.file == FIXED
    assert (session.outcome, session.usage.failed) == (None, 3)
    assert run.ledger.complete
    assert run.ledger.delivered == {record.call_id for record in run.ledger.records}


@pytest.mark.parametrize("name", CLIS)
async def test_every_cli_stops_by_itself_at_the_call_limit(name: str, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    async with await scripted(max_calls=2) as proxy:
        run = await drive(build(name), repo, proxy, "loop", seconds=120)
        session = proxy.opened[0]
    assert session.outcome is Outcome.TURN_LIMIT
    assert session.ended.is_set()
    assert not run.exit.timed_out
    assert len(run.ledger.records) == session.calls == 2


@pytest.mark.parametrize("name", [*CLIS, *MORE])
async def test_every_cli_is_stopped_after_exactly_its_turns_by_the_proxy(name: str, tmp_path: Path) -> None:
    """Codex and Pi have no limit of their own; the same from outside for those that have one (set higher here)."""
    repo = repository(tmp_path / "repo")
    async with await scripted(extras={"max_turns": 3}) as proxy:
        run = await drive(build(name), repo, proxy, "loop", seconds=120, max_turns=50)
        session = proxy.opened[0]
    assert (session.outcome, session.ended.is_set()) == (Outcome.TURN_LIMIT, True)
    assert "its 3 turns" in str(session.first_error)
    assert not run.exit.timed_out
    assert run.exit.seconds < (30 if name in ("codex", "pi") else 110)
    assert len(run.ledger.records) == len(run.ledger.delivered) == session.limits.turns() == 3


@pytest.mark.parametrize("calling", [False, True])
async def test_claude_goes_on_from_a_broken_answer_and_that_is_one_turn(calling: bool, tmp_path: Path) -> None:
    """Broken inside a block it asks the same again. After one it keeps that and asks to go on: another body, the same
    turn. Either way nothing was sampled twice and the chain is whole."""
    repo = repository(tmp_path / "repo")
    async with await scripted(BreaksOnce, keep_alive=0.2) as proxy:
        engine = cast("BreaksOnce", proxy.fence._engine)
        engine.calling = calling
        run = await drive(build("claude_code"), repo, proxy, "fix")
        session = proxy.opened[0]
    assert (run.report.outcome, run.file) == (Outcome.COMPLETED, FIXED)
    assert (session.outcome, session.usage.failed) == (None, 1)
    broken, again = (request.messages for request in engine.requests[1:3])
    assert again[: len(broken)] == broken
    kept = [str(message.get("content")) for message in again[len(broken) :]]
    assert (kept[:1], "cut off" in "".join(kept[1:])) == (([PARTIAL], True) if calling else ([], False))
    assert len(run.ledger.records) == len(run.ledger.delivered) == session.limits.turns() == len(engine.requests) - 1
    trajectory = chains_of(run.ledger, TrajectoryConfig())
    assert [len(chain.turns) for chain in trajectory.chains] == [len(run.ledger.records)]


async def test_an_answer_claude_got_half_of_is_recorded_and_never_trained(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    async with await scripted(worn=CutOnce) as proxy:
        run = await drive(build("claude_code"), repo, proxy, "fix")
        session = proxy.opened[0]
    assert (run.report.outcome, run.file) == (Outcome.COMPLETED, FIXED)
    lost = [record for record in run.ledger.records if record.call_id not in run.ledger.delivered]
    assert [record.index for record in lost] == [1]
    assert session.limits.turns() == len(run.ledger.records) - 1
    trajectory = chains_of(run.ledger, TrajectoryConfig())
    assert set(trajectory.left_out) == {lost[0].call_id}
    assert trajectory.sampled_tokens == sum(len(r.sampled_ids) for r in run.ledger.records if r not in lost)


async def test_claude_goes_on_from_a_cut_answer_in_the_same_chain(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    async with await scripted(CutsAtLength) as proxy:
        run = await drive(build("claude_code"), repo, proxy, "fix")
    assert (run.report.outcome, run.file) == (Outcome.COMPLETED, FIXED)
    assert [record.turn.stop for record in run.ledger.records][:2] == [StopReason.LENGTH, StopReason.TOOL_CALLS]
    assert len(run.ledger.delivered) == len(run.ledger.records)
    trajectory = chains_of(run.ledger, TrajectoryConfig())
    assert [len(chain.turns) for chain in trajectory.chains] == [len(run.ledger.records)]
    assert trajectory.left_out == {}


@pytest.mark.parametrize(("steady", "same"), [(True, True), (False, False)])
@pytest.mark.parametrize("name", [cli for cli in (*CLIS, *MORE) if cli.values[0] != "pi"])
async def test_rollouts_of_two_days_on_two_kernels_have_one_first_prompt(
    name: str, steady: bool, same: bool, tmp_path: Path
) -> None:
    """Pi's prompt names neither. The clock of a sandbox cannot be set: its second day is written into the request."""
    harness, repo, prompts = build(name), repository(tmp_path / "repo"), []
    for worn in (Worn, Elsewhere):
        async with await scripted(worn=worn, extras={"volatile": harness.volatile}, steady_prompts=steady) as proxy:
            prompts.append((await drive(harness, repo, proxy, "give_up")).first_prompt)
    assert (prompts[0] == prompts[1]) is same

"""The real CLIs when the engine behind the proxy stalls, dies in mid-stream or refuses, and at the call limit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from harness_helpers import FIXED, STORE, build, drive, repository
from polar_env.config import EngineConfig, ProxyConfig
from polar_env.engine import Session as EngineSession
from polar_env.engine import tokenizer
from polar_env.engine.scripted import ScriptedEngine
from polar_env.errors import EngineBusy, EngineError
from polar_env.proxy.server import ProxyServer
from polar_env.proxy.session import Session
from polar_env.types import Delta, EngineReply, ModelRequest, Outcome, Sampling

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CLIS = (
    pytest.param("claude_code"),
    pytest.param("codex", marks=pytest.mark.slow),
    pytest.param("pi", marks=pytest.mark.slow),
    pytest.param("mini_swe_agent", marks=pytest.mark.slow),
)


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


class Watched(ProxyServer):
    """Keeps the sessions it opened, to ask them afterwards."""

    opened: list[Session]

    def open(self, **options) -> Session:
        session = super().open(**options)
        self.opened = [*getattr(self, "opened", []), session]
        return session


async def scripted(kind: type[ScriptedEngine], **config) -> Watched:
    words = await asyncio.to_thread(tokenizer.fetch, STORE)
    engine = kind(EngineConfig(kind="scripted", tokenizer=words, max_model_len=65536))
    return Watched(engine, ProxyConfig(**config))


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
    async with await scripted(ScriptedEngine, max_calls=2) as proxy:
        run = await drive(build(name), repo, proxy, "loop", seconds=120)
        session = proxy.opened[0]
    assert session.outcome is Outcome.TURN_LIMIT
    assert session.ended.is_set()
    assert not run.exit.timed_out
    assert len(run.ledger.records) == session.calls == 2

"""What one process can hold: limits of open files in processes of their own, and hundreds of sessions at once."""

import asyncio
import gc
import json
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Event

import aiohttp
import pytest

from gym_helpers import configured
from polar_env import capacity
from polar_env.capture import Ledger, SegmentLog
from polar_env.config import ProxyConfig
from polar_env.engine import Session as EngineSession
from polar_env.errors import ConfigError
from polar_env.gym.environment import PolarEnvironment
from polar_env.proxy.server import ProxyServer
from polar_env.proxy.session import Session
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling
from proxy_helpers import PlayedEngine, bit, classify, loopback, say


def limited(soft: int, hard: int, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that may open so many files."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    head = f"{limit}from polar_env import capacity\n"
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=False)


# --- open files ---------------------------------------------------------------------------------------------------


def test_the_soft_limit_of_open_files_becomes_the_hard_one():
    asked = "print(capacity.open_files(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert limited(256, 4096, asked).stdout == "4096 (4096, 4096)\n"


def test_more_rollouts_than_the_hard_limit_has_files_for_are_refused_with_what_to_change():
    told = limited(1024, 4096, "capacity.open_files(1024)").stderr
    assert "ConfigError: 1024 rollouts at a time need about 31020 open files, and this process may have 4096" in told
    assert "lower concurrency to 126 or less" in told
    assert "ulimit -Hn 31020" in told
    assert limited(1024, 4096, "capacity.open_files(126)").returncode == 0


async def test_a_server_that_could_not_hold_its_rollouts_does_not_start(tmp_path: Path):
    config = configured(tmp_path, "http://127.0.0.1:9", concurrency=10_000_000)
    with pytest.raises(ConfigError, match="10000000 rollouts at a time need about 300000300 open files"):
        async with PolarEnvironment(config).opened():
            pytest.fail("it started")


# --- collections --------------------------------------------------------------------------------------------------


class Circle:
    def __init__(self) -> None:
        self.myself = self


def test_what_is_loaded_is_left_out_of_collections_once_and_what_comes_later_is_collected():
    capacity.settle()
    loaded = gc.get_freeze_count()
    assert loaded > 10_000
    lost = weakref.ref(Circle())
    capacity.settle()
    assert gc.get_freeze_count() == loaded
    gc.collect()
    assert lost() is None


# --- threads ------------------------------------------------------------------------------------------------------


async def test_rollouts_that_wait_in_threads_do_not_hold_up_a_name_that_is_looked_up(tmp_path: Path):
    """As many waits as there are rollouts; Python's own pool would be full after four more than the processors."""
    over = Event()
    environment = PolarEnvironment(configured(tmp_path, "http://127.0.0.1:9", concurrency=120))
    async with environment.opened(), asyncio.TaskGroup() as group:
        for _ in range(119):
            group.create_task(asyncio.to_thread(over.wait, 30))
        found = await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        waited = over.is_set()
        over.set()
    assert found
    assert not waited


# --- hundreds of sessions -----------------------------------------------------------------------------------------

SESSIONS, CALLS = 300, 2


class Echo(PlayedEngine):
    """Says what it was last told, in two parts. Nobody is answered before all sessions have asked."""

    def __init__(self, sessions: int) -> None:
        super().__init__()
        self._all = asyncio.Barrier(sessions)

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        self.sessions.append(session.session_id)
        heard = f"{session.session_id} heard {request.messages[-1].get('content')}"
        yield bit(heard[:3])
        await self._all.wait()
        yield bit(heard[3:])
        yield say(heard)


async def opened(stack: AsyncExitStack, proxy: ProxyServer, folder: Path, name: str) -> tuple[Session, str]:
    """A session as a rollout has it: a log and a listener of its own."""
    log = await stack.enter_async_context(SegmentLog(folder / name))
    ledger = Ledger(name, log)
    session = proxy.open(session_id=name, ledger=ledger, engine_session=EngineSession(name), classify=classify)
    sock = loopback()
    port = sock.getsockname()[1]
    await stack.enter_async_context(proxy.listen(sock))
    return session, f"http://127.0.0.1:{port}/s/{session.key}/v1/chat/completions"


async def asked(http: aiohttp.ClientSession, url: str, name: str) -> list[str]:
    """The session's answers, every other one streamed."""
    answers = list[str]()
    for turn in range(CALLS):
        stream = (int(name) + turn) % 2 == 0
        body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": f"{name}, turn {turn}"}]}
        async with http.post(url, json=body) as response:
            text = await response.text()
            assert response.status == 200, text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] if stream else []
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events]
        answers.append("".join(deltas) if stream else json.loads(text)["choices"][0]["message"]["content"])
    return answers


@pytest.mark.e2e  # seconds
async def test_hundreds_of_sessions_at_once_each_get_their_own_answers_and_none_is_lost(tmp_path: Path):
    engine, names = Echo(SESSIONS), [f"{number:03}" for number in range(SESSIONS)]
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(ProxyServer(engine, ProxyConfig()))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        sessions = [await opened(stack, proxy, tmp_path, name) for name in names]
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(asked(http, url, name)) for name, (_, url) in zip(names, sessions, strict=True)]
        sealed = [await session.close() for session, _ in sessions]
    for name, task, ledger in zip(names, asking, sealed, strict=True):
        expected = [f"{name} heard {name}, turn {turn}" for turn in range(CALLS)]
        assert task.result() == expected
        assert [record.turn.text for record in ledger.records] == expected
        assert [bytes(record.sampled_ids) for record in ledger.records] == [bytes(say(e).sampled_ids) for e in expected]
        assert (ledger.complete, len(ledger.delivered)) == (True, CALLS)
    assert Counter(engine.sessions) == dict.fromkeys(names, CALLS)

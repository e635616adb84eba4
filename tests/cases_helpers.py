"""The whole path of one session: a client on the real Chat API, a real proxy, a durable log, chains, the judged row.

async with case(tmp_path, scripted("one", "two")) as it:
    await it.say(user("hi"))
    ended = await it.end()
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from engine_helpers import CACHE
from polar_env import verify
from polar_env.capture import Ledger, SegmentLog, rebuild
from polar_env.config import EngineConfig, HarnessConfig, ProxyConfig, RewardConfig, SandboxConfig, TrajectoryConfig
from polar_env.ending import Ending, outcome_of
from polar_env.engine import Engine, Session, tokenizer
from polar_env.engine.scripted import ScriptedEngine
from polar_env.engine.scripts import Call, Scene, Turn
from polar_env.grade.prewarm import Prewarm
from polar_env.gym import contract, rows
from polar_env.harness.shell import Shell
from polar_env.joins import classify
from polar_env.proxy.server import ProxyServer
from polar_env.proxy.session import Session as ProxySession
from polar_env.reward import decide
from polar_env.trajectory import build
from polar_env.types import (
    INFRASTRUCTURE,
    CallRecord,
    Delta,
    EngineReply,
    HarnessExit,
    ModelRequest,
    RolloutResult,
    Sampling,
    SealedLedger,
    Trajectory,
)
from polar_env.verdict import Verdict, VerdictStatus
from proxy_helpers import loopback
from trajectory_helpers import same_ledger

SESSION = "case.0"

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def bash(command: str, text: str = "", reasoning: str = "") -> Turn:
    """A turn that runs a command."""
    return Turn(text, (Call("bash", {"command": command}),), reasoning)


def results(said: Message, *texts: str) -> list[Message]:
    """What the tools of a turn answered."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(said["tool_calls"], texts, strict=True)
    ]


# --- an engine whose policy is a list of turns -------------------------------------------------------------------


class Policy(ScriptedEngine):
    """The scripted engine playing given turns, one per generation. While ``gate`` is clear no reply is finished."""

    def __init__(self, turns: Sequence[Turn], splice: str, directory: Path) -> None:
        super().__init__(EngineConfig(kind="scripted", tokenizer=directory, splice=splice, scripts=("silent",)))
        self.turns = deque(turns)
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncIterator[Delta | EngineReply]:
        NEXT.append(self.turns.popleft())
        async for item in super().generate(request, sampling, session):
            if isinstance(item, EngineReply):
                self.begun.set()
                await self.gate.wait()
            yield item


NEXT: deque[Turn] = deque()


def play(scene: Scene) -> Turn:
    """The script of a ``Policy`` (`cases_helpers:play`)."""
    return NEXT.popleft()


def scripted(*turns: Turn | str, splice: str = "off", thinking: bool = True, folder: Path | None = None) -> Policy:
    """``thinking=False``: the same template as Qwen3 serves it without thoughts, made in ``folder``."""
    directory = tokenizer.fetch(CACHE)
    if not thinking:
        assert folder is not None
        directory = _no_think(directory, folder / "no_think")
    return Policy([Turn(turn) if isinstance(turn, str) else turn for turn in turns], splice, directory)


def _no_think(source: Path, target: Path) -> Path:
    """vLLM's ``--default-chat-template-kwargs '{"enable_thinking": false}'``, written into the template."""
    target.mkdir()
    (target / "tokenizer.json").symlink_to(source / "tokenizer.json")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    switch = "enable_thinking is defined and enable_thinking is false"
    assert config["chat_template"].count(switch) == 1
    config["chat_template"] = config["chat_template"].replace(switch, "true")
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


# --- a session --------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """What is left of a session, from the disk to the row."""

    ledger: SealedLedger
    trajectory: Trajectory
    result: RolloutResult
    row: dict[str, Any]

    @property
    def records(self) -> tuple[CallRecord, ...]:
        return self.ledger.records

    @property
    def joins(self) -> list[str]:
        """How each delivered call joins the ones before, in order."""
        found = classify(self.ledger)
        return [found[record.call_id].value for record in self.records if record.call_id in found]

    @property
    def chains(self) -> list[tuple[str, list[tuple[int, bool]]]]:
        """(kind, [(index of the call, whether it trains here)]) of every chain."""
        number = {record.call_id: record.index for record in self.records}
        return [
            (chain.kind.value, [(number[turn.call_id], turn.trained) for turn in chain.turns])
            for chain in self.trajectory.chains
        ]

    @property
    def left_out(self) -> dict[int, str]:
        number = {record.call_id: record.index for record in self.records}
        return {number[call_id]: why for call_id, why in self.trajectory.left_out.items()}

    @property
    def trained(self) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, sampled ids) of every item NeMo-RL trains on, in order."""
        items = (item for item in self.row["response"]["output"] if "generation_token_ids" in item)
        return [(list(item["prompt_token_ids"]), list(item["generation_token_ids"])) for item in items]

    def tokens(self, *indexes: int) -> list[tuple[list[int], list[int]]]:
        """The same of calls as the engine gave them."""
        by_index = {record.index: record for record in self.records}
        return [(by_index[i].prompt_ids.tolist(), by_index[i].sampled_ids.tolist()) for i in indexes]


@dataclass
class Case:
    """One open session and its client."""

    proxy: ProxyServer
    session: ProxySession
    port: int
    http: aiohttp.ClientSession
    history: list[Message] = field(default_factory=list[Message])
    ended: Ended | None = None

    async def post(self, messages: Sequence[Message], *, thread: str = "", **body: Any) -> tuple[int, Any]:
        """One request; ``thread`` is a sub-agent, as opencode names it. (status, JSON)."""
        headers = {"x-parent-session-id": "main", "x-session-id": thread} if thread else {}
        async with self._post(messages, headers, body) as response:
            return response.status, json.loads(await response.read())

    @asynccontextmanager
    async def stream(self, messages: Sequence[Message]) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A streamed answer, to be read or left in the block."""
        async with self._post(messages, {}, {"stream": True}) as response:
            assert response.status == 200
            yield response

    def _post(self, messages: Sequence[Message], headers: dict[str, str], body: dict[str, Any]) -> Any:
        payload = {"model": "any", "messages": list(messages), "tools": TOOLS, **body}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return self.http.post(url, json=payload, headers={"Authorization": f"Bearer {self.session.key}", **headers})

    async def ask(self, messages: Sequence[Message], **more: Any) -> Message:
        """The assistant's message that answers."""
        status, answer = await self.post(messages, **more)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    async def say(self, *messages: Message, **more: Any) -> Message:
        """Go on in the main conversation as a faithful harness does: history, new messages, and then the answer."""
        self.history += messages
        said = await self.ask(self.history, **more)
        self.history.append(said)
        return said

    async def leave(self, messages: Sequence[Message], engine: Policy) -> None:
        """Ask for a stream, and hang up when the engine has sampled and before the reply can end."""
        engine.gate.clear()
        engine.begun.clear()
        async with self.stream(messages) as answer:
            await asyncio.wait_for(engine.begun.wait(), 30)
            assert await answer.content.readany()

    async def end(self, status: VerdictStatus = VerdictStatus.RESOLVED) -> Ended:
        """Seal, and go down the rest of the line: log, chains, outcome, reward, judged row."""
        sealed = await self.session.close()
        result = self._result(sealed, status)
        row = rows.row(result, {"input": "x"}, model="policy", max_tokens=None)
        assert contract.violations(row) == []
        self.ended = Ended(sealed, result.trajectory, result, json.loads(json.dumps(row)))
        assert sum(chain.trainable_tokens for chain in result.trajectory.chains) == result.trajectory.sampled_tokens
        return self.ended

    def _result(self, sealed: SealedLedger, status: VerdictStatus) -> RolloutResult:
        ending = Ending(Prewarm(SandboxConfig()), exit=HarnessExit(0, "", ""))
        outcome, detail = outcome_of(ending, self.session, sealed, SHELL)
        verdict = None if outcome in INFRASTRUCTURE else Verdict(status)
        return RolloutResult(
            task_id="case",
            harness="shell",
            outcome=outcome,
            detail=detail,
            verdict=verdict,
            decision=decide(outcome, verdict, sealed.complete, RewardConfig()),
            trajectory=build(sealed, TrajectoryConfig()),
            ledger=sealed,
            patch=b"",
            exit=ending.exit,
        )


SHELL = Shell(HarnessConfig(name="shell", command=("true",)))


@asynccontextmanager
async def case(folder: Path, engine: Engine, **config: Any) -> AsyncGenerator[Case]:
    """A session on a proxy of its own. At the end its log must say what its ledger said, and its row must verify."""
    sessions, sock = folder / "sessions", loopback()
    port = sock.getsockname()[1]
    async with (
        ProxyServer(engine, ProxyConfig(**{"retry_grace": 20.0, **config})) as proxy,
        proxy.listen(sock),
        aiohttp.ClientSession() as http,
        SegmentLog(sessions / SESSION) as log,
    ):
        session = proxy.open(
            session_id=SESSION,
            ledger=Ledger(SESSION, log),
            engine_session=Session(SESSION, script="cases_helpers:play"),
            classify=SHELL.classify,
        )
        it = Case(proxy, session, port, http)
        try:
            yield it
        finally:
            await session.close()
    if it.ended is not None:
        _check(it.ended, sessions)


def _check(ended: Ended, sessions: Path) -> None:
    """The log on disk says the same, and ``polar verify`` finds the row in it."""
    assert same_ledger(rebuild(sessions / SESSION), ended.ledger)
    written, said = sessions / "rollouts.jsonl", list[str]()
    written.write_text(json.dumps(ended.row) + "\n", encoding="utf-8")
    assert verify.run(written, sessions, said.append) == 0, said

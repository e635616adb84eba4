"""A session of the proxy that is alive: its ledger, its log, its attempts and its history, as a rollout holds them.

There is no socket, harness or model: a request goes into ``proxy.session.Session``, and an engine in this file answers
it with the ids that came before and new ones. Nothing else is kept, so what the process grows by is what is measured.
"""

import hashlib
from array import array
from asyncio import TaskGroup
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from polar_env.capture import Ledger, SegmentLog
from polar_env.config import ProxyConfig
from polar_env.engine import EngineFacts
from polar_env.engine import Session as EngineSession
from polar_env.messages import ChatMessage
from polar_env.proxy.session import Session, policy
from polar_env.types import (
    AssistantTurn,
    CallKind,
    Delta,
    EngineReply,
    ModelRequest,
    Sampling,
    StopReason,
    ToolCall,
    Usage,
    WireApi,
)

WORDS = ("open", "the", "file", "and", "read", "its", "tests", "def", "return", "assert", "value", "where", "fails")


class Sampler:
    """An engine: each answer is drawn, each prompt is the last call's ids and as many new ones as the session needs."""

    def __init__(self, ledger: Ledger, seed: int, turns: int, tokens: int) -> None:
        self.ledger = ledger
        self.count = 0
        self._first, self._per_turn = tokens // 8, (tokens - tokens // 8) // turns
        self._rng = np.random.default_rng(seed)

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        sampled = self._draw(self._per_turn // 3)
        new = self._draw(self._per_turn - len(sampled) + (0 if self.count else self._first))
        before = self.ledger.ids(f"{self.ledger.session_id}-{self.count - 1:04d}") if self.count else array("i")
        log_probs = array("f", (-self._rng.exponential(0.4, len(sampled))).astype(np.float32).tobytes())
        prompt = before + new
        text = " ".join(self._rng.choice(WORDS, len(sampled) - 40))
        tool = ToolCall(f"toolu_{self.count}", "bash", '{"command": "' + "x" * 100 + '"}')
        turn = AssistantTurn(text, (tool,), StopReason.TOOL_CALLS, Usage(len(prompt), len(sampled)))
        self.count += 1
        yield EngineReply(turn, prompt, sampled, log_probs, "step-7", finish="tool_calls")

    def _draw(self, count: int) -> "array[int]":
        return array("i", self._rng.integers(0, 150_000, count, dtype=np.int32).tobytes())

    async def count_tokens(self, request: ModelRequest) -> int:
        return 0

    async def check(self) -> EngineFacts:
        return EngineFacts("drawn", 1_000_000, "step-7", real_tensors=False)

    async def aclose(self) -> None:
        return None


class Live:
    """One of them. ``turn`` takes it a call further."""

    def __init__(self, session: Session, ledger: Ledger, sampler: Sampler) -> None:
        self.session, self._ledger, self._sampler = session, ledger, sampler
        self.numbers = 0
        """Unique ids and log-probs it has seen."""
        self.held = 0
        """Unique ids it has seen."""

    async def turn(self) -> None:
        """One call, from the request to the delivered reply.

        The request holds the messages that are new and not those before: what the session and its log keep of a message
        is a digest, the same for either, and the time to digest a whole history is not what is measured.
        """
        number = self._sampler.count
        asked: list[ChatMessage] = [
            {"role": "tool", "tool_call_id": f"toolu_{number - 1}", "content": f"{self._ledger.session_id} {number}"}
        ]
        request = ModelRequest(WireApi.CHAT, "policy", tuple(asked))
        body = {"messages": asked}
        raw = hashlib.sha256(str(body).encode()).digest()
        attempt = self.session.call(request, {}, body, raw)
        turn = await attempt.answer()
        self.session.delivered(attempt)
        before, self.held = self.held, turn.usage.prompt_tokens + turn.usage.completion_tokens
        self.numbers += self.held - before + turn.usage.completion_tokens


@asynccontextmanager
async def live_session(name: str, folder: Path, group: TaskGroup, turns: int, tokens: int) -> AsyncGenerator[Live]:
    """A session that lives as long as the block, with a log in ``folder``."""
    config = ProxyConfig(max_calls=turns + 1)
    async with SegmentLog(folder / name) as log:
        ledger = Ledger(name, log)
        sampler = Sampler(ledger, sum(name.encode()), turns, tokens)
        session = Session(
            name,
            ledger,
            sampler,
            EngineSession(name, "bench", "bench"),
            lambda headers, body: (CallKind.AGENT, ""),
            policy(config, None),
            config,
            group.create_task,
        )
        try:
            yield Live(session, ledger, sampler)
        finally:
            await session.close()

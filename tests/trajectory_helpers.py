"""Calls, ledgers and call trees for the capture, trajectory and row tests: plain builders, no fakes."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from polar_env.config import RewardConfig, TrajectoryConfig
from polar_env.reward import decide
from polar_env.trajectory import build
from polar_env.types import (
    AssistantTurn,
    CallKind,
    CallRecord,
    EngineReply,
    HarnessExit,
    Hole,
    Outcome,
    RolloutResult,
    Sampling,
    SealedLedger,
    StopReason,
    ToolCall,
    Usage,
    WireApi,
)
from polar_env.verdict import Verdict, VerdictStatus

SESSION = "session-1"


def ids(*values: int | Iterable[int]) -> "array[int]":
    """``ids(1, 2, range(3, 5))`` as array('i')."""
    flat = array("i")
    for value in values:
        flat.extend((value,) if isinstance(value, int) else value)
    return flat


def probs(count: int, start: float = -0.125) -> "array[float]":
    """``count`` different log-probabilities."""
    return array("f", [start - 0.001 * i for i in range(count)])


def call(
    index: int,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    call_id: str = "",
    kind: CallKind = CallKind.AGENT,
    thread: str = "",
    text: str = "I will look.",
    reasoning: str = "",
    tools: tuple[ToolCall, ...] = (),
    stop: StopReason = StopReason.STOP,
    holes: tuple[Hole, ...] = (),
    session: str = SESSION,
    log_probs: "array[float] | None" = None,
) -> CallRecord:
    """One committed call with everything a record carries."""
    usage = Usage(len(prompt), len(sampled), cached_tokens=index)
    return CallRecord(
        call_id=call_id or f"call-{index}",
        session_id=session,
        index=index,
        kind=kind,
        wire=WireApi.ANTHROPIC,
        thread=thread,
        body_digest=f"{index:064x}",
        turn=AssistantTurn(text, tools, stop, usage, reasoning),
        prompt_ids=ids(prompt),
        sampled_ids=ids(sampled),
        log_probs=probs(len(sampled), -0.1 * (index + 1)) if log_probs is None else log_probs,
        policy_version="step-7",
        sampling=Sampling(1.0, 1.0, None, 8192),
        asked=Sampling(temperature=0.2),
        message_count=index + 1,
        started=1000.1 + index,
        ended=1000.7 + index,
        holes=holes,
        ignored=("metadata",),
    )


def ledger(
    *records: CallRecord,
    undelivered: Iterable[str] = (),
    superseded: Iterable[str] = (),
    holes: tuple[Hole, ...] = (),
) -> SealedLedger:
    """A sealed ledger in which every call was delivered but those named."""
    return SealedLedger(
        session_id=SESSION,
        records=records,
        delivered=frozenset(record.call_id for record in records) - frozenset(undelivered),
        superseded=frozenset(superseded),
        holes=(*holes, *(hole for record in records for hole in record.holes)),
    )


def reply(
    prompt: Sequence[int] = (1, 2, 3), sampled: Sequence[int] = (4, 5), *, usage: Usage | None = None, **changes: Any
) -> EngineReply:
    """A generation that keeps the capture contract, but for ``changes``."""
    used = usage or Usage(len(prompt), len(sampled))
    turn = AssistantTurn("ok", (), changes.pop("stop", StopReason.STOP), used)
    fields: dict[str, Any] = {
        "turn": turn,
        "prompt_ids": ids(prompt),
        "sampled_ids": ids(sampled),
        "log_probs": probs(len(sampled)),
        "policy_version": "step-7",
        "finish": "stop",
    }
    return EngineReply(**(fields | changes))


def fields_of(record: CallRecord) -> tuple[Any, ...]:
    """A record as comparable values, arrays as bytes (a NaN is not equal to itself, its bytes are)."""
    raw = {name: getattr(record, name) for name in CallRecord.__slots__}
    return tuple(value.tobytes() if isinstance(value, array) else value for value in raw.values())


def same_ledger(left: SealedLedger, right: SealedLedger) -> bool:
    """Bit for bit, arrays included."""
    return (
        [fields_of(r) for r in left.records] == [fields_of(r) for r in right.records]
        and (left.session_id, left.delivered, left.superseded) == (right.session_id, right.delivered, right.superseded)
        and left.holes == right.holes
    )


@dataclass
class Conversation:
    """A harness that appends to one history; every call's prompt extends all that came before."""

    history: "array[int]" = field(default_factory=lambda: array("i"))
    records: list[CallRecord] = field(default_factory=list[CallRecord])

    def turn(self, new: Sequence[int], sampled: Sequence[int], **fields: Any) -> CallRecord:
        self.history = self.history + ids(new)
        record = call(len(self.records), self.history, sampled, **fields)
        self.history = self.history + ids(sampled)
        self.records.append(record)
        return record


def long_calls(turns: int = 150, tokens: int = 136_000, seed: int = 5) -> Iterator[CallRecord]:
    """A session as long as a hard SWE task: ``turns`` calls on one history that ends at ``tokens`` ids."""
    rng = np.random.default_rng(seed)
    first, per_turn = tokens // 8, (tokens - tokens // 8) // turns
    words = ("open", "the", "file", "and", "read", "its", "tests", "def", "return", "assert", "value", "where", "fails")
    history = _drawn(rng, first)
    for index in range(turns):
        sampled = _drawn(rng, per_turn // 3)
        history = history + _drawn(rng, per_turn - len(sampled))
        text = " ".join(rng.choice(words, len(sampled)))
        log_probs = array("f", (-rng.exponential(0.4, len(sampled))).astype(np.float32).tobytes())
        yield call(index, history, sampled, text=text, log_probs=log_probs)
        history = history + sampled


def _drawn(rng: np.random.Generator, count: int) -> "array[int]":
    return array("i", rng.integers(0, 150_000, count, dtype=np.int32).tobytes())


def long_session(turns: int = 150, tokens: int = 136_000, seed: int = 5) -> list[CallRecord]:
    """``long_calls``, all at once."""
    return list(long_calls(turns, tokens, seed))


# --- random call trees and finished rollouts --------------------------------------------------------------------

KINDS = (CallKind.AGENT, CallKind.AGENT, CallKind.AGENT, CallKind.SUB_AGENT, CallKind.COMPACTION, CallKind.SIDE)

TEXTS = ("", "done", "<think>why</think>so", "so</think>", "<tool_call>{", "\ud800")


@st.composite
def call_trees(draw: st.DrawFn) -> SealedLedger:
    """Any session: branches, retries, empty generations, sub-agents seeded with a parent's history, lost replies,
    holes; few distinct tokens, so that prefixes collide; records in any order."""
    count = draw(st.integers(0, 9))
    records: list[CallRecord] = []
    tokens = st.lists(st.integers(1, 3), max_size=3)
    for index in range(count):
        base: array[int] = array("i")
        if records and draw(st.booleans()):
            parent = draw(st.sampled_from(records))
            base = parent.prompt_ids + (parent.sampled_ids if draw(st.booleans()) else array("i"))
        prompt = base + ids(draw(tokens))
        kind = draw(st.sampled_from(KINDS))
        records.append(
            call(
                index,
                prompt or ids(1),
                draw(tokens),
                kind=kind,
                thread="sub" if kind is CallKind.SUB_AGENT else "",
                text=draw(
                    st.sampled_from(["", "done", "<think>why</think>so", "so</think>", "<tool_call>{", "\ud800"])
                ),
                reasoning=draw(st.sampled_from(["", "hm"])),
                tools=draw(st.sampled_from([(), (ToolCall("t1", "bash", "{"), ToolCall("t2", "bash", "{}"))])),
                stop=draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH])),
            )
        )
    names = [record.call_id for record in records]
    few = st.lists(st.sampled_from(names), max_size=2) if names else st.just([])
    shuffled = draw(st.permutations(records))
    return ledger(*shuffled, undelivered=draw(few), superseded=draw(few))


def rollout(
    sealed: SealedLedger,
    outcome: Outcome = Outcome.COMPLETED,
    status: VerdictStatus | None = VerdictStatus.RESOLVED,
    *,
    trajectory: TrajectoryConfig | None = None,
    train_timeouts: bool = True,
    detail: str = "",
) -> RolloutResult:
    """A rollout that went down the real line: ledger -> chains, verdict -> reward."""
    verdict = None if status is None else Verdict(status, (1, 1), (3, 4), "2 tests", 1.5)
    return RolloutResult(
        task_id="demo__parser-1",
        harness="claude_code",
        outcome=outcome,
        detail=detail,
        verdict=verdict,
        decision=decide(outcome, verdict, sealed.complete, RewardConfig(train_timeouts=train_timeouts)),
        trajectory=build(sealed, trajectory or TrajectoryConfig()),
        ledger=sealed,
        patch=b"diff --git a/a b/a\n",
        exit=HarnessExit(0, "", ""),
        seconds={"agent": 12.5, "grade": 3.0},
    )

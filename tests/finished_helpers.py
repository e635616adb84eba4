"""Finished rollouts on disk: session logs as the proxy writes them, rows as Gym stores them."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polar_env.capture import Ledger, SegmentLog
from polar_env.config import TrajectoryConfig
from polar_env.gym.rows import row
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import CallKind, CallRecord, ModelRequest, Outcome, SealedLedger, StopReason, ToolCall, WireApi
from polar_env.verdict import VerdictStatus
from trajectory_helpers import Conversation, call, ids, rollout

BASH = ToolCall("toolu_1", "bash", '{"command": "ls"}')
TOOLS: tuple[ToolSpec, ...] = ({"name": "bash", "parameters": {"type": "object"}},)
TASK: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "You fix bugs."},
    {"role": "user", "content": "Fix the parser."},
)
LOOKED: tuple[ChatMessage, ...] = (
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "let me look",
        "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "bash", "arguments": BASH.arguments}}
        ],
    },
    {"role": "tool", "tool_call_id": "toolu_1", "content": "a.py\nb.py"},
)


@dataclass(frozen=True)
class Finished:
    """A rollout that is over: its row as it was read back from JSON, and the folder its session's log lies in."""

    row: dict[str, Any]
    sessions: Path

    @property
    def log(self) -> Path:
        return self.sessions / self.row["polar"]["session_id"]


def request(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = TOOLS) -> ModelRequest:
    return ModelRequest(WireApi.ANTHROPIC, "policy", tuple(messages), tuple(tools))


def of_session(session: str, record: CallRecord) -> CallRecord:
    return replace(record, session_id=session, call_id=f"{session}-{record.index:04d}")


def two_turns(session: str = "parser.0") -> list[tuple[CallRecord, ModelRequest]]:
    """Look, then say so; after that a sub-agent of its own and a title nobody trains on."""
    talk = Conversation()
    talk.turn([1, 2, 3], [4, 5], text="", tools=(BASH,), reasoning="let me look", stop=StopReason.TOOL_CALLS)
    talk.turn([6, 7], [8, 9, 10], text="Done.")
    aside = call(2, [50, 51], [52], kind=CallKind.SUB_AGENT, thread="sub", text="Searched.")
    title = call(3, [60], [61, 62], kind=CallKind.SIDE, text="Parser fix")
    asked = (TASK, (*TASK, *LOOKED), [{"role": "user", "content": "search"}], [{"role": "user", "content": "title?"}])
    records = (*talk.records, aside, title)
    tools = (TOOLS, TOOLS, TOOLS, ())
    return [(of_session(session, r), request(m, t)) for r, m, t in zip(records, asked, tools, strict=True)]


def branched(session: str = "parser.1") -> list[tuple[CallRecord, ModelRequest]]:
    """A trunk that a sub-agent was seeded with, and the main line."""
    talk = Conversation()
    talk.turn([1], [2])
    branch = call(1, talk.history + ids(9), [8, 8], kind=CallKind.SUB_AGENT, thread="x")
    main = call(2, talk.history + ids(3), [4])
    return [(of_session(session, record), request(TASK)) for record in (*talk.records, branch, main)]


async def record(
    sessions: Path,
    calls: Sequence[tuple[CallRecord, ModelRequest | None]],
    *,
    seal: bool = True,
    messages: bool = True,
    undelivered: Iterable[str] = (),
    superseded: Iterable[str] = (),
) -> SealedLedger:
    """Write a session's log as the proxy does, and seal it."""
    session = calls[0][0].session_id
    lost = frozenset(undelivered)
    async with SegmentLog(sessions / session, messages=messages) as log:
        ledger = Ledger(session, log)
        for entry, asked in calls:
            await ledger.append(entry, asked)
            if entry.call_id not in lost:
                ledger.mark_delivered(entry.call_id)
        for name in superseded:
            ledger.mark_superseded(name)
        return ledger.seal() if seal else SealedLedger(session, (), frozenset(), frozenset(), ())


def finish(
    sessions: Path,
    calls: Sequence[tuple[CallRecord, ModelRequest | None]] | None = None,
    outcome: Outcome = Outcome.COMPLETED,
    status: VerdictStatus | None = VerdictStatus.RESOLVED,
    *,
    max_tokens: int | None = None,
    trajectory: TrajectoryConfig | None = None,
    **marks: Any,
) -> Finished:
    """A rollout over its whole line: log on disk, sealed ledger, chains, reward, row, JSON."""
    sealed = asyncio.run(record(sessions, two_turns() if calls is None else calls, **marks))
    result = rollout(sealed, outcome, status, trajectory=trajectory)
    made = row(result, {"input": []}, model="policy", max_tokens=max_tokens)
    return Finished(json.loads(json.dumps(made)), sessions)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(made) + "\n" for made in rows), encoding="utf-8")
    return path

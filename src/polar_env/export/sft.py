"""Conversations of accepted rollouts as OpenAI-Chat JSONL, for supervised fine-tuning.

A row holds tokens and answers, not what the model was asked. That is in the session's log when it was recorded with
``store.messages`` on, so ``--sessions`` is needed: the conversation is the request of the delivered chain's last call,
with that call's answer behind it. Nothing is decoded from tokens. Accepted is a reward of 1.0 in a row that is not
masked, or masked only for want of token ids (engine ``text``).

| field | type | |
|---|---|---|
| messages | list of Chat messages | ``tool_calls[].function.arguments`` is the JSON text the model wrote |
| tools | list of ``{"type": "function", "function": {...}}`` | as offered to the model |
| session_id, task_id, harness | string | |
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polar_env.conversation import Conversation, as_message
from polar_env.export import ExportError, Job
from polar_env.export.samples import Rollout
from polar_env.segment_log import read
from polar_env.types import AssistantTurn


def lines(rollouts: Iterable[Rollout], job: Job) -> Iterator[dict[str, Any]]:
    """One conversation per accepted rollout."""
    if job.sessions is None:
        raise ExportError("sft needs what the model was asked: name the session logs with --sessions")
    for rollout in rollouts:
        last = next((chain.call_ids[-1] for chain in rollout.chains if chain.delivered), None)
        if (rollout.masked is not False and not rollout.text_only) or rollout.reward != 1.0 or last is None:
            job.skipped["not accepted"] += 1
        elif (found := _conversation(job.sessions / rollout.session_id, last)) is None:
            job.skipped["recorded without messages (store.messages)"] += 1
        else:
            yield _line(rollout, *found)


def _conversation(directory: Path, call_id: str) -> tuple[Conversation, AssistantTurn] | None:
    """What a call was asked, and its answer. Raises CaptureError when there is no log."""
    log = read(directory)
    asked = log.conversations().get(call_id)
    turn = next((record.turn for record in log.ledger.records if record.call_id == call_id), None)
    return None if asked is None or turn is None else (asked, turn)


def _line(rollout: Rollout, asked: Conversation, turn: AssistantTurn) -> dict[str, Any]:
    return {
        "messages": [*asked.messages, as_message(turn)],
        "tools": [{"type": "function", "function": tool} for tool in asked.tools],
        "session_id": rollout.session_id,
        "task_id": rollout.task_id,
        "harness": rollout.harness,
    }

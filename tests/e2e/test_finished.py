"""A real rollout's row against its real log: verified, exported, and its conversation read back."""

import json
from pathlib import Path

import pytest

from finished_helpers import write_rows
from polar_env.export import FORMATS, Job
from polar_env.export.write import export
from polar_env.segment_log import read
from polar_env.verify import violations
from rollout_helpers import delivered, roll, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def test_a_real_rollout_holds_and_leaves_in_every_format(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    result = await roll(await settings(sessions))
    made = json.loads(json.dumps(delivered(result)))
    assert made["reward"] == 1.0
    assert violations(made, sessions) == []
    rows = write_rows(tmp_path / "rollouts.jsonl", [made])
    for name in FORMATS:
        assert export(name, rows, tmp_path / f"{name}.jsonl", Job(sessions=sessions)) >= 1
    (line,) = [json.loads(text) for text in (tmp_path / "sft.jsonl").read_text().splitlines()]
    roles = [message["role"] for message in line["messages"]]
    assert roles.count("assistant") == made["num_model_calls"]
    assert roles[-1] == "assistant"
    assert any("parser" in json.dumps(message) or "/testbed" in json.dumps(message) for message in line["messages"])
    made["trajectories"][0]["token_ids"][7] ^= 1
    assert violations(made, sessions) != []


async def test_a_store_without_messages_keeps_no_word_of_the_requests(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    result = await roll(await settings(sessions, store={"messages": False}))
    log = read(sessions / result.ledger.session_id)
    assert len(log.ledger.records) == len(result.ledger.records) > 1
    assert log.conversations() == {}

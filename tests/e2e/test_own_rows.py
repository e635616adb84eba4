"""The example of a row of your own, played by real rollouts: what a fix, nothing, and a change of the tests earn."""

import json
from pathlib import Path

import pytest

from polar_env.cli import main
from polar_env.rollout import RolloutJob, open_proxy, rollout
from polar_env.tasks.rows import load
from polar_env.types import Outcome, RolloutResult, Sampling
from polar_env.verdict import Flag, VerdictStatus
from rollout_helpers import STORE, delivered, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROWS = str(Path(__file__).resolve().parents[2] / "examples" / "own_tasks.jsonl")


async def played(sessions: Path, script: str) -> RolloutResult:
    config = await settings(sessions, engine={"scripts": [script]}, data=ROWS)
    (task,) = load(config.data)
    async with open_proxy(config) as proxy:
        return await rollout(RolloutJob(task, config.harness, Sampling(temperature=1.0)), proxy, config)


def test_the_example_earns_its_fix_a_one_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = [f"store.sessions={tmp_path}", f"store.cache={STORE}"]
    asked = ["--data", ROWS, "--engine", "scripted", "--harness", "rollout_helpers:Renamed"]
    assert main(["rollout", *asked, *stores]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["reward"], row["mask_sample"]) == (1.0, False)
    assert row["polar"]["verdict"]["fail_to_pass"] == [5, 5]
    assert row["polar"]["verdict"]["flags"] == []


@pytest.mark.parametrize(
    ("script", "status", "flags"),
    [
        ("give_up", VerdictStatus.EMPTY_PATCH, ()),
        ("half", VerdictStatus.UNRESOLVED, ()),
        ("cheating_scripts_helpers:edits_the_tests", VerdictStatus.EMPTY_PATCH, (Flag.TESTS_EDITED,)),
        ("cheating_scripts_helpers:plants_a_hook", VerdictStatus.REFUSED, (Flag.TEST_HOOKS,)),
    ],
)
async def test_nothing_too_little_and_changed_tests_earn_a_zero_that_trains(
    tmp_path: Path, script: str, status: VerdictStatus, flags: tuple[Flag, ...]
) -> None:
    result = await played(tmp_path, script)
    assert (result.outcome, result.detail, result.verdict and result.verdict.status) == (Outcome.COMPLETED, "", status)
    assert result.verdict
    assert result.verdict.flags == flags
    row = delivered(result)
    assert (row["reward"], row["mask_sample"], row["resolved"]) == (0.0, False, 0.0)

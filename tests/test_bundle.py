"""What stays of a rollout that failed: read by a person, the next morning."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polar_env.bundle import PRINTED, keep
from polar_env.errors import CaptureError
from polar_env.types import HarnessExit, Outcome
from rollout_helpers import python, roll, settings
from trajectory_helpers import ledger, rollout


def failed(stdout: str = "", stderr: str = ""):
    return replace(
        rollout(ledger(), Outcome.AGENT_ERROR, None, detail="exit 3"), exit=HarnessExit(3, stdout, stderr, seconds=1.5)
    )


def test_it_says_how_it_ended_and_what_was_printed_last(tmp_path: Path):
    told = json.loads(keep(tmp_path / "s", failed("working", "Traceback: no\n")).read_text())
    assert (told["outcome"], told["detail"], told["harness"]) == ("agent_error", "exit 3", "claude_code")
    assert (told["exit"]["code"], told["exit"]["stdout"], told["exit"]["stderr"]) == (3, "working", "Traceback: no\n")
    assert told["seconds"]["agent"] == 12.5
    assert (tmp_path / "s" / "patch.diff").read_bytes() == b"diff --git a/a b/a\n"


def test_a_harness_that_prints_for_hours_keeps_its_end_only(tmp_path: Path):
    told = json.loads(keep(tmp_path, failed("x" * PRINTED + "the error")).read_text())
    assert len(told["exit"]["stdout"]) == PRINTED
    assert told["exit"]["stdout"].endswith("the error")


def test_odd_text_survives(tmp_path: Path):
    told = json.loads(keep(tmp_path, failed("\ud800 ü \0")).read_text())
    assert told["exit"]["stdout"] == "\ud800 ü \0"


def test_a_key_the_harness_printed_is_blotted_out(tmp_path: Path):
    text = keep(tmp_path, failed("KEY=s3cret-key"), key="s3cret-key").read_text()
    assert "s3cret-key" not in text
    assert "<session key>" in text


def test_a_rollout_that_never_started_its_harness_has_one_too(tmp_path: Path):
    nothing = replace(rollout(ledger(), Outcome.SANDBOX_ERROR, None, detail="no disk"), exit=None, patch=b"")
    told = json.loads(keep(tmp_path, nothing).read_text())
    assert (told["exit"], told["detail"]) == (None, "no disk")
    assert not (tmp_path / "patch.diff").exists()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CaptureError, match="keeping how"):
        keep(tmp_path / "file" / "session", failed())


@pytest.mark.e2e
async def test_a_failed_rollout_leaves_its_bundle_beside_its_log_and_a_good_one_none(tmp_path: Path):
    broken = python("import os, sys; print(os.environ, file=sys.stderr); sys.exit(3)")
    config = await settings(tmp_path, harness={"name": "shell", "command": broken})
    result = await roll(config)
    told = json.loads((tmp_path / result.ledger.session_id / "ending.json").read_text())
    assert told["outcome"] == result.outcome.value != "completed"
    assert "<session key>" in told["exit"]["stderr"]
    good = await roll(await settings(tmp_path / "good"))
    assert good.outcome is Outcome.COMPLETED
    assert not (tmp_path / "good" / good.ledger.session_id / "ending.json").exists()

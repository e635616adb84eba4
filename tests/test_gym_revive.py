"""A row masked because its grading failed is graded again: with its log it trains as if nothing had failed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finished_helpers import Finished, branched, finish, of_session, two_turns
from polar_env.config import RewardConfig, TrajectoryConfig
from polar_env.errors import CaptureError, ConfigError
from polar_env.frames import encode_frame, frames
from polar_env.gym import contract, revive
from polar_env.reward import decide
from polar_env.segment_log import FILE_NAME
from polar_env.types import Hole, HoleKind, Outcome
from polar_env.verdict import Verdict, VerdictStatus
from polar_env.verify import violations
from trajectory_helpers import call

FOUND = Verdict(VerdictStatus.RESOLVED, (1, 1), (3, 4), "2 tests", 1.5)


def lost(sessions: Path, ended: Outcome = Outcome.COMPLETED, **more: Any) -> Finished:
    """A rollout that ended so, and whose grading failed."""
    found = finish(sessions, outcome=Outcome.GRADE_ERROR, status=None, **more)
    return Finished(found.row | {"polar": found.row["polar"] | {"ended": ended.value}}, sessions)


def graded(finished: Finished, verdict: Verdict = FOUND) -> dict[str, Any]:
    """The row made again, as JSON reads it."""
    row = finished.row
    outcome = revive.ended(row["polar"])
    decision = decide(outcome, verdict, row["polar"]["complete"], RewardConfig())
    return json.loads(json.dumps(revive.revived(row, outcome, verdict, decision, finished.sessions)))


@pytest.mark.parametrize("calls", [two_turns, branched])
@pytest.mark.parametrize("ended", [Outcome.COMPLETED, Outcome.AGENT_TIMEOUT, Outcome.TURN_LIMIT])
@pytest.mark.parametrize("delivery", ["task", "longest", "sample"])
def test_it_becomes_the_row_it_would_have_been(
    tmp_path: Path, calls: Callable[[], Any], ended: Outcome, delivery: str
) -> None:
    policy = TrajectoryConfig.model_validate({"delivery": delivery, "seed": 3})
    whole = finish(tmp_path / "whole", calls(), ended, trajectory=policy)
    masked = lost(tmp_path / "lost", ended, calls=calls(), trajectory=policy)
    assert masked.row["mask_sample"]
    assert masked.row["trainable_tokens"] == 0
    assert graded(masked) == whole.row
    assert violations(graded(masked), masked.sessions) == []


def test_a_verdict_of_nought_trains_as_well(tmp_path: Path) -> None:
    made = graded(lost(tmp_path), Verdict(VerdictStatus.UNRESOLVED, (0, 1), (3, 4), "2 tests", 1.5))
    assert (made["reward"], made["mask_sample"]) == (0.0, False)
    assert made["trainable_tokens"] > 0
    assert contract.violations(made) == []


def test_it_is_cut_to_the_length_it_was_made_for(tmp_path: Path) -> None:
    made = graded(lost(tmp_path, max_tokens=6))
    assert (made["truncated"], made["total_tokens"]) == (1.0, 5.0)
    assert contract.violations(made, 6) == []


def test_one_in_which_nothing_fits_the_trainer_stays_masked_with_its_reason(tmp_path: Path) -> None:
    made = graded(lost(tmp_path, max_tokens=2))
    assert made["mask_sample"]
    assert made["failure_kind"] == "polar_env:no_trainable_tokens"


def test_how_old_its_policy_was_stays_as_it_was_told(tmp_path: Path) -> None:
    masked = lost(tmp_path)
    assert graded(Finished(masked.row | {"policy_age": 3.0, "policy_stale": 1.0}, tmp_path))["policy_age"] == 3.0


# --- what cannot be made again ------------------------------------------------------------------------------------


def test_without_its_log_it_says_where_to_grade_it(tmp_path: Path) -> None:
    masked = lost(tmp_path / "there")
    for sessions, name in ((tmp_path / "elsewhere", "parser.0"), (masked.sessions, ""), (masked.sessions, "../there")):
        row = masked.row | {"polar": masked.row["polar"] | {"session_id": name}}
        with pytest.raises(CaptureError, match=r"store\.sessions has that log"):
            graded(Finished(row, sessions))


def cut_in_the_middle(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def never_sealed(path: Path) -> None:
    *kept, _ = frames(path.read_bytes())
    path.write_bytes(b"".join(encode_frame(each.kind, each.header, each.body) for each in kept))


def one_bit_flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("spoil", [cut_in_the_middle, never_sealed, one_bit_flipped])
def test_a_log_that_is_not_all_of_its_session_trains_nothing(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    masked = lost(tmp_path)
    spoil(masked.log / FILE_NAME)
    with pytest.raises(CaptureError, match="cannot be trained on"):
        graded(masked)


def test_a_log_of_fewer_calls_than_the_row_counts_trains_nothing(tmp_path: Path) -> None:
    masked = lost(tmp_path)
    with pytest.raises(CaptureError, match="it holds 4 calls of 5"):
        graded(Finished(masked.row | {"num_model_calls": 5.0}, tmp_path))


def test_a_row_that_is_not_ours_is_refused_in_a_sentence(tmp_path: Path) -> None:
    masked = lost(tmp_path)
    for without in ("trajectory", "patch"):
        polar = {key: value for key, value in masked.row["polar"].items() if key != without}
        with pytest.raises(ConfigError, match="to make it again"):
            graded(Finished(masked.row | {"polar": polar}, tmp_path))


# --- how it ended -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("polar", "outcome"),
    [
        ({"outcome": "grade_error", "ended": "agent_timeout"}, Outcome.AGENT_TIMEOUT),
        ({"outcome": "grade_error"}, Outcome.GRADE_ERROR),
        ({"outcome": "stale_policy", "ended": "completed"}, Outcome.STALE_POLICY),
        ({"outcome": "completed", "ended": "completed"}, Outcome.COMPLETED),
    ],
)
def test_only_a_failure_of_the_grading_is_taken_back(polar: dict[str, str], outcome: Outcome) -> None:
    assert revive.ended(polar) is outcome


def test_a_session_that_lost_a_record_is_masked_by_its_row_and_by_its_log(tmp_path: Path) -> None:
    hole = Hole(HoleKind.LENGTH_MISMATCH, "parser.0-0000", "1 log-prob for 2 ids")
    masked = lost(tmp_path, calls=[(of_session("parser.0", call(0, [1, 2], [3, 4], holes=(hole,))), None)])
    assert masked.row["polar"]["complete"] is False
    with pytest.raises(CaptureError, match="it has holes"):
        graded(masked)

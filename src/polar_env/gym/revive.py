"""A masked row made again with its tokens, once a verdict lets it train. Blocks: it reads the session's durable log.

A row that is masked holds a placeholder (``gym.rows``), so a new reward alone cannot train it. What was sampled is in
the session's log, bit for bit, and what was graded, how the harness exited and how long it all took is in the row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import TrajectoryConfig
from polar_env.errors import CaptureError, ConfigError, boundary
from polar_env.gym import rows
from polar_env.segment_log import SessionLog, read
from polar_env.trajectory import build
from polar_env.types import Outcome, RewardDecision
from polar_env.verdict import Verdict

Row = Mapping[str, Any]

TOLD = ("policy_age", "policy_age_mean", "policy_stale")
"""What no log holds: how old a version was is what the trainer had said by then."""


def ended(polar: Row) -> Outcome:
    """How the agent of a row ended: where only the grading failed (``grade_error``), what it was before that.

    Raises ValueError, KeyError: it is no row's ``polar``.
    """
    outcome = Outcome(polar["outcome"])
    return Outcome(polar.get("ended", outcome)) if outcome is Outcome.GRADE_ERROR else outcome


def revived(row: Row, outcome: Outcome, verdict: Verdict, decision: RewardDecision, sessions: Path) -> dict[str, Any]:
    """``row`` with the tokens of its session, this verdict and this reward.

    Args:
        row: one that was masked.
        outcome: ``ended`` of it.
        sessions: ``store.sessions``.

    Raises:
        CaptureError: the log is not there, or is not all of the session: what it holds must not be trained on.
        ConfigError: the row is not as polar_env writes them.
    """
    with boundary(ConfigError, "reading the row to make it again"):
        polar = row["polar"]
        policy = TrajectoryConfig(**polar["trajectory"])
        log = _whole(sessions, str(polar["session_id"]), row["num_model_calls"])
        detail = "" if outcome is not Outcome(polar["outcome"]) else polar["detail"]
        trajectory = build(log.ledger, policy)
        result = rows.result_of(row, outcome, detail, verdict, decision, log.ledger, trajectory)
        made = rows.row(
            result,
            row["responses_create_params"],
            model=row["response"]["model"],
            max_tokens=policy.max_tokens,
            include_trajectories=bool(row["trajectories"]),
        )
        return made | {key: row[key] for key in TOLD}


def _whole(sessions: Path, name: str, calls: float) -> SessionLog:
    """The log of all that the row's session recorded, ``calls`` of them."""
    directory = sessions / name
    if not name or Path(name).name != name or not directory.is_dir():
        raise CaptureError(
            f"the row is masked and holds no tokens, and the log of its session {name!r} is not in {sessions}: it can "
            "be graded again where store.sessions has that log"
        )
    log = read(directory)
    wrong = [*log.damage, *(() if log.sealed else ("it was never sealed",))]
    if not log.ledger.complete:
        wrong.append("it has holes")
    if len(log.ledger.records) != calls:
        wrong.append(f"it holds {len(log.ledger.records)} calls of {calls:g}")
    if wrong:
        raise CaptureError(f"the log in {directory} cannot be trained on ({'; '.join(wrong)}): the row stays masked")
    return log

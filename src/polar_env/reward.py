"""The one table: how a rollout ended, what the grader found and noticed, and whether the capture is whole -> reward.
Pure.

No infrastructure failure is ever a reward of 0 that trains: it is masked and carries its reason.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, Protocol

from polar_env.types import INFRASTRUCTURE, Outcome, RewardDecision
from polar_env.verdict import GRAIN, Flag, Verdict, VerdictStatus

Worth = Literal["zero", "mask", "report"]
"""What a flag does to a rollout: reward 0, masked, or only told on the row."""


class Policy(Protocol):
    """The part of ``config.RewardConfig`` that ``decide`` reads."""

    @property
    def train_timeouts(self) -> bool: ...
    @property
    def flags(self) -> Mapping[Flag, Worth]: ...


class Ending(StrEnum):
    """What an outcome says about the policy."""

    FINISHED = "finished"
    """The agent ended by itself: graded and trained."""
    UNFINISHED = "unfinished"
    """The agent exhausted a budget it was given, or broke: graded, trained if ``train_timeouts``."""
    INFRASTRUCTURE = "infrastructure"
    """Not the policy's doing: masked."""


ENDINGS: Mapping[Outcome, Ending] = {
    Outcome.COMPLETED: Ending.FINISHED,
    Outcome.AGENT_ERROR: Ending.UNFINISHED,
    Outcome.AGENT_TIMEOUT: Ending.UNFINISHED,
    Outcome.TURN_LIMIT: Ending.UNFINISHED,
    Outcome.CONTEXT_OVERFLOW: Ending.UNFINISHED,
    Outcome.GROUP_TIMEOUT: Ending.UNFINISHED,
    **dict.fromkeys(INFRASTRUCTURE, Ending.INFRASTRUCTURE),
}

REWARDS: Mapping[VerdictStatus, float | None] = {
    VerdictStatus.RESOLVED: 1.0,
    VerdictStatus.UNRESOLVED: 0.0,
    VerdictStatus.EMPTY_PATCH: 0.0,
    VerdictStatus.PATCH_FAILED: 0.0,
    VerdictStatus.TESTS_TIMED_OUT: 0.0,
    VerdictStatus.REFUSED: 0.0,
    VerdictStatus.ERROR: None,
}
"""Reward of a finding without a score; ``None``: the grader failed, so nothing is known."""


FLAGS: Mapping[Flag, Worth] = {
    Flag.TEST_HOOKS: "zero",
    Flag.GIT_FILES: "zero",
    Flag.OUTSIDE: "zero",
    Flag.OVERSIZED: "zero",
    Flag.LOG_MARKERS: "report",
    Flag.TESTS_EDITED: "report",
    Flag.BUILD_FILES: "report",
    Flag.NESTED_REPOSITORY: "report",
    Flag.ENVIRONMENT: "zero",
    Flag.LEFT_RUNNING: "zero",
    Flag.PLANTED: "zero",
    Flag.CONFLICTING: "zero",
    Flag.FORCED_PASS: "zero",
    Flag.UNSTABLE: "zero",
    Flag.UNPROVEN: "report",
    Flag.EGRESS: "report",
}
"""What each flag is worth unless ``reward.flags`` says otherwise. Reported are what honest work does too, and what was
made harmless; none of 1,348 gold patches raises one that costs anything (test_patch.py)."""


def decide(outcome: Outcome, verdict: Verdict | None, complete: bool, config: Policy) -> RewardDecision:
    """The reward of a rollout, and whether it may train. A masked rollout has reward 0.0 whatever was found: trainers
    that average over masked rows see one value (the finding stays in the verdict).

    Args:
        outcome: how the rollout ended.
        verdict: the grader's finding; ``None`` when nothing was graded.
        complete: ``SealedLedger.complete``: every call was captured exactly.
        config: ``config.RewardConfig``.
    """
    reason = _masked_because(outcome, verdict, complete, config)
    if reason or verdict is None:
        return RewardDecision(reward=0.0, masked=True, reason=reason)
    return RewardDecision(reward=_reward(verdict, config), masked=False)


def _reward(verdict: Verdict, config: Policy) -> float:
    if any(_worth(flag, config) == "zero" for flag in verdict.flags):
        return 0.0
    if verdict.status is VerdictStatus.REFUSED and verdict.flags:  # every reason to refuse it was made a mere report
        return float(verdict.official)
    if verdict.score is not None and verdict.status in (VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED):
        return round(min(max(verdict.score, 0.0), 1.0) * GRAIN) / GRAIN
    return REWARDS[verdict.status] or 0.0


def _worth(flag: Flag, config: Policy) -> Worth:
    return config.flags.get(flag, FLAGS[flag])


def _masked_because(outcome: Outcome, verdict: Verdict | None, complete: bool, config: Policy) -> str:
    """Why the rollout must not train; empty when it may. The first reason that holds is told."""
    ending = ENDINGS[outcome]
    if ending is Ending.INFRASTRUCTURE:
        return f"infrastructure: {outcome}"
    if not complete:
        return "the capture is incomplete"
    if verdict is None:
        return "nothing was graded"
    if REWARDS[verdict.status] is None:
        return f"the grader failed: {verdict.detail}".rstrip(": ")
    if flagged := [flag.value for flag in verdict.flags if _worth(flag, config) == "mask"]:
        return f"flagged: {', '.join(flagged)}"
    if ending is Ending.UNFINISHED and not config.train_timeouts:
        return f"train_timeouts is off: {outcome}"
    return ""

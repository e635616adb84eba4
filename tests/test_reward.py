"""The whole table: every outcome, finding, capture state and policy."""

import itertools

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.config import RewardConfig
from polar_env.reward import ENDINGS, FLAGS, REWARDS, Ending, Worth, decide
from polar_env.types import INFRASTRUCTURE, Outcome, RewardDecision
from polar_env.verdict import GRAIN, Flag, Verdict, VerdictStatus

PRODUCT = list(itertools.product(Outcome, (None, *VerdictStatus), (True, False), (True, False)))


def judged(outcome: Outcome, status: VerdictStatus | None, complete: bool, train_timeouts: bool) -> RewardDecision:
    verdict = None if status is None else Verdict(status, detail="worker died")
    return decide(outcome, verdict, complete, RewardConfig(train_timeouts=train_timeouts))


def test_the_table_knows_every_outcome_and_every_finding() -> None:
    assert set(ENDINGS) == set(Outcome)
    assert set(REWARDS) == set(VerdictStatus)
    assert {outcome for outcome, ending in ENDINGS.items() if ending is Ending.INFRASTRUCTURE} == INFRASTRUCTURE


@pytest.mark.parametrize(("outcome", "status", "complete", "train_timeouts"), PRODUCT)
def test_only_a_graded_and_whole_rollout_of_the_agents_own_doing_trains(
    outcome: Outcome, status: VerdictStatus | None, complete: bool, train_timeouts: bool
) -> None:
    decision = judged(outcome, status, complete, train_timeouts)
    by_the_agent = outcome is Outcome.COMPLETED or (
        train_timeouts
        and outcome
        in {
            Outcome.AGENT_ERROR,
            Outcome.AGENT_TIMEOUT,
            Outcome.TURN_LIMIT,
            Outcome.CONTEXT_OVERFLOW,
            Outcome.GROUP_TIMEOUT,
        }
    )
    trains = by_the_agent and complete and status not in (None, VerdictStatus.ERROR)
    assert decision.masked is not trains
    assert bool(decision.reason) is decision.masked
    assert decision.reward == (1.0 if trains and status is VerdictStatus.RESOLVED else 0.0)


@pytest.mark.parametrize("outcome", sorted(INFRASTRUCTURE))
def test_no_infrastructure_failure_is_a_zero_that_trains(outcome: Outcome) -> None:
    decision = judged(outcome, VerdictStatus.UNRESOLVED, True, True)
    assert (decision.masked, decision.reason) == (True, f"infrastructure: {outcome}")


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (judged(Outcome.COMPLETED, VerdictStatus.RESOLVED, False, True), "the capture is incomplete"),
        (judged(Outcome.COMPLETED, None, True, True), "nothing was graded"),
        (judged(Outcome.COMPLETED, VerdictStatus.ERROR, True, True), "the grader failed: worker died"),
        (judged(Outcome.AGENT_TIMEOUT, VerdictStatus.RESOLVED, True, False), "train_timeouts is off: agent_timeout"),
    ],
)
def test_a_masked_rollout_says_why(decision: RewardDecision, reason: str) -> None:
    assert decision == RewardDecision(0.0, True, reason)


# --- rewards in between -----------------------------------------------------------------------------------------


def scored(score: float, status: VerdictStatus = VerdictStatus.UNRESOLVED, *flags: Flag) -> RewardDecision:
    return decide(Outcome.COMPLETED, Verdict(status, score=score, flags=flags), True, RewardConfig())


@given(st.floats(0.0, 1.0))
def test_a_score_is_the_reward_to_the_grain_and_its_ends_are_exact(score: float) -> None:
    reward = scored(score).reward
    assert abs(reward - score) <= 0.5 / GRAIN
    assert (reward * GRAIN).is_integer()
    assert (scored(0.0).reward, scored(1.0).reward) == (0.0, 1.0)


@given(st.floats(0.0, 1.0), st.integers(2, 256))
def test_a_group_that_scored_alike_has_no_spread_in_single_precision(score: float, size: int) -> None:
    """NeMo-RL's own arithmetic: sums of rewards and of squares, each leaving one out, in float32."""
    rewards = numpy.full(size, scored(score).reward, dtype=numpy.float32)
    others = 1 - numpy.eye(size, dtype=numpy.float32)
    count = numpy.float32(size - 1)
    mean, square = others @ rewards / count, others @ (rewards * rewards) / count
    assert (mean == rewards).all()
    assert (square == mean * mean).all()


@pytest.mark.parametrize("status", sorted(set(VerdictStatus) - {VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED}))
def test_a_score_of_what_was_not_graded_is_nothing(status: VerdictStatus) -> None:
    assert scored(1.0, status).reward == 0.0


def test_a_costly_flag_takes_the_score_too() -> None:
    assert scored(0.75, VerdictStatus.UNRESOLVED, Flag.FORCED_PASS) == RewardDecision(0.0, False)


# --- flags ------------------------------------------------------------------------------------------------------


def flagged(status: VerdictStatus, *flags: Flag, official: bool = True, **worth: Worth) -> RewardDecision:
    policy = RewardConfig(flags={Flag(name): value for name, value in worth.items()})
    return decide(Outcome.COMPLETED, Verdict(status, flags=flags, official=official), True, policy)


def test_every_flag_has_a_worth() -> None:
    assert set(FLAGS) == set(Flag)


@pytest.mark.parametrize("flag", list(Flag))
def test_a_flag_zeroes_masks_or_is_only_told(flag: Flag) -> None:
    name = flag.value
    assert flagged(VerdictStatus.RESOLVED, flag).reward == (1.0 if FLAGS[flag] == "report" else 0.0)
    assert flagged(VerdictStatus.RESOLVED, flag, **{name: "zero"}) == RewardDecision(0.0, False)
    assert flagged(VerdictStatus.RESOLVED, flag, **{name: "mask"}) == RewardDecision(0.0, True, f"flagged: {name}")
    assert flagged(VerdictStatus.RESOLVED, flag, **{name: "report"}) == RewardDecision(1.0, False)
    assert flagged(VerdictStatus.UNRESOLVED, flag, official=False, **{name: "report"}) == RewardDecision(0.0, False)


def test_a_refusal_that_is_only_told_falls_back_on_the_official_report() -> None:
    """What could not be run at all has no official report, so its reward stays 0."""
    assert flagged(VerdictStatus.REFUSED, Flag.FORCED_PASS, forced_pass="report").reward == 1.0
    assert flagged(VerdictStatus.REFUSED, Flag.OUTSIDE, official=False, outside="report").reward == 0.0


def test_one_costly_flag_is_enough() -> None:
    assert flagged(VerdictStatus.RESOLVED, Flag.BUILD_FILES, Flag.FORCED_PASS).reward == 0.0
    assert flagged(VerdictStatus.RESOLVED, Flag.BUILD_FILES, Flag.FORCED_PASS, build_files="mask").masked

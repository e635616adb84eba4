"""The whole table: every outcome, finding, capture state and policy."""

import itertools

import pytest

from polar_env.config import RewardConfig
from polar_env.reward import ENDINGS, REWARDS, Ending, decide
from polar_env.types import INFRASTRUCTURE, Outcome, RewardDecision, Verdict, VerdictStatus

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
        and outcome in {Outcome.AGENT_ERROR, Outcome.AGENT_TIMEOUT, Outcome.TURN_LIMIT, Outcome.CONTEXT_OVERFLOW}
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

"""What Prometheus is told of finished rollouts: every hole, drift, retry and flag, read off the rows themselves."""

import asyncio
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from gym_helpers import PARAMS
from polar_env.gym.metrics import Metrics
from polar_env.gym.rows import row
from polar_env.types import Hole, HoleKind, Outcome, RolloutResult
from polar_env.verdict import Flag, VerdictStatus
from trajectory_helpers import Conversation, ledger, rollout


def scraped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, sorted label values …) -> value, as a scraper reads the page."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def observed(*results: RolloutResult) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    for result in results:
        metrics.observe(row(result, PARAMS, model="policy", max_tokens=None))
    return scraped(metrics)


def session():
    talk = Conversation()
    talk.turn([1, 2], [3, 4], call_id="look")
    talk.turn([5, 6], [7, 8], call_id="edit")
    return ledger(*talk.records)


def test_rollouts_are_counted_by_how_they_ended():
    seen = observed(
        rollout(session()),
        rollout(session(), status=VerdictStatus.UNRESOLVED),
        rollout(session(), Outcome.SANDBOX_ERROR, None, detail="no sandbox"),
    )
    assert seen["polar_rollouts_total", "claude_code", "completed", "true"] == 2
    assert seen["polar_rollouts_total", "claude_code", "false", "sandbox_error"] == 1
    assert seen["polar_rollouts_resolved_total", "claude_code"] == 1
    assert seen["polar_failures_total", "polar_env:sandbox_error"] == 1
    assert seen["polar_model_calls_total", "claude_code"] == 6


def test_tokens_that_do_not_reach_a_row_are_the_gap_between_two_counters():
    seen = observed(rollout(session()), rollout(session(), Outcome.SANDBOX_ERROR, None))
    assert (seen["polar_tokens_total", "sampled"], seen["polar_tokens_total", "trainable"]) == (8, 4)


def test_holes_flags_and_calls_left_out_are_counted_by_kind():
    holed = replace(session(), holes=(Hole(HoleKind.LOST_RECORD, "look", "disk full"),))
    flagged = rollout(session())
    assert flagged.verdict is not None
    flag = next(iter(Flag))
    flagged = replace(flagged, verdict=replace(flagged.verdict, flags=(flag,)))
    undelivered = replace(session(), delivered=frozenset({"edit"}))
    seen = observed(rollout(holed), flagged, rollout(undelivered))
    assert seen["polar_holes_total", "lost_record"] == 1
    assert seen["polar_flags_total", flag.value] == 1
    assert seen["polar_calls_left_out_total", "undelivered"] == 1
    assert seen["polar_calls_left_out_total", "hole"] == 1


def test_joins_and_phases_have_a_series_each():
    seen = observed(rollout(session()))
    assert seen["polar_joins_total", "exact"] == 1
    assert seen["polar_phase_seconds_sum", "agent"] == 12.5
    assert seen["polar_phase_seconds_bucket", "10.0", "agent"] == 0
    assert seen["polar_phase_seconds_bucket", "30.0", "agent"] == 1


def test_the_age_of_what_is_delivered_is_a_histogram_and_too_old_a_counter():
    old = replace(rollout(session()), ages={record.policy_version: 3 for record in session().records}, stale="too old")
    unplayed = replace(rollout(ledger(), Outcome.SANDBOX_ERROR, None))
    seen = observed(rollout(session()), old, unplayed)
    assert seen["polar_policy_age_updates_count",] == 2, "what sampled nothing has no age"
    assert seen["polar_policy_age_updates_bucket", "0.0"] == 1
    assert seen["polar_policy_age_updates_sum",] == 3.0
    assert seen["polar_stale_rollouts_total", "claude_code"] == 1


def test_a_row_that_never_began_counts_as_well():
    metrics = Metrics()
    metrics.observe({"mask_sample": True, "failure_kind": "polar_env:cancelled"})
    assert scraped(metrics)["polar_failures_total", "polar_env:cancelled"] == 1


async def test_rows_in_flight_go_up_and_down_whatever_happens():
    metrics = Metrics()
    posted = asyncio.Event()

    async def post() -> None:
        with metrics.running():
            posted.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        posting = group.create_task(post())
        await posted.wait()
        assert scraped(metrics)["polar_rollouts_in_flight",] == 1
        posting.cancel()
    assert scraped(metrics)["polar_rollouts_in_flight",] == 0

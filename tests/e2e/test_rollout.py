"""Whole rollouts in real sandboxes: how each ending is named, masked and delivered, and that nothing is left behind."""

import asyncio
from pathlib import Path

import pytest

from engine_helpers import Answer, VllmServer
from polar_env.capture import rebuild
from polar_env.gym import contract, rows
from polar_env.proxy.server import ProxyServer
from polar_env.rollout import make_engine, open_proxy, rollout
from polar_env.types import HoleKind, Outcome, RolloutResult, VerdictStatus
from rollout_helpers import AGENT, job, left_running, python, roll, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def real_engine(server: VllmServer) -> dict:
    return {"kind": "vllm", "base_urls": [server.url], "model": server.model}


def delivered(result: RolloutResult) -> dict:
    """The row NeMo-RL would get, judged."""
    row = rows.row(result, {"input": "x"}, model="policy", max_tokens=None)
    assert contract.violations(row) == []
    return row


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert left_running() == []


async def test_a_policy_that_fixes_the_bug_earns_the_grader_s_one(tmp_path: Path):
    result = await roll(await settings(tmp_path))
    assert (result.outcome, result.verdict.status) == (Outcome.COMPLETED, VerdictStatus.RESOLVED)
    assert (result.decision.reward, result.decision.masked) == (1.0, False)
    row = delivered(result)
    assert row["trainable_tokens"] == result.trajectory.sampled_tokens > 0
    assert len(result.trajectory.chains) == 1


async def test_what_was_delivered_can_be_rebuilt_from_the_durable_log(tmp_path: Path):
    result = await roll(await settings(tmp_path))
    assert rebuild(tmp_path / result.ledger.session_id) == result.ledger


@pytest.mark.parametrize("script", ["give_up", "half"])
async def test_a_policy_that_does_not_fix_it_earns_a_zero_that_trains(tmp_path: Path, script: str):
    result = await roll(await settings(tmp_path, engine={"scripts": [script]}))
    assert result.outcome is Outcome.COMPLETED
    assert (result.decision.reward, result.decision.masked) == (0.0, False)
    wanted = VerdictStatus.EMPTY_PATCH if script == "give_up" else VerdictStatus.UNRESOLVED
    assert result.verdict.status is wanted
    assert delivered(result)["mask_sample"] is False


async def test_a_harness_that_exits_non_zero_after_work_is_an_agent_error_and_still_graded(tmp_path: Path):
    crash = AGENT.replace('print(reply.get("content") or "")', "sys.exit(7)")
    result = await roll(await settings(tmp_path, harness={"command": python(crash)}))
    assert result.outcome is Outcome.AGENT_ERROR
    assert result.exit.code == 7
    assert (result.verdict.status, result.decision.masked) == (VerdictStatus.RESOLVED, False)
    delivered(result)


async def test_a_harness_that_hangs_is_stopped_at_its_deadline_and_its_calls_are_delivered(tmp_path: Path):
    hang = AGENT.replace('print(reply.get("content") or "")', "import threading; threading.Event().wait()")
    result = await roll(await settings(tmp_path, harness={"command": python(hang)}, budget={"agent": 12.0}))
    assert result.outcome is Outcome.AGENT_TIMEOUT
    assert result.exit.timed_out
    assert result.trajectory.sampled_tokens > 0
    assert delivered(result)["trainable_tokens"] == result.trajectory.sampled_tokens


async def test_a_harness_that_never_calls_the_model_is_masked_never_a_zero(tmp_path: Path):
    result = await roll(await settings(tmp_path, harness={"command": ("true",)}))
    assert result.outcome is Outcome.NO_CALLS
    assert result.decision.masked
    row = delivered(result)
    assert row["mask_sample"] is True
    assert row["instance_config"]["mask_sample"] is True


async def test_a_wrong_session_key_is_refused_and_nothing_is_generated(tmp_path: Path):
    stranger = AGENT.replace('os.environ["POLAR_API_KEY"]', '"not-a-key"')
    result = await roll(await settings(tmp_path, harness={"command": python(stranger)}))
    assert result.outcome is Outcome.NO_CALLS
    assert result.ledger.records == ()
    assert "401" in result.detail
    assert delivered(result)["mask_sample"] is True


async def test_a_policy_that_never_stops_meets_the_call_limit(tmp_path: Path):
    config = await settings(tmp_path, engine={"scripts": ["loop"]}, proxy={"max_calls": 3})
    result = await roll(config)
    assert result.outcome is Outcome.TURN_LIMIT
    assert len(result.ledger.records) == 3
    assert result.decision.masked is False
    delivered(result)


@pytest.mark.parametrize("fault", ["die", "garbage", "eof", "reset", "gateway"])
async def test_a_broken_engine_is_infrastructure_masked_with_its_reason(tmp_path: Path, fault: str):
    async with VllmServer(fault=fault).run() as engine:
        config = await settings(tmp_path, engine=real_engine(engine))
        async with ProxyServer(make_engine(config), config.proxy) as proxy:
            result = await rollout(job(config), proxy, config)
    assert result.outcome is Outcome.ENGINE_ERROR
    assert result.decision.masked
    assert result.ledger.records == ()
    assert delivered(result)["failure_reason"]


async def test_an_engine_that_gives_no_ids_makes_a_hole_that_masks_and_the_harness_never_notices(tmp_path: Path):
    async with VllmServer(answer=Answer(with_ids=False)).run() as engine:
        config = await settings(tmp_path, engine=real_engine(engine), proxy={"max_calls": 2})
        async with ProxyServer(make_engine(config), config.proxy) as proxy:
            result = await rollout(job(config), proxy, config)
    assert len(result.ledger.records) == 2
    assert {hole.kind for hole in result.ledger.holes} >= {HoleKind.MISSING_IDS}
    assert result.decision.masked
    assert delivered(result)["mask_sample"] is True


async def test_a_cancelled_rollout_leaves_nothing_running(tmp_path: Path):
    hang = "import threading; print('up', flush=True); threading.Event().wait()"
    config = await settings(tmp_path, harness={"command": python(hang)})
    async with open_proxy(config) as proxy:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(rollout(job(config), proxy, config))
            await asyncio.wait([running], timeout=8.0)
            running.cancel()
        assert running.cancelled()


async def test_rollouts_of_a_group_start_from_the_same_first_prompt(tmp_path: Path):
    config = await settings(tmp_path, engine={"scripts": ["fix", "give_up"]})
    async with open_proxy(config) as proxy, asyncio.TaskGroup() as group:
        runs = [group.create_task(rollout(job(config, index), proxy, config)) for index in range(4)]
    results = [run.result() for run in runs]
    assert contract.group_disagreements([delivered(result) for result in results]) == []
    assert [result.decision.reward for result in results] == [1.0, 0.0, 1.0, 0.0]

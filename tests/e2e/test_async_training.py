"""Asynchronous training with an agent in its sandbox: weights that age under it, siblings that do not wait for it."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gym_helpers import PARAMS
from polar_env.engine import Session
from polar_env.engine.scripted import ScriptedEngine
from polar_env.engine.scripts import Scene, Turn
from polar_env.gym import contract
from polar_env.gym.environment import PolarEnvironment
from polar_env.proxy.server import ProxyServer
from polar_env.rollout import rollout
from polar_env.tasks import rows as task_rows
from polar_env.types import Delta, EngineReply, ModelRequest, Outcome, RolloutResult, Sampling
from rollout_helpers import below_us, delivered, job, settings, settled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Trained(ScriptedEngine):
    """The scripted engine under a trainer that is at step-4 when the third turn is asked for."""

    proxy: ProxyServer
    asked = 0

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        self.asked += 1
        if self.asked == 3:
            self.proxy.fence.declare("step-4")
        async for item in super().generate(request, sampling, session):
            yield item


async def aged(tmp_path: Path, policy: str) -> RolloutResult:
    """A rollout that began on step-1; two updates may pass before it is too old."""
    config = await settings(tmp_path, engine={"max_policy_age": 2, "stale_rollouts": policy})
    engine = Trained(config.engine)
    async with ProxyServer(engine, config.proxy, updates=config.engine) as proxy:
        engine.proxy = proxy
        proxy.fence.declare("step-1")
        return await rollout(job(config), proxy, config)


@pytest.mark.parametrize(("policy", "calls"), [("end", 2), ("mask", 3)])
async def test_a_rollout_that_got_too_old_is_masked_and_not_graded(tmp_path: Path, policy: str, calls: int):
    """``end`` does not wait for the agent: the third call was never answered."""
    before = below_us()
    result = await aged(tmp_path, policy)
    assert (result.outcome, result.verdict) == (Outcome.STALE_POLICY, None), result.detail
    assert "step-1 is 3 updates behind step-4: engine.max_policy_age is 2" in result.detail
    assert (len(result.ledger.records) == calls) if policy == "end" else len(result.ledger.records) >= calls
    row = delivered(result)
    assert (row["mask_sample"], row["failure_kind"]) == (True, "polar_env:stale_policy")
    assert (row["policy_age"], row["policy_stale"], row["ended_early"]) == (3.0, 1.0, 1.0)
    assert settled(known=before) == []


def sleep(scene: Scene) -> Turn:
    """A policy that waits for something that never comes (`test_async_training:sleep`)."""
    return Turn("", (scene.shell("sleep 1000"),))


async def test_the_last_of_a_group_ends_when_it_has_had_its_time_and_what_stands_is_graded(tmp_path: Path):
    stragglers = {"after_fraction": 0.5, "group_size": 2, "patience": 0.1, "min_seconds": 0.5, "then": "grade"}
    scripts = ["fix", f"{__name__}:sleep"]
    config = await settings(tmp_path, engine={"scripts": scripts}, stragglers=stragglers, concurrency=2)
    before = below_us()
    async with PolarEnvironment(config).opened() as environment, asyncio.TaskGroup() as group:
        posts = [group.create_task(environment.run(posted(index))) for index in range(2)]
        quick, slow = [await post for post in posts]
        assert settled(known=before) == []
    assert [contract.violations(answer) for answer in (quick, slow)] == [[], []]
    assert (quick["reward"], quick["polar"]["outcome"]) == (1.0, "completed"), quick["polar"]["detail"]
    assert slow["polar"]["outcome"] == "group_timeout", slow["polar"]["detail"]
    assert "1 of its group of 2 had finished" in slow["failure_reason"]
    assert (slow["reward"], slow["mask_sample"], slow["polar"]["verdict"]["status"]) == (0.0, False, "empty_patch")
    assert slow["trainable_tokens"] > 0


def posted(index: int) -> dict[str, Any]:
    task = task_rows.load("embedded")[0].task_id
    return {"task_id": task, "_ng_task_index": 0, "_ng_rollout_index": index, "responses_create_params": PARAMS}

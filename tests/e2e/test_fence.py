"""A trainer changes weights while an agent works in its sandbox: the agent waits, its budget does not, rows say it."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fence_helpers import until
from polar_env.config import EngineConfig
from polar_env.engine import Session
from polar_env.engine.scripted import ScriptedEngine
from polar_env.proxy.server import ProxyServer
from polar_env.rollout import rollout
from polar_env.types import Delta, EngineReply, ModelRequest, Outcome, Sampling, VerdictStatus
from rollout_helpers import delivered, job, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BUDGET = 8.0


class Sampled(ScriptedEngine):
    """The scripted engine, which says when it has sampled its second turn."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.count = 0
        self.second = asyncio.Event()

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        async for item in super().generate(request, sampling, session):
            self.count += isinstance(item, EngineReply)
            if self.count == 2:
                self.second.set()
            yield item


async def test_an_agent_that_waits_for_new_weights_longer_than_its_budget_finishes_and_its_row_tells_both(
    tmp_path: Path,
):
    config = await settings(tmp_path, budget={"agent": BUDGET})
    engine = Sampled(config.engine)
    async with ProxyServer(engine, config.proxy) as proxy, asyncio.TaskGroup() as group:
        proxy.fence.declare("step-1")
        running = group.create_task(rollout(job(config), proxy, config))
        await asyncio.wait_for(engine.second.wait(), 60)
        await proxy.fence.pause()
        await until(proxy.fence, held=1)  # the agent is at its command, and calls when it has ended
        await asyncio.sleep(BUDGET)
        proxy.fence.resume("step-2")
        result = await running
    assert (result.outcome, result.verdict.status) == (Outcome.COMPLETED, VerdictStatus.RESOLVED)
    versions = [record.policy_version for record in result.ledger.records]
    assert versions == ["step-1"] * 2 + ["step-2"] * (len(versions) - 2)
    assert len(versions) > 2
    assert BUDGET <= result.seconds["held"] < result.seconds["agent"]
    assert result.seconds["agent"] - result.seconds["held"] < BUDGET
    row = delivered(result)
    assert row["mask_sample"] is False
    assert row["seconds_held"] == pytest.approx(result.seconds["held"], abs=1e-5)
    assert (row["num_policy_versions"], row["num_calls_across_versions"]) == (2.0, 0.0)
    assert (row["polar"]["policy_version_first"], row["polar"]["policy_version_last"]) == ("step-1", "step-2")
    assert row["trajectories"][0]["call_versions"] == versions

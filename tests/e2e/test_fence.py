"""A trainer changes weights while an agent works in its sandbox: the agent waits, and its row says it."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from nemo_gym.sandbox import register_provider
from nemo_gym.sandbox.providers.registry import _PROVIDER_REGISTRY

from fence_helpers import until
from polar_env.config import BudgetConfig, EngineConfig, HarnessConfig, PolarConfig, SandboxConfig
from polar_env.engine import Session
from polar_env.engine.scripted import ScriptedEngine
from polar_env.named import make_harness
from polar_env.proxy.server import ProxyServer
from polar_env.rollout import _play, rollout
from polar_env.sandbox import Box
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import Prepared
from polar_env.types import Delta, EngineReply, ModelRequest, Outcome, Sampling
from polar_env.verdict import VerdictStatus
from proxy_helpers import PlayedEngine, stage
from rollout_helpers import delivered, job, settings
from sandbox_helpers import PlainProvider, box_of, until_running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HELD = 1.0


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


async def test_an_agent_waits_for_new_weights_and_its_row_tells_how_long_and_which_sampled_what(tmp_path: Path):
    config = await settings(tmp_path, budget={"agent": 120.0})
    engine = Sampled(config.engine)
    async with ProxyServer(engine, config.proxy) as proxy, asyncio.TaskGroup() as group:
        proxy.fence.declare("step-1")
        running = group.create_task(rollout(job(config), proxy, config))
        second = group.create_task(engine.second.wait())
        await asyncio.wait((second, running), return_when=asyncio.FIRST_COMPLETED)
        assert second.done(), running.result().detail
        await proxy.fence.pause()
        await until(proxy.fence, held=1)  # the agent is at its command, and calls when it has ended
        await asyncio.sleep(HELD)
        proxy.fence.resume("step-2")
        result = await running
    assert (result.outcome, result.verdict.status) == (Outcome.COMPLETED, VerdictStatus.RESOLVED)
    versions = [record.policy_version for record in result.ledger.records]
    assert versions == ["step-1"] * 2 + ["step-2"] * (len(versions) - 2)
    assert len(versions) > 2
    assert HELD <= result.seconds["held"] < result.seconds["agent"]
    row = delivered(result)
    assert row["mask_sample"] is False
    assert row["seconds_held"] == pytest.approx(result.seconds["held"], abs=1e-5)
    assert (row["num_policy_versions"], row["num_calls_across_versions"]) == (2.0, 0.0)
    assert (row["polar"]["policy_version_first"], row["polar"]["policy_version_last"]) == ("step-1", "step-2")
    assert row["trajectories"][0]["call_versions"] == versions


async def test_an_agent_s_budget_ends_when_it_and_the_time_at_the_fence_are_over(tmp_path: Path):
    config = PolarConfig(harness=HarnessConfig(name="shell", command=("sleep", "100")), budget=BudgetConfig(agent=0.5))
    async with stage(PlayedEngine()) as here, open_sandbox(box_of(tmp_path), config.sandbox) as sandbox:
        await here.proxy.fence.pause()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(here.ask("hi"))
            await until(here.proxy.fence, held=1)
            harness = make_harness(config.harness)
            one = job(config)
            prepared = Prepared(one.task, base_commit="", repo=tmp_path, env=None, git_dir=None)
            playing = group.create_task(_play(one, harness, here.session, sandbox, config, prepared))
            await asyncio.sleep(1.5)
            assert not playing.done()
            here.proxy.fence.resume()
            ending = await playing
        assert asking.result().status == 200
    assert (ending.timed_out, ending.code) == (True, None)
    assert 2.0 <= ending.seconds < 60.0


@pytest.fixture
def plain():
    register_provider("plain", PlainProvider)
    yield SandboxConfig(provider="plain")
    del _PROVIDER_REGISTRY["plain"]


async def test_what_a_kill_ended_has_no_exit_code_in_anybody_s_sandbox(plain: SandboxConfig):
    """So a budget that ends from outside is no failure of the sandbox."""
    async with open_sandbox(Box(workdir="/tmp"), plain) as sandbox, asyncio.TaskGroup() as group:
        running = group.create_task(
            sandbox.exec(["bash", "-c", "echo begun; exec -a a-sleeper sleep 100"], timeout=100.0)
        )
        await until_running("a-sleeper")
        await sandbox.kill()
        ended = await running
    assert (ended.code, ended.timed_out) == (None, False)

"""Three hundred rows posted at once, as NeMo-RL posts a step, and rows that wait far longer than their budgets."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from nemo_gym import server_utils
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig

from engine_helpers import VllmServer
from gym_helpers import PARAMS, Gated, Stage, configured, masked, row
from gym_server_helpers import agent, built, post, resources, serving
from polar_env.gym import contract
from polar_env.gym.environment import PolarEnvironment
from polar_env.types import Outcome
from rollout_helpers import python, settings

pytestmark = pytest.mark.e2e

ROWS, CONCURRENCY = 300, 8


@pytest.fixture
async def gym_client(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    """Gym's servers share one HTTP client of the process; here, of the test."""
    monkeypatch.setattr(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None)
    session = server_utils.set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    yield
    await session.close()


async def test_300_rows_posted_at_once_are_300_rollouts_and_300_valid_answers(
    gym_client: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Eight run, the others stand in the queue for a second and more, and none of them is played twice or lost."""
    stage = Stage()
    monkeypatch.setattr(Gated, "stage", stage, raising=False)
    async with VllmServer().run() as engine:
        config = configured(tmp_path, engine.url, concurrency=CONCURRENCY)
        server = resources(config.model_dump(mode="json"))
        async with serving(built(server)) as port, serving(built(agent(port))) as ours, asyncio.TaskGroup() as group:
            posted = [group.create_task(post(ours, "/run", row(index))) for index in range(ROWS)]
            await stage.until(CONCURRENCY)
            await asyncio.sleep(1.0)  # nothing happens: that is what is looked at
            assert stage.begun == CONCURRENCY
            stage.gate.set()
    answers = [json.loads(content) for status, content in (task.result() for task in posted) if status == 200]
    assert len(answers) == ROWS
    assert Counter("the test has no CLI" in masked(answer) for answer in answers) == {True: ROWS}
    assert stage.begun == ROWS
    sessions = [answer["polar"]["session_id"] for answer in answers]
    assert len(set(sessions)) == ROWS
    assert [session.rsplit(".", 1)[0] for session in sessions] == [f"polar-env__expiry-2.{i}" for i in range(ROWS)]
    assert sum(answer["seconds_queue"] > 0.9 for answer in answers) == ROWS - CONCURRENCY


async def test_a_row_that_waited_longer_than_its_whole_agent_budget_still_has_all_of_it(tmp_path: Path):
    busy = {"name": "shell", "command": python("import time; time.sleep(1.5); print('done')")}
    config = await settings(tmp_path, harness=busy, concurrency=1, budget={"agent": 4.0})
    async with PolarEnvironment(config).opened() as environment, asyncio.TaskGroup() as group:
        rows = [
            {"task_id": "polar-env__expiry-2", "_ng_rollout_index": i, "responses_create_params": PARAMS}
            for i in range(4)
        ]
        posted = [group.create_task(environment.run(row)) for row in rows]
    answers = sorted((task.result() for task in posted), key=lambda answer: answer["seconds_queue"])
    assert [contract.violations(answer) for answer in answers] == [[]] * 4
    assert answers[-1]["seconds_queue"] > 4.0
    outcomes = {answer["polar"]["outcome"] for answer in answers}
    assert len(outcomes) == 1
    assert outcomes != {Outcome.AGENT_TIMEOUT}
    assert all(answer["seconds_agent"] >= 1.5 for answer in answers)

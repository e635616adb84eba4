"""Whole rollouts on Harbor task folders: without any image, and in containers of a real Docker engine."""

import asyncio
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

from docker_helpers import NoDockerError, docker, docker_engine, import_image
from harbor_helpers import EXAMPLES, folder
from polar_env.config import PolarConfig
from polar_env.rollout import RolloutJob, open_proxy, rollout
from polar_env.tasks import Task, rows
from polar_env.types import Outcome, RolloutResult, Sampling
from polar_env.verdict import Flag, VerdictStatus
from rollout_helpers import AGENT, delivered, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMMAND = ("python3", "-c", AGENT, "{instruction_file}")
PYTHON = "polar-python:1"


async def play(config: PolarConfig, task: Task) -> list[RolloutResult]:
    """One rollout for each script, side by side."""
    every = range(len(config.engine.scripts))
    async with open_proxy(config) as proxy, asyncio.TaskGroup() as group:
        jobs = [RolloutJob(task, config.harness, Sampling(1.0, 1.0, None, 512), index) for index in every]
        running = [group.create_task(rollout(job, proxy, config)) for job in jobs]
    return [task.result() for task in running]


async def test_a_solution_earns_one_nothing_earns_nothing_and_a_planted_reward_earns_its_flag(tmp_path: Path) -> None:
    scripts = [f"harbor_helpers:{script}" for script in ("solves", "idles", "plants")]
    config = await settings(
        tmp_path, data=str(EXAMPLES), engine={"scripts": scripts}, harness={"command": COMMAND}
    )  # fmt: skip
    solved, idle, planted = await play(config, rows.load(config.data)[0])
    for result in (solved, idle, planted):
        assert (result.outcome, result.detail, result.decision.masked) == (Outcome.COMPLETED, "", False)
        assert result.trajectory.sampled_tokens > 0
    assert (solved.decision.reward, idle.decision.reward, planted.decision.reward) == (1.0, 0.0, 0.0)
    assert planted.verdict is not None
    assert planted.verdict.flags == (Flag.PLANTED,)
    assert b"counts.txt" in solved.patch
    row = delivered(planted)
    assert (row["reward"], list(row["polar"]["verdict"]["flags"])) == (0.0, ["planted"])


@pytest.fixture(scope="module")
def engine() -> Generator[Mapping[str, str]]:
    """An engine with an image that holds bash, coreutils and Python."""
    try:
        with docker_engine() as client:
            import_image(client, PYTHON, python=True)
            yield client
    except NoDockerError as error:
        pytest.skip(f"no Docker engine: {error}")


@pytest.fixture
def containers(engine: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Generator[Mapping[str, str]]:
    for name, value in engine.items():
        monkeypatch.setenv(name, value)
    yield engine
    assert docker(engine, "ps", "-aq").stdout == b"", "no container is left"


CONF = """#!/bin/bash
reward=0
[ "$(pwd)" = /srv/app ] && [ -f data.txt ] && grep -q level=3 /etc/app/conf && reward=1
echo "{\\"reward\\": $reward, \\"speed\\": 7}" > /logs/verifier/reward.json
"""


async def test_rollouts_in_containers_are_graded_by_what_they_left(
    tmp_path: Path, containers: Mapping[str, str]
) -> None:
    """The image is built from the folder's Dockerfile, the result lies outside the work tree, and no git is needed."""
    place = folder(
        tmp_path / "tune",
        "[environment]\nmemory_mb = 512\n",
        environment__Dockerfile=f"FROM {PYTHON}\nWORKDIR /srv/app\nCOPY data_txt data.txt\n",
        environment__data_txt="x\n",
        tests__test_sh=CONF,
        solution__solve_sh="#!/bin/bash\nmkdir -p /etc/app && echo level=3 > /etc/app/conf\n",
    )
    scripts = [f"harbor_helpers:{script}" for script in ("tunes", "shadows", "breaks")]
    config = await settings(
        tmp_path,
        data=str(place),
        engine={"scripts": scripts},
        harness={"command": COMMAND},
        sandbox={"provider": "docker"},
    )
    tuned, shadowed, broken = await play(config, rows.load(config.data)[0])
    for result in (tuned, shadowed):
        assert (result.outcome, result.detail, result.decision.masked) == (Outcome.COMPLETED, "", False)
        assert delivered(result)["reward"] == result.decision.reward
    assert (tuned.decision.reward, shadowed.decision.reward) == (1.0, 0.0)
    assert tuned.verdict is not None
    assert (tuned.verdict.status, tuned.verdict.flags) == (VerdictStatus.RESOLVED, ())
    assert shadowed.verdict is not None
    assert (shadowed.verdict.score, shadowed.verdict.flags) == (1.0, (Flag.ENVIRONMENT,))
    assert "it changed /usr/local/bin/bash" in shadowed.verdict.detail
    assert (broken.outcome, broken.decision.masked, broken.decision.reward) == (Outcome.AGENT_ERROR, False, 0.0)
    assert "the agent left a container in which nothing runs any more" in broken.detail
    assert broken.verdict is not None
    assert "what the agent left does not run" in broken.verdict.detail

"""Measuring a task while agents work: once, a few at a time, and never in a rollout's way."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from polar_env.config import SandboxConfig
from polar_env.errors import ConfigError
from polar_env.grade.prewarm import Prewarm
from polar_env.rollout import RolloutJob, open_proxy, rollout
from polar_env.tasks import Prepared, Task, rows
from polar_env.types import Outcome, Sampling
from polar_env.verdict import VerdictStatus
from prewarm_helpers import Told
from rollout_helpers import python, settings
from sandbox_helpers import config, until
from test_grade import GOLD, verdict
from test_grade import prepared as small  # noqa: F401 - a fixture


@pytest.fixture
def told() -> Iterator[type[Told]]:
    Told.events, Told.begun, Told.gates = [], asyncio.Event(), {}
    yield Told
    del Told.events, Told.begun, Told.gates


def prepared(name: str) -> Prepared:
    task = Task(name, "Fix it.", {}, grader="prewarm_helpers:Told")
    return Prepared(task, "x", repo=Path("/nowhere", name), env=None, git_dir=None)


async def settle() -> None:
    """Let everything go on that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_task_is_measured_once_however_many_rollouts_it_has(told: type[Told]) -> None:
    for _ in range(2):
        async with Prewarm(SandboxConfig()) as one, Prewarm(SandboxConfig()) as other:
            one.begin(prepared("a"))
            other.begin(prepared("a"))
            await settle()
    assert told.events == ["a begins", "a ends"]


async def test_no_more_tasks_at_a_time_than_are_allowed(told: type[Told]) -> None:
    told.gates = {name: asyncio.Event() for name in "abc"}
    two_at_once = SandboxConfig(prewarm=2)
    async with Prewarm(two_at_once) as one, Prewarm(two_at_once) as two, Prewarm(two_at_once) as three:
        one.begin(prepared("a"))
        two.begin(prepared("b"))
        three.begin(prepared("c"))
        await settle()
        assert told.events == ["a begins", "b begins"]
        told.gates["b"].set()
        await settle()
        assert told.events == ["a begins", "b begins", "b ends", "c begins"]


async def test_rollouts_that_wait_for_the_same_task_take_no_place(told: type[Told]) -> None:
    told.gates = {"a": asyncio.Event()}
    two_at_once = SandboxConfig(prewarm=2)
    async with Prewarm(two_at_once) as one, Prewarm(two_at_once) as two, Prewarm(two_at_once) as three:
        one.begin(prepared("a"))
        two.begin(prepared("a"))
        three.begin(prepared("b"))
        await settle()
        assert told.events == ["a begins", "b begins", "b ends"]


async def test_what_is_not_done_when_its_rollout_ends_is_given_up_and_the_next_one_goes_on(told: type[Told]) -> None:
    told.gates = {"a": asyncio.Event()}
    async with Prewarm(SandboxConfig()) as other:
        async with Prewarm(SandboxConfig()) as one:
            one.begin(prepared("a"))
            other.begin(prepared("a"))
            await settle()
        await settle()
        assert told.events == ["a begins", "a given up", "a begins"]
        told.gates["a"].set()
        await settle()
    assert told.events == ["a begins", "a given up", "a begins", "a ends"]


async def test_nothing_is_measured_where_none_is_allowed(told: type[Told]) -> None:
    async with Prewarm(SandboxConfig(prewarm=0)) as warm:
        warm.begin(prepared("a"))
        await settle()
    assert told.events == []


async def test_a_failure_of_measuring_ends_nothing_and_one_of_the_rollout_is_passed_on_as_it_is(
    told: type[Told],
) -> None:
    async with Prewarm(SandboxConfig()) as warm:
        warm.begin(prepared("broken"))
        await settle()
    assert told.events == ["broken begins"]

    async def refused() -> None:
        async with Prewarm(SandboxConfig()) as warm:
            warm.begin(prepared("a"))
            raise ConfigError("as it is")

    with pytest.raises(ConfigError, match="as it is"):
        await refused()


async def test_a_cancelled_rollout_leaves_nothing_measuring(told: type[Told]) -> None:
    told.gates = {"a": asyncio.Event()}

    async def play() -> None:
        async with Prewarm(SandboxConfig()) as warm:
            warm.begin(prepared("a"))
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        playing = group.create_task(play())
        await told.begun.wait()
        playing.cancel()
    assert playing.cancelled()
    assert told.events == ["a begins", "a given up"]


# --- in a rollout -----------------------------------------------------------------------------------------------

AGENT = """
import json, os, urllib.request
url, key = os.environ["POLAR_BASE_URL"], os.environ["POLAR_API_KEY"]
body = {"model": "policy", "messages": [{"role": "user", "content": "Fix it."}]}
ask = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(),
                             {"authorization": "Bearer " + key, "content-type": "application/json"})
urllib.request.urlopen(ask).read()
open("/testbed/fixed", "w").write("x")
"""


@pytest.mark.e2e
@pytest.mark.parametrize("gated", [False, True])
async def test_a_rollouts_agent_works_while_its_task_is_measured_and_waits_for_nothing(
    tmp_path: Path, told: type[Told], gated: bool
) -> None:
    """The agent makes its call through the proxy while the measuring is under way; with a gate nobody opens that
    never ends, and the rollout ends all the same."""
    settled = await settings(tmp_path / "sessions", harness={"name": "shell", "command": python(AGENT)})
    task = load_task()
    if gated:
        told.gates = {task.task_id: asyncio.Event()}
    job = RolloutJob(task, settled.harness, Sampling(temperature=1.0, top_p=1.0, max_tokens=64))
    async with open_proxy(settled) as proxy:
        result = await rollout(job, proxy, settled)
    assert (result.outcome, result.decision.reward) == (Outcome.COMPLETED, 1.0)
    end = "given up" if gated else "ends"
    order = ["begins", "graded", end] if gated else ["begins", end, "graded"]
    assert told.events == [event if event == "graded" else f"{task.task_id} {event}" for event in order]


def load_task() -> Task:
    return replace(rows.load("embedded")[0], grader="prewarm_helpers:Told")


async def test_a_grading_finds_what_was_measured(small: Prepared) -> None:  # noqa: F811
    """The row's own fix of SWE-bench rows: kept beside the task, and read from there."""
    assert small.repo is not None
    place = small.repo.parent
    async with Prewarm(config()) as warm:
        warm.begin(small)
        assert await until(lambda: any(place.glob("right-*/facts.json")), 60.0)
    (measured,) = place.glob("right-*/facts.json")
    before = measured.stat()
    found = await verdict(small, GOLD)
    assert found.status is VerdictStatus.RESOLVED
    assert (measured.stat().st_ino, measured.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

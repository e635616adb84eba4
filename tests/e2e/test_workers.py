"""Rollouts over the nodes of a real Ray cluster: two on this machine, each with a raylet of its own."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from gym_helpers import PARAMS
from polar_env.config import PolarConfig
from polar_env.gym import contract
from polar_env.gym.environment import PolarEnvironment
from polar_env.gym.workers import Fleet
from polar_env.tasks import rows as task_rows
from rollout_helpers import adopting, below_us, settings, settled

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

TASKS = [task.task_id for task in task_rows.load("embedded")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that runs nothing, and two nodes that offer the resource ``polar``; all gone at the end."""
    before = below_us()
    with ExitStack() as stack:
        stack.enter_context(adopting())
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        stack.callback(made.shutdown)
        for _ in range(2):
            made.add_node(num_cpus=1, resources={"polar": 1})
        ray.init(address=made.address, log_to_driver=False)
        stack.callback(ray.shutdown)
        yield made
    assert settled(30, known=before) == []


async def fleet_settings(tmp_path: Path, **groups: Any) -> PolarConfig:
    workers = {"ray": True, "resource": "polar", "refresh": 0.5, "wait": 60.0}
    return await settings(tmp_path, workers=workers, concurrency=4, **groups)


def posted(task_id: str, index: int) -> dict[str, Any]:
    return {"task_id": task_id, "_ng_rollout_index": index, "responses_create_params": PARAMS}


async def test_rollouts_spread_over_the_nodes_and_every_row_is_valid(cluster: Cluster, tmp_path: Path):
    config = await fleet_settings(tmp_path)
    async with Fleet(config).opened() as fleet, PolarEnvironment(config, elsewhere=fleet).opened() as environment:
        rows = [posted(task, index) for task in TASKS for index in range(2)]
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(environment.run(row)) for row in rows]
    answers = [task.result() for task in playing]
    assert [contract.violations(answer) for answer in answers] == [[]] * len(rows)
    assert [answer["reward"] for answer in answers] == [1.0] * len(rows), [
        answer["polar"]["detail"] for answer in answers
    ]
    offering = {node["NodeID"] for node in ray.nodes() if "polar" in node["Resources"]}
    assert {answer["polar"]["node"] for answer in answers} == offering


class Trainer:
    """Gives orders at the head's control address; each node answers for itself."""

    def __init__(self, environment: PolarEnvironment) -> None:
        self._environment = environment

    async def order(self, order: str, **said: Any) -> dict[str, Any]:
        method = "GET" if order in ("", "/rollouts") else "POST"
        status, told = await self._environment.order(method, f"/control{order}", json.dumps(said).encode())
        assert status == 200, told
        return told

    async def nodes(self, order: str = "", **said: Any) -> list[dict[str, Any]]:
        return list((await self.order(order, **said))["nodes"].values())

    async def until(self, order: str, stands: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll: nodes tell their trainer how they stand when they are asked."""
        async with asyncio.timeout(90):
            while not stands(told := await self.order(order)):  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.1)
        return told


def groups(told: dict[str, Any]) -> list[str]:
    """The groups of rollouts that are on a node."""
    return sorted(entry["group"] for entry in told["rollouts"] if "node" in entry)


async def test_a_trainer_s_orders_at_the_head_reach_every_node(cluster: Cluster, tmp_path: Path):
    """Three groups meet a pause on two nodes: one is cancelled, one hangs up, one goes on with the new weights."""
    config = await fleet_settings(tmp_path)
    async with (
        Fleet(config).opened() as fleet,
        PolarEnvironment(config, 0.05, elsewhere=fleet).opened() as environment,
        asyncio.TaskGroup() as group,
    ):
        trainer = Trainer(environment)
        await trainer.until("", lambda told: len(told["nodes"]) == 2)
        assert [node["version"] for node in await trainer.nodes("/version", version="step-1")] == ["step-1"] * 2
        assert [node["paused"] for node in await trainer.nodes("/pause")] == [True] * 2
        rows = [posted(task, index) | {"_ng_task_index": at} for at, task in enumerate(TASKS) for index in range(2)]
        posts = [group.create_task(environment.run(row)) for row in rows]
        told = await trainer.until("/rollouts", lambda told: groups(told) == ["0", "0", "1", "1", "2", "2"])
        assert len({entry["node"] for entry in told["rollouts"]}) == 2
        cancelled = (await trainer.order("/cancel", group="1"))["cancelled"]
        assert [entry["group"] for entry in cancelled] == ["1", "1"]
        ended = [await post for post in posts[2:4]]
        for post in posts[4:]:
            post.cancel()
        await trainer.until("/rollouts", lambda told: groups(told) == ["0", "0"])
        assert not any(node["paused"] for node in await trainer.nodes("/resume", version="step-2"))
        played = [await post for post in posts[:2]]
    assert [contract.violations(answer) for answer in played + ended] == [[]] * 4
    assert [answer["reward"] for answer in played] == [1.0, 1.0], [answer["polar"]["detail"] for answer in played]
    assert {answer["polar"]["policy_version_first"] for answer in played} == {"step-2"}
    assert {answer["polar"]["outcome"] for answer in ended} == {"cancelled"}
    assert all("trainer's order (group 1)" in answer["failure_reason"] for answer in ended)


def command(process: psutil.Process) -> str:
    """Its command line; empty when it has just ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def workers_running() -> dict[int, int]:
    """pid of each worker process of this cluster -> how many sandboxes run below it."""
    found: dict[int, int] = {}
    for process in psutil.Process().children(recursive=True):
        if "ray::Worker" in command(process):
            with suppress(psutil.Error):
                found[process.pid] = sum("bwrap" in command(child) for child in process.children(recursive=True))
    return found


async def busiest() -> int:
    """The pid of the worker with most sandboxes, once one has any; poll, as other processes cannot tell this one.

    Not one of two that have: on a busy machine a node may have played all its rows before the other's worker is up.
    """
    async with asyncio.timeout(150):
        while True:
            found = await asyncio.to_thread(workers_running)
            if any(found.values()):
                return max(found, key=lambda pid: found[pid])
            await asyncio.sleep(0.05)


async def test_a_worker_killed_mid_run_loses_no_row_and_doubles_none(cluster: Cluster, tmp_path: Path):
    config = await fleet_settings(tmp_path, engine={"scripts": ["fix"]})
    async with Fleet(config).opened() as fleet, PolarEnvironment(config, elsewhere=fleet).opened() as environment:
        rows = [posted(task, index) for task in TASKS for index in range(4)]
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(environment.run(row)) for row in rows]
            os.kill(await busiest(), signal.SIGKILL)
    answers = [task.result() for task in playing]
    assert [contract.violations(answer) for answer in answers] == [[]] * len(rows)
    assert [answer["reward"] for answer in answers] == [1.0] * len(rows), Counter(a["polar"]["detail"] for a in answers)
    played = Counter(answer["polar"]["session_id"] for answer in answers)
    assert len(played) == len(rows)
    assert set(played.values()) == {1}


async def test_a_cluster_without_a_fitting_node_gives_a_masked_row_that_says_so(cluster: Cluster, tmp_path: Path):
    workers = {"ray": True, "resource": "gpu_sandbox", "wait": 0.5}
    config = await settings(tmp_path, workers=workers)
    async with Fleet(config).opened() as fleet, PolarEnvironment(config, elsewhere=fleet).opened() as environment:
        answer = await environment.run(posted(TASKS[0], 0))
    assert contract.violations(answer) == []
    assert answer["mask_sample"]
    assert "gpu_sandbox" in answer["polar"]["detail"]

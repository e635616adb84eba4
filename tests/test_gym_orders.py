"""A trainer's orders to the rollouts of a server, over its control routes: list, cancel, hurry; here and on workers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_helpers import VllmServer
from fence_helpers import until_lapsed
from gym_helpers import Gated, Stage, configured, masked, row, served
from gym_server_helpers import built, post, resources, serving
from polar_env.cli import main
from polar_env.control import send
from polar_env.errors import ConfigError, SandboxError
from polar_env.gym.environment import PolarEnvironment

SECRET = "ours"


@pytest.fixture
async def play(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(Gated, "stage", Stage(), raising=False)
    return Gated.stage


@dataclass
class Server:
    """A `polar` resources server on a port of its own."""

    port: int

    async def order(self, order: str, **said: str) -> dict[str, Any]:
        return await asyncio.to_thread(send, f"http://127.0.0.1:{self.port}", SECRET, order, timeout=20.0, **said)

    async def posted(self, order: str, said: Any) -> tuple[int, dict[str, Any]]:
        """An order as a program of its own would post it."""
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"http://127.0.0.1:{self.port}/control/{order}", json=said) as got,
        ):
            return got.status, await got.json()

    async def run(self, index: int, group: int = 0, **fields: Any) -> dict[str, Any]:
        """A row posted; its answer."""
        status, content = await post(self.port, "/rollout", row(index, _ng_task_index=group, **fields))
        assert status == 200
        return json.loads(content)


@asynccontextmanager
async def server(tmp_path: Path, **groups: Any) -> AsyncGenerator[Server]:
    async with VllmServer().run() as engine:
        made = resources(configured(tmp_path, engine.url, **groups).model_dump(mode="json"))
        made.config = made.config.model_copy(update={"control_secret": SECRET})
        async with serving(built(made)) as port:
            yield Server(port)


# --- cancel -----------------------------------------------------------------------------------------------------


async def test_a_cancelled_group_is_answered_with_valid_masked_rows_and_the_other_plays_on(play: Stage, tmp_path: Path):
    async with server(tmp_path) as it, asyncio.TaskGroup() as group:
        seven = [group.create_task(it.run(index, group=7)) for index in range(2)]
        eight = group.create_task(it.run(0, group=8))
        await play.until(3)
        told = await it.order("cancel", group="7")
        assert [(entry["group"], entry["index"]) for entry in told["cancelled"]] == [("7", "0"), ("7", "1")]
        answers = [await post for post in seven]
        assert [masked(answer)[:47] for answer in answers] == ["cancelled by the trainer's order (group 7); its"] * 2
        assert {(answer["failure_kind"], answer["polar"]["outcome"]) for answer in answers} == {("cancelled",) * 2}
        assert {answer["ended_early"] for answer in answers} == {1.0}
        assert not eight.done()
        assert [entry["group"] for entry in (await it.order("rollouts"))["rollouts"]] == ["8"]
        play.gate.set()
        assert "no CLI" in masked(await eight)


async def test_a_rollout_that_waits_for_a_slot_is_cancelled_like_any_other(play: Stage, tmp_path: Path):
    async with server(tmp_path, concurrency=1) as it, asyncio.TaskGroup() as group:
        first = group.create_task(it.run(0, group=1))
        await play.until(1)
        waiting = group.create_task(it.run(0, group=2))
        while not (await it.order("cancel", group="2"))["cancelled"]:
            pass  # it has not arrived yet
        assert "cancelled by the trainer" in masked(await waiting)
        play.gate.set()
        assert "no CLI" in masked(await first)
    assert play.begun == 1


async def test_one_session_can_be_cancelled_by_the_name_that_the_list_gives(play: Stage, tmp_path: Path):
    async with server(tmp_path) as it, asyncio.TaskGroup() as group:
        posts = [group.create_task(it.run(index)) for index in range(2)]
        await play.until(2)
        listed = (await it.order("rollouts"))["rollouts"]
        assert {entry["task"] for entry in listed} == {row()["task_id"]}
        (session,) = (entry["session"] for entry in listed if entry["index"] == "1")
        await it.order("cancel", session=session)
        assert session in masked(await posts[1])
        assert not posts[0].done()
        play.gate.set()
    assert "no CLI" in masked(posts[0].result())


@pytest.mark.parametrize(
    ("order", "said", "words"),
    [
        ("cancel", {}, "say which rollouts"),
        ("cancel", [], "a JSON object"),
        ("hurry", {"group": "7"}, "seconds must be a number"),
        ("hurry", {"group": "7", "seconds": -1}, "seconds must be a number"),
        ("hurry", {"group": "7", "seconds": 5, "then": "kill"}, "mask or grade"),
        ("hurry", {"seconds": 5}, "say which rollouts"),
    ],
)
async def test_an_order_that_says_too_little_is_a_400_and_ends_nothing(
    play: Stage, tmp_path: Path, order: str, said: Any, words: str
):
    async with server(tmp_path) as it, asyncio.TaskGroup() as group:
        waits = group.create_task(it.run(0))
        await play.until(1)
        status, answer = await it.posted(order, said)
        assert (status, words in answer["error"]) == (400, True)
        assert not play.cancelled.is_set()
        play.gate.set()
        await waits


async def test_nobody_without_the_secret_cancels_or_lists(play: Stage, tmp_path: Path):
    async with server(tmp_path) as it, asyncio.TaskGroup() as group:
        waits = group.create_task(it.run(0, group=7))
        await play.until(1)
        for order, said in (("cancel", {"group": "7"}), ("rollouts", {})):
            with pytest.raises(ConfigError, match="401"):
                await asyncio.to_thread(send, f"http://127.0.0.1:{it.port}", "guessed", order, **said)
        assert not play.cancelled.is_set()
        play.gate.set()
        await waits


async def test_the_command_lists_and_cancels(
    play: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("POLAR_CONTROL_SECRET", SECRET)
    async with server(tmp_path) as it, asyncio.TaskGroup() as group:
        waits = group.create_task(it.run(0, group=7))
        await play.until(1)

        async def polar(*argv: str) -> int:
            return await asyncio.to_thread(main, ["control", *argv, "--url", f"http://127.0.0.1:{it.port}"])

        assert await polar("rollouts") == 0
        assert [entry["group"] for entry in json.loads(capsys.readouterr().out)["rollouts"]] == ["7"]
        assert await polar("cancel") == 2
        assert "needs a task, a group or a session" in capsys.readouterr().err
        assert await polar("cancel", "--group", "8") == 0
        assert json.loads(capsys.readouterr().out) == {"cancelled": []}
        assert await polar("cancel", "--group", "7", "--task", row()["task_id"]) == 0
        assert len(json.loads(capsys.readouterr().out)["cancelled"]) == 1
        assert "cancelled by the trainer" in masked(await waits)


async def test_cancelled_and_given_up_rollouts_are_counted(play: Stage, tmp_path: Path):
    async with served(tmp_path, grace=0.0) as environment, asyncio.TaskGroup() as group:
        kept, lost = (group.create_task(environment.run(row(index))) for index in range(2))
        await play.until(2)
        lost.cancel()
        await asyncio.wait([lost])
        await asyncio.wait_for(play.cancelled.wait(), 10)
        await environment.order("POST", "/control/cancel", b'{"task": "polar-env__expiry-2"}')
        masked(await kept)
    page = environment.metrics.text().decode()  # all is torn down
    assert 'polar_rollouts_total{harness="gym_helpers:Gated",outcome="cancelled",trained="false"} 2.0' in page
    assert "polar_rollouts_in_flight 0.0" in page


# --- a pause that lapsed ----------------------------------------------------------------------------------------


async def test_rows_posted_after_the_trainer_died_are_masked_at_once_and_start_nothing(play: Stage, tmp_path: Path):
    play.gate.set()
    async with VllmServer().run() as engine:
        config = configured(tmp_path, engine.url)
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"pause_lease": 0.05})})
        async with PolarEnvironment(config).opened() as environment:
            await environment.run(row(0))
            await environment.order("POST", "/control/pause", b"{}")
            await until_lapsed(environment._proxy.fence)
            answer = await environment.run(row(1))
            assert "engine.pause_lease" in masked(answer)
            assert answer["failure_kind"] == "polar_env:engine_error"
            await environment.order("POST", "/control/resume", b'{"version": "step-2"}')
            assert "no CLI" in masked(await environment.run(row(2)))
    assert play.begun == 2


# --- rollouts on workers ----------------------------------------------------------------------------------------


@dataclass
class Workers:
    """Where rollouts run, when not in the server: a node that plays what it is given until the test says how."""

    told: list[tuple[str, str, Any]] = field(default_factory=list)
    knows: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, index: int) -> "asyncio.Future[dict[str, Any]]":
        return self.ends.setdefault(index, asyncio.get_running_loop().create_future())

    async def run(self, row: Any) -> dict[str, Any]:
        return await self.end(row["_ng_rollout_index"])

    async def order(self, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
        said = json.loads(raw or b"{}")
        self.told.append((method, path, said))
        self.asked.set()
        name = {"/control/cancel": "cancelled", "/control/rollouts": "rollouts"}.get(path, "hurried")
        return 200, {"nodes": {"n1": {name: self.knows}}}


@asynccontextmanager
async def spread(tmp_path: Path, **groups: Any) -> AsyncGenerator[tuple[PolarEnvironment, Workers]]:
    workers = Workers()
    config = configured(tmp_path, "http://127.0.0.1:9", **groups)
    async with PolarEnvironment(config, elsewhere=workers).opened() as environment:
        yield environment, workers


def finished(seconds: float) -> dict[str, Any]:
    return {"mask_sample": False, "seconds_agent": seconds, "polar": {"outcome": "completed", "harness": "gated"}}


async def test_a_cancel_reaches_every_worker_and_then_what_waits_for_one(tmp_path: Path):
    async with spread(tmp_path) as (environment, workers), asyncio.TaskGroup() as group:
        posts = [group.create_task(environment.run(row(index))) for index in range(2)]
        await asyncio.sleep(0)
        _, before = await environment.order("GET", "/control/rollouts", b"")
        keys = {entry["index"]: entry["key"] for entry in before["rollouts"]}
        workers.knows = [{"key": keys["0"], "session": "s-0"}]  # the other waits for a node
        workers.end(0).set_result({"mask_sample": True, "polar": {"outcome": "cancelled"}})
        status, told = await environment.order("POST", "/control/cancel", b'{"group": "0"}')
        assert status == 200
        assert workers.told[-1] == ("POST", "/control/cancel", {"group": "0"})
        assert [entry.get("node") for entry in told["cancelled"]] == ["n1", None]
        assert (await posts[0])["polar"] == {"outcome": "cancelled"}, "as its worker said"
        assert "cancelled by the trainer" in masked(await posts[1])


async def test_a_list_has_what_workers_play_and_what_waits_for_one(tmp_path: Path):
    async with spread(tmp_path) as (environment, workers), asyncio.TaskGroup() as group:
        posts = [group.create_task(environment.run(row(index))) for index in range(2)]
        await asyncio.sleep(0)
        _, alone = await environment.order("GET", "/control/rollouts", b"")
        workers.knows = [{**alone["rollouts"][0], "session": "s-0", "stage": "playing"}]
        _, told = await environment.order("GET", "/control/rollouts", b"")
        assert [(entry["session"], entry.get("node"), entry["stage"]) for entry in told["rollouts"]] == [
            ("s-0", "n1", "playing"),
            ("", None, "waiting"),
        ]
        for index, posted in enumerate(posts):
            workers.end(index).set_result(finished(1.0))
            await posted


async def test_a_hurry_tells_of_each_rollout_once_and_of_none_that_does_not_play(tmp_path: Path):
    async with spread(tmp_path) as (environment, workers), asyncio.TaskGroup() as group:
        posts = [group.create_task(environment.run(row(index))) for index in range(2)]
        await asyncio.sleep(0)
        _, alone = await environment.order("GET", "/control/rollouts", b"")
        workers.knows = [{"key": alone["rollouts"][0]["key"], "session": "s-0"}]  # the other waits for a node
        _, told = await environment.order("POST", "/control/hurry", b'{"group": "0", "seconds": 1}')
        assert [(entry["session"], entry["node"]) for entry in told["hurried"]] == [("s-0", "n1")]
        for index, posted in enumerate(posts):
            workers.end(index).set_result(finished(1.0))
            await posted


async def test_the_rest_of_a_group_is_hurried_on_whatever_worker_it_plays(tmp_path: Path):
    stragglers = {"after_fraction": 0.5, "min_seconds": 1.0, "patience": 2.0, "then": "grade"}
    async with spread(tmp_path, stragglers=stragglers) as (environment, workers), asyncio.TaskGroup() as group:
        posts = [group.create_task(environment.run(row(index))) for index in range(4)]
        await asyncio.sleep(0)
        _, before = await environment.order("GET", "/control/rollouts", b"")
        keys = {entry["index"]: entry["key"] for entry in before["rollouts"]}
        workers.told.clear()
        workers.asked.clear()
        for index, seconds in ((0, 10.0), (1, 30.0)):
            workers.end(index).set_result(finished(seconds))
            await posts[index]
        await asyncio.wait_for(workers.asked.wait(), 10)
        ((method, path, said),) = workers.told
        assert (method, path) == ("POST", "/control/hurry")
        assert said["keys"] == sorted([keys["2"], keys["3"]])
        assert (said["seconds"], said["then"]) == (40.0, "grade")
        assert "2 of its group of 4 had finished" in said["why"]
        for index in (2, 3):
            workers.end(index).set_result(finished(1.0))
            await posts[index]


async def test_a_worker_that_is_lost_costs_the_group_nothing_but_its_row(tmp_path: Path):
    async with spread(tmp_path, stragglers={"after_fraction": 0.5}) as (environment, workers):
        async with asyncio.TaskGroup() as group:
            posts = [group.create_task(environment.run(row(index))) for index in range(2)]
            await asyncio.sleep(0)
            workers.end(0).set_exception(SandboxError("the node was lost"))
            workers.end(1).set_result(finished(1.0))
        assert "the node was lost" in masked(posts[0].result())
        assert workers.told == []

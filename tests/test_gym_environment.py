"""PolarEnvironment as Gym drives it: rows posted twice, dropped, abandoned, malformed; engines that are down; bugs."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_helpers import VllmServer
from gym_helpers import PARAMS, Gated, Stage, configured, masked, row, served
from polar_env.config import PolarConfig
from polar_env.errors import ConfigError, EngineError
from polar_env.gym import contract
from polar_env.gym.environment import PolarEnvironment, placeholder
from polar_env.tasks.embedded_rows import embedded_rows
from tasks_helpers import good_row, write_jsonl


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(Gated, "stage", Stage(), raising=False)
    return Gated.stage


async def drop(post: "asyncio.Task[dict[str, Any]]") -> None:
    """The connection is lost: Gym's server cancels the handler that waits."""
    post.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await post


# --- a row posted more than once --------------------------------------------------------------------------------


async def test_a_row_posted_twice_is_one_rollout_with_two_equal_answers(stage: Stage, tmp_path: Path):
    async with served(tmp_path) as environment, asyncio.TaskGroup() as group:
        first = group.create_task(environment.run(row()))
        await stage.until(1)
        second = group.create_task(environment.run(row()))
        await asyncio.sleep(0)
        stage.gate.set()
    assert stage.begun == 1
    assert first.result() == second.result()
    assert "no CLI" in masked(first.result())


async def test_rows_of_a_group_are_rollouts_of_their_own(stage: Stage, tmp_path: Path):
    async with served(tmp_path) as environment, asyncio.TaskGroup() as group:
        posts = [group.create_task(environment.run(row(index))) for index in range(3)]
        await stage.until(3)
        stage.gate.set()
    sessions = {post.result()["polar"]["session_id"] for post in posts}
    assert len(sessions) == 3
    assert sorted(name.split(".")[1] for name in sessions) == ["0", "1", "2"]


async def test_a_row_posted_after_its_answer_is_a_new_rollout(stage: Stage, tmp_path: Path):
    stage.gate.set()
    async with served(tmp_path) as environment:
        answers = [await environment.run(row()) for _ in range(2)]
    assert stage.begun == 2
    assert answers[0]["polar"]["session_id"] != answers[1]["polar"]["session_id"]


async def test_a_dropped_row_posted_again_within_the_grace_gets_the_same_rollout(stage: Stage, tmp_path: Path):
    async with served(tmp_path) as environment, asyncio.TaskGroup() as group:
        lost = group.create_task(environment.run(row()))
        await stage.until(1)
        await drop(lost)
        again = group.create_task(environment.run(row()))
        await asyncio.sleep(0)
        stage.gate.set()
    assert stage.begun == 1
    assert not stage.cancelled.is_set()
    masked(again.result())


async def test_the_answer_of_a_rollout_that_ended_while_nobody_waited_is_kept(stage: Stage, tmp_path: Path):
    async with served(tmp_path) as environment, asyncio.TaskGroup() as group:
        lost = group.create_task(environment.run(row()))
        await stage.until(1)
        await drop(lost)
        stage.gate.set()
        await environment.run(row(1))  # by its end the first has long ended, too
        answer = await environment.run(row())
    assert stage.begun == 2
    assert answer["polar"]["session_id"].split(".")[1] == "0"


async def test_a_rollout_nobody_comes_back_for_is_cancelled_after_the_grace(stage: Stage, tmp_path: Path):
    async with served(tmp_path, grace=0.05) as environment, asyncio.TaskGroup() as group:
        lost = group.create_task(environment.run(row()))
        await stage.until(1)
        await drop(lost)
        await asyncio.wait_for(stage.cancelled.wait(), 10)
        stage.gate.set()
        masked(await environment.run(row()))
    assert stage.begun == 2


async def test_a_row_that_came_back_is_not_given_up_when_the_grace_of_the_first_loss_is_over(
    stage: Stage, tmp_path: Path
):
    async with served(tmp_path, grace=0.1) as environment, asyncio.TaskGroup() as group:
        lost = group.create_task(environment.run(row()))
        await stage.until(1)
        await drop(lost)
        again = group.create_task(environment.run(row()))
        await asyncio.sleep(0.3)
        assert not stage.cancelled.is_set()
        stage.gate.set()
    masked(again.result())


async def test_one_of_two_waiting_connections_may_drop(stage: Stage, tmp_path: Path):
    async with served(tmp_path, grace=0.0) as environment, asyncio.TaskGroup() as group:
        stays, goes = (group.create_task(environment.run(row())) for _ in range(2))
        await stage.until(1)
        await drop(goes)
        await asyncio.sleep(0.05)
        assert not stage.cancelled.is_set()
        stage.gate.set()
    masked(stays.result())


# --- the queue and the end --------------------------------------------------------------------------------------


async def test_no_more_rollouts_run_at_once_than_configured_and_the_others_wait_for_free(stage: Stage, tmp_path: Path):
    async with served(tmp_path, concurrency=2) as environment, asyncio.TaskGroup() as group:
        posts = [group.create_task(environment.run(row(index))) for index in range(4)]
        await stage.until(2)
        await asyncio.sleep(0.1)
        assert stage.begun == 2
        stage.gate.set()
    assert stage.begun == 4
    queued = sorted(post.result()["seconds_queue"] for post in posts)
    assert queued[1] < 0.1 <= queued[2]


async def test_closing_cancels_what_runs_and_what_waits_and_answers_it_masked(stage: Stage, tmp_path: Path):
    async with asyncio.TaskGroup() as group:
        async with served(tmp_path, concurrency=1) as environment:
            posts = [group.create_task(environment.run(row(index))) for index in range(3)]
            await stage.until(1)
        assert stage.cancelled.is_set()
        late = await environment.run(row(9))
    answers = [post.result() for post in posts] + [late]
    assert {answer["failure_kind"] for answer in answers} == {"cancelled"}
    assert all("server" in masked(answer) for answer in answers)
    assert stage.begun == 1


async def test_a_row_is_masked_before_the_server_is_open(tmp_path: Path):
    environment = PolarEnvironment(configured(tmp_path, "http://127.0.0.1:9"))
    assert "not open" in masked(await environment.run(row()))


# --- the engine -------------------------------------------------------------------------------------------------


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def test_an_engine_that_is_down_masks_rows_with_its_reason(stage: Stage, tmp_path: Path):
    async with PolarEnvironment(configured(tmp_path, closed_port())).opened() as environment:
        answer = await environment.run(row())
    assert answer["failure_kind"] == "polar_env:engine_error"
    assert "127.0.0.1" in masked(answer)
    assert stage.begun == 0


async def test_an_engine_that_was_down_is_asked_again_by_the_next_row(stage: Stage, tmp_path: Path):
    stage.gate.set()
    async with VllmServer(fault="gateway").run() as engine:
        async with PolarEnvironment(configured(tmp_path, engine.url)).opened() as environment:
            down = await environment.run(row())
            engine.fault = ""
            up = await environment.run(row())
            asked = len(engine.requests)
            await environment.run(row(1))
        assert len(engine.requests) == asked  # proved once
    assert "502" in masked(down)
    assert "no CLI" in masked(up)


async def test_rows_that_wait_while_a_dead_engine_is_asked_share_its_answer(stage: Stage, tmp_path: Path):
    async with VllmServer(fault="gateway").run() as engine:
        async with (
            PolarEnvironment(configured(tmp_path, engine.url)).opened() as environment,
            asyncio.TaskGroup() as group,
        ):
            posts = [group.create_task(environment.run(row(index))) for index in range(6)]
        assert len(engine.requests) == 1
    assert all("502" in masked(post.result()) for post in posts)


# --- rows as they should not be ---------------------------------------------------------------------------------

BAD = {
    "a task nobody has": ({"task_id": "polar-env__expiri-2"}, "polar-env__expiry-2"),
    "no task": ({"task_id": ""}, "polar dataset"),
    "a task that is null": ({"task_id": None}, "polar dataset"),
    "data that is not there": ({"data": "/nowhere"}, "no rows at /nowhere"),
    "an instance that lacks fields": ({"instance": {"instance_id": "x"}}, "missing"),
    "an instance that is no object": ({"instance": "x", "task_id": ""}, "polar dataset"),
    "an unknown harness": ({"harness": "claude"}, "claude_code"),
    "a harness that cannot be imported": ({"harness": "no_such_module:Thing"}, "cannot be imported"),
    "a harness with no such class": ({"harness": "gym_helpers:Nothing"}, "cannot be imported"),
    "an index that is no number": ({"_ng_rollout_index": "first"}, "reading the dataset row"),
    "sampling that is no number": ({"responses_create_params": {"input": "x", "temperature": "hot"}}, "hot"),
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
async def test_a_bad_row_is_answered_masked_and_says_what_is_wrong(
    stage: Stage, tmp_path: Path, fields: tuple[dict[str, Any], str]
):
    wrong, words = fields
    async with served(tmp_path) as environment:
        assert words in masked(await environment.run(row(**wrong)))
    assert stage.begun == 0


async def test_parameters_that_are_no_object_are_answered_with_an_empty_input(stage: Stage, tmp_path: Path):
    stage.gate.set()
    async with served(tmp_path) as environment:
        answer = await environment.run(row(responses_create_params=["what"]))
    masked(answer)
    assert answer["responses_create_params"] == {"input": []}


def test_parameters_that_cannot_be_sent_back_are_left_out():
    answer = placeholder(row(responses_create_params={"input": "\ud800"}), ConfigError("why"), PolarConfig())
    assert masked(answer) == "why"
    assert answer["responses_create_params"] == {"input": []}


async def test_the_row_s_own_instance_needs_no_data(stage: Stage, tmp_path: Path):
    stage.gate.set()
    instance = {**embedded_rows()[0], "instance_id": "mine__own-1"}
    async with served(tmp_path, data="/nowhere") as environment:
        answer = await environment.run({"responses_create_params": PARAMS, "instance": instance})
    assert "no CLI" in masked(answer)
    assert answer["polar"]["task_id"] == "mine__own-1"


async def test_the_same_task_id_in_other_data_is_another_task(stage: Stage, tmp_path: Path):
    stage.gate.set()
    has, lacks = tmp_path / "has.jsonl", tmp_path / "lacks.jsonl"
    write_jsonl(has, good_row())
    write_jsonl(lacks, good_row(instance_id="acme__other-1"))
    async with served(tmp_path) as environment:
        found = await environment.run(row(task_id="acme__gadget-1", data=str(has)))
        lost = await environment.run(row(task_id="acme__gadget-1", data=str(lacks)))
    assert "no CLI" in masked(found)
    assert "no task 'acme__gadget-1'" in masked(lost)


async def test_a_row_may_name_its_harness_and_leaves_the_configured_one_s_settings_behind(stage: Stage, tmp_path: Path):
    stage.gate.set()
    harness = {"name": "gym_helpers:Gated", "version": "1.2"}
    async with served(tmp_path, harness=harness) as environment:
        ours = await environment.run(row())
        other = await environment.run(row(harness="gym_helpers:Gated2"))
        same = await environment.run(row(harness="gym_helpers:Buggy"))
    assert "version '1.2'" in masked(ours)
    assert "cannot be imported" in masked(other)
    assert (ours["polar"]["harness"], same["polar"]["harness"]) == ("gated", "gym_helpers:Buggy")


async def test_a_task_id_with_slashes_stays_inside_the_session_folder(stage: Stage, tmp_path: Path):
    stage.gate.set()
    instance = {**embedded_rows()[0], "instance_id": "../../evil"}
    async with served(tmp_path) as environment:
        masked(await environment.run({"responses_create_params": PARAMS, "instance": instance}))
    assert written(tmp_path, "calls.log") == written(tmp_path / "sessions", "*/calls.log") != []


def written(folder: Path, pattern: str) -> list[Path]:
    return list(folder.rglob(pattern))


async def test_a_bug_costs_one_masked_row_and_the_others_go_on(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with served(tmp_path) as environment, asyncio.TaskGroup() as group:
        beside = group.create_task(environment.run(row()))
        await stage.until(1)
        broken = await environment.run(row(harness="gym_helpers:Buggy"))
        stage.gate.set()
    assert "ZeroDivisionError" in masked(broken)
    assert "no CLI" in masked(beside.result())
    assert "ZeroDivisionError" in caplog.text  # with its traceback, for us


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "responses_create_params": JSON | st.fixed_dictionaries({"input": JSON, "max_output_tokens": JSON}),
        "task_id": JSON,
        "instance_id": JSON,
        "instance": JSON | st.fixed_dictionaries({"instance_id": JSON}),
        "harness": JSON,
        "data": st.sampled_from(["", "embedded", "/nowhere", 7, None]),
        "_ng_rollout_index": JSON,
        "anything": JSON,
    },
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(posted=ROWS)
def test_whatever_is_posted_the_answer_is_a_row_nemo_rl_takes(tmp_path: Path, posted: dict[str, Any]):
    async def answer() -> dict[str, Any]:
        async with served(tmp_path) as environment:
            return await environment.run(posted)

    assert masked(asyncio.run(answer()))


# --- grading again ----------------------------------------------------------------------------------------------

POLAR = {"task_id": "polar-env__expiry-2", "outcome": "completed", "patch": "", "complete": True}


@pytest.mark.parametrize(
    ("polar", "words"),
    [
        ({}, "no polar.patch"),
        ({**POLAR, "patch": 7}, "no polar.patch"),
        ({**POLAR, "patch": "not base64!"}, "polar.patch"),
        ({**POLAR, "outcome": "nice"}, "polar.outcome"),
        ({**POLAR, "task_id": "nobody"}, "no task 'nobody'"),
    ],
)
async def test_a_row_that_is_not_ours_cannot_be_graded_again(tmp_path: Path, polar: dict[str, Any], words: str):
    environment = PolarEnvironment(configured(tmp_path, closed_port()))
    with pytest.raises(ConfigError, match=words):
        await environment.regrade({"polar": polar})


def test_a_placeholder_says_how_it_failed():
    answer = placeholder(row(harness="codex"), EngineError("the engine is gone"), PolarConfig())
    assert masked(answer) == "the engine is gone"
    assert (answer["failure_kind"], answer["polar"]["harness"]) == ("polar_env:engine_error", "codex")
    assert len(contract.trainable_items(answer)) == 1


async def test_a_row_that_cannot_be_counted_is_answered_all_the_same(tmp_path: Path):
    class Odd:
        async def run(self, row: Any) -> dict[str, Any]:
            return {"mask_sample": True, "num_model_calls": "three"}

        async def order(self, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
            return 200, {}

    async with PolarEnvironment(configured(tmp_path, "http://127.0.0.1:1/v1"), elsewhere=Odd()).opened() as environment:
        assert (await environment.run(row(0)))["num_model_calls"] == "three"
        assert (await environment.run(row(1)))["mask_sample"]

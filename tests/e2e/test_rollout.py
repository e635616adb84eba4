"""Whole rollouts in real sandboxes: how each ending is named, masked and delivered, and that nothing is left behind."""

import asyncio
import base64
import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from census import census
from engine_helpers import Answer, Step, VllmServer
from polar_env.capture import rebuild
from polar_env.cli import main
from polar_env.config import RewardConfig, override
from polar_env.gym import contract
from polar_env.gym.environment import PolarEnvironment
from polar_env.reward import decide
from polar_env.rollout import open_proxy, rollout
from polar_env.types import HoleKind, Outcome, RolloutResult
from polar_env.verdict import Flag, VerdictStatus
from rollout_helpers import (
    AGENT,
    below_us,
    delivered,
    hanging,
    job,
    left_running,
    python,
    roll,
    roll_unchecked,
    settings,
)
from sandbox_helpers import until_running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DONE = 'print(reply.get("content") or "")'
"""What the example agent does when the model has called nothing."""


WORDS = (Step((40,), (-0.5,), {"content": "Nothing to do."}), Step((151645,), (-0.7,)))
"""An answer without a tool call: the example agent ends."""


def real_engine(server: VllmServer) -> dict:
    return {"kind": "vllm", "base_urls": [server.url], "model": server.model}


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """After every ending: no process below this one, no mount, no file of ours in the temporary directory."""
    scratch = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    mounts, running = census().mounts, below_us()
    yield
    assert left_running(running) == []
    assert census().mounts.keys() - mounts.keys() == set()
    assert list(scratch.iterdir()) == []


# --- what a policy earns ----------------------------------------------------------------------------------------


async def test_a_policy_that_fixes_the_bug_earns_the_grader_s_one(tmp_path: Path):
    result = await roll(await settings(tmp_path))
    assert (result.outcome, result.verdict.status) == (Outcome.COMPLETED, VerdictStatus.RESOLVED)
    assert (result.decision.reward, result.decision.masked) == (1.0, False)
    row = delivered(result)
    assert row["trainable_tokens"] == result.trajectory.sampled_tokens > 0
    assert len(result.trajectory.chains) == 1


async def test_what_was_delivered_can_be_rebuilt_from_the_durable_log(tmp_path: Path):
    result = await roll(await settings(tmp_path, engine={"scripts": ["give_up"]}))
    assert rebuild(tmp_path / result.ledger.session_id) == result.ledger


@pytest.mark.parametrize("script", ["give_up", "half"])
async def test_a_policy_that_does_not_fix_it_earns_a_zero_that_trains(tmp_path: Path, script: str):
    result = await roll(await settings(tmp_path, engine={"scripts": [script]}))
    assert result.outcome is Outcome.COMPLETED
    assert (result.decision.reward, result.decision.masked) == (0.0, False)
    wanted = VerdictStatus.EMPTY_PATCH if script == "give_up" else VerdictStatus.UNRESOLVED
    assert result.verdict.status is wanted
    assert delivered(result)["mask_sample"] is False


TRIES = """
import socket
for where in (("192.0.2.1", 443), ("pypi.org", 443)):
    try: socket.create_connection(where, timeout=9)
    except OSError: pass
"""


async def test_what_an_agent_tries_to_reach_is_on_its_row_and_costs_what_the_configuration_says(tmp_path: Path):
    honest = await settings(tmp_path, harness={"command": python(TRIES + AGENT)})
    result = await roll(honest)
    row = delivered(result)
    tried = row["polar"]["egress"]["tried"]
    assert set(tried) == {"tcp 192.0.2.1:443", "dns pypi.org"}
    assert row["egress_packets"] == sum(tried.values())
    assert list(row["polar"]["verdict"]["flags"]) == ["egress"]
    assert (row["reward"], row["mask_sample"]) == (1.0, False), "reported, unless told otherwise"
    strict = honest.model_copy(update={"reward": RewardConfig(flags={Flag.EGRESS: "zero"})})
    async with PolarEnvironment(strict).opened() as environment:
        again = await environment.regrade(row)
    assert (again["reward"], again["mask_sample"]) == (0.0, False)
    assert list(again["polar"]["verdict"]["flags"]) == ["egress"]
    quiet = delivered(await roll(await settings(tmp_path)))
    assert (quiet["polar"]["egress"], quiet["egress_packets"]) == ({"tried": {}, "more": 0}, 0.0)


async def test_a_patch_that_does_not_apply_is_a_zero_that_trains_when_it_is_graded_again(tmp_path: Path):
    config = await settings(tmp_path)
    result = await roll(config)
    row = delivered(result)
    stale = base64.b64decode(row["polar"]["patch"]).replace(b".py", b"_of_another_time.py")
    async with PolarEnvironment(config).opened() as environment:
        same = await environment.regrade(row)
        broken = await environment.regrade(with_patch(row, stale))
        empty = await environment.regrade(with_patch(row, b""))
        revived = await environment.regrade(row_whose_grading_failed(result))
    assert rewarded(revived) == rewarded(row), "its tokens are in its session's log"
    assert (same["reward"], same["mask_sample"], same["resolved"]) == (row["reward"], row["mask_sample"], True)
    for graded in (broken, empty):
        assert (graded["reward"], graded["mask_sample"], graded["resolved"]) == (0.0, False, False)
        assert graded["polar"]["verdict"]["status"] != "resolved"
        assert contract.violations({**row, **graded}) == []


def row_whose_grading_failed(result: RolloutResult) -> dict:
    decision = decide(Outcome.GRADE_ERROR, None, complete=True, config=RewardConfig())
    lost = replace(result, outcome=Outcome.GRADE_ERROR, verdict=None, decision=decision)
    row = delivered(lost)
    assert (row["mask_sample"], row["trainable_tokens"]) == (True, 0.0)
    return row


def rewarded(row: dict) -> dict:
    """A row without what differs from one grading to the next."""
    polar = {key: value for key, value in row["polar"].items() if key != "verdict"}
    return {**row, "polar": polar}


def with_patch(row: dict, patch: bytes) -> dict:
    return {**row, "polar": {**row["polar"], "patch": base64.b64encode(patch).decode()}}


async def test_a_masked_row_stays_masked_however_its_patch_is_graded(tmp_path: Path):
    """Its token is a placeholder: nothing was sampled that a reward could train."""
    config = await settings(tmp_path, harness={"command": ("true",)})
    row = delivered(await roll(config))
    gold = str(job(config).task.row["patch"]).encode()
    solved = with_patch({**row, "polar": {**row["polar"], "outcome": "completed"}}, gold)
    async with PolarEnvironment(config).opened() as environment:
        graded = await environment.regrade(solved)
    assert graded["resolved"] is True
    assert (graded["reward"], graded["mask_sample"]) == (0.0, True)
    assert contract.violations({**solved, **graded}) == []


async def test_a_row_without_token_ids_is_graded_again_like_any_other_and_stays_masked(tmp_path: Path):
    """Its reward is what says that its conversation is worth imitating."""
    config = await settings(tmp_path)
    task = job(config).task
    polar = {"task_id": task.task_id, "outcome": "completed", "complete": True}
    row = {"polar": polar, "text_only": 1.0, "mask_sample": True, "trainable_tokens": 0.0}
    async with PolarEnvironment(config).opened() as environment:
        graded = await environment.regrade(with_patch(row, str(task.row["patch"]).encode()))
    assert (graded["reward"], graded["mask_sample"], graded["resolved"]) == (1.0, True, True)
    assert graded["polar"]["verdict"]["status"] == "resolved"


async def test_a_row_s_own_sampling_reaches_the_engine_below_the_proxy_s_cap(tmp_path: Path):
    """NeMo-RL writes its policy's sampling onto every row (_prepare_nemo_gym_rows)."""
    asked = {"input": "x", "temperature": 0.7, "top_p": 0.9, "max_output_tokens": 33}
    async with VllmServer(answer=Answer(finish="stop", steps=WORDS)).run() as engine:
        config = await settings(tmp_path, engine=real_engine(engine))
        row = {"task_id": job(config).task.task_id, "responses_create_params": asked}
        async with PolarEnvironment(config).opened() as environment:
            checked = 2  # generations of the engine's check
            theirs = await environment.run(row)
            ours = await environment.run({**row, "responses_create_params": {"input": "x"}})
            much = await environment.run({**row, "responses_create_params": {**asked, "max_output_tokens": 10**6}})
    used = [(body["temperature"], body["top_p"], body["max_tokens"]) for body in engine.requests[checked:]]
    assert used == [(0.7, 0.9, 33), (1.0, 1.0, 8192), (0.7, 0.9, 8192)]
    for answer in (theirs, ours, much):
        assert contract.violations(answer) == []
        assert answer["mask_sample"] is False
    assert theirs["responses_create_params"] == asked


async def test_harnesses_may_differ_from_row_to_row_of_one_run(tmp_path: Path):
    config = await settings(tmp_path, engine={"scripts": ["give_up"]})
    row = {"task_id": job(config).task.task_id, "responses_create_params": {"input": "x"}}
    async with PolarEnvironment(config).opened() as environment:
        answers = [await environment.run({**row, "harness": name}) for name in ("shell", "rollout_helpers:Renamed")]
    assert [answer["polar"]["harness"] for answer in answers] == ["shell", "renamed"]
    assert [answer["mask_sample"] for answer in answers] == [False, False]


# --- what a harness can do --------------------------------------------------------------------------------------


async def test_a_harness_that_exits_non_zero_after_work_is_an_agent_error_and_still_graded(tmp_path: Path):
    crash = AGENT.replace(DONE, "sys.exit(7)")
    result = await roll(await settings(tmp_path, harness={"command": python(crash)}))
    assert result.outcome is Outcome.AGENT_ERROR
    assert result.exit.code == 7
    assert (result.verdict.status, result.decision.masked) == (VerdictStatus.RESOLVED, False)
    delivered(result)


@pytest.mark.parametrize("trap", ["os.makedirs('git~1'); open('git~1/x', 'w')", "os.mkfifo('.gitattributes')"])
async def test_a_tree_that_git_cannot_read_is_the_agent_s_zero_not_a_mask(tmp_path: Path, trap: str):
    result = await roll(await settings(tmp_path, harness={"command": python(AGENT.replace(DONE, trap))}))
    assert (result.outcome, result.patch) == (Outcome.AGENT_ERROR, b"")
    assert "extracting the patch" in result.detail
    assert (result.decision.reward, result.decision.masked) == (0.0, False)
    delivered(result)


_TRAPS = {
    "a tree too large to read": "open('big', 'wb').truncate(3 << 30)",
    "a write to init": "open('/proc/1/fd/0', 'w').write(chr(10))",
    "init's limits": "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
    "shooting everything": "while True: os.kill(-1, 9) if os.fork() else os.setsid()",
    "a library for all programs": "open('/etc/ld.so.preload', 'w').write('/tmp/x.so')",
}


@pytest.mark.parametrize("trap", _TRAPS.values(), ids=_TRAPS)
async def test_an_agent_cannot_mask_its_own_failure(tmp_path: Path, trap: str):
    """It has called the model and is about to fail: whatever it does to the sandbox, the zero trains."""
    config = await settings(
        tmp_path, harness={"command": python(AGENT.replace(DONE, trap))}, engine={"scripts": ["give_up"]}
    )
    result = await roll(config)
    assert result.outcome in (Outcome.AGENT_ERROR, Outcome.COMPLETED)
    assert (result.decision.reward, result.decision.masked) == (0.0, False)
    assert delivered(result)["trainable_tokens"] == result.trajectory.sampled_tokens > 0


async def test_a_harness_that_hangs_is_stopped_at_its_deadline_and_its_calls_are_delivered(tmp_path: Path):
    hang = AGENT.replace(DONE, "import threading; threading.Event().wait()")
    groups = {"harness": {"command": python(hang)}, "budget": {"agent": 8.0}, "engine": {"scripts": ["give_up"]}}
    result = await roll(await settings(tmp_path, **groups))
    assert result.outcome is Outcome.AGENT_TIMEOUT
    assert result.exit.timed_out
    assert result.trajectory.sampled_tokens > 0
    assert delivered(result)["trainable_tokens"] == result.trajectory.sampled_tokens


async def test_a_timeout_is_masked_where_the_configuration_says_so(tmp_path: Path):
    hang = AGENT.replace(DONE, "import threading; threading.Event().wait()")
    groups = {"harness": {"command": python(hang)}, "budget": {"agent": 8.0}, "engine": {"scripts": ["give_up"]}}
    result = await roll(await settings(tmp_path, reward={"train_timeouts": False}, **groups))
    assert result.outcome is Outcome.AGENT_TIMEOUT
    row = delivered(result)
    assert (row["mask_sample"], row["failure_kind"], row["trainable_tokens"]) == (True, "agent_timeout", 0.0)


async def test_a_harness_that_is_not_there_never_called_the_model(tmp_path: Path):
    result = await roll(await settings(tmp_path, harness={"command": ("no-such-agent",)}))
    assert (result.outcome, result.exit.code) == (Outcome.NO_CALLS, 127)
    assert delivered(result)["mask_sample"] is True


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


# --- what is ours -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["die", "garbage", "eof", "reset", "gateway"])
async def test_a_broken_engine_is_infrastructure_masked_with_its_reason(tmp_path: Path, fault: str):
    async with VllmServer(fault=fault).run() as engine:
        result = await roll_unchecked(await settings(tmp_path, engine=real_engine(engine)))
    assert result.outcome is Outcome.ENGINE_ERROR
    assert result.decision.masked
    assert result.ledger.records == ()
    assert delivered(result)["failure_reason"]


async def test_an_engine_that_gives_no_ids_makes_a_hole_that_masks_and_the_harness_never_notices(tmp_path: Path):
    async with VllmServer(answer=Answer(with_ids=False)).run() as engine:
        result = await roll_unchecked(await settings(tmp_path, engine=real_engine(engine), proxy={"max_calls": 2}))
    assert len(result.ledger.records) == 2
    assert {hole.kind for hole in result.ledger.holes} >= {HoleKind.MISSING_IDS}
    assert result.decision.masked
    assert delivered(result)["mask_sample"] is True


async def test_an_engine_that_dies_in_the_middle_masks_and_keeps_what_was_sampled(tmp_path: Path):
    async with VllmServer(answer=Answer(finish="tool_calls")).run() as engine:
        config = await settings(tmp_path, engine=real_engine(engine))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(roll_unchecked(config))
            await engine.started.wait()  # the first answer is out: the next request meets the fault
            engine.fault = "die"
        result = running.result()
    assert result.outcome is Outcome.ENGINE_ERROR
    assert result.ledger.records
    row = delivered(result)
    assert (row["mask_sample"], row["reward"]) == (True, 0.0)
    assert row["num_model_calls"] == len(result.ledger.records)


async def test_a_sandbox_that_cannot_start_is_infrastructure_with_its_reason(tmp_path: Path):
    config = await settings(tmp_path, sandbox={"provider_options": {"bwrap": "/bin/false"}})
    result = await roll(config)
    assert (result.outcome, result.exit) == (Outcome.SANDBOX_ERROR, None)
    assert "bwrap" in result.detail or "bubblewrap" in result.detail
    assert delivered(result)["failure_reason"] == result.detail


async def test_a_sandbox_killed_under_the_harness_is_infrastructure_not_a_bug(tmp_path: Path):
    config = await settings(tmp_path, harness={"command": hanging("killed-sandbox")})
    async with asyncio.TaskGroup() as group:
        running = group.create_task(roll(config))
        await until_running("killed-sandbox")
        for pid, command in below_us().items():
            if "bwrap" in command:
                os.kill(pid, signal.SIGKILL)
    result = running.result()
    assert result.outcome is Outcome.SANDBOX_ERROR
    assert delivered(result)["mask_sample"] is True


async def test_a_start_that_takes_longer_than_its_budget_is_infrastructure(tmp_path: Path):
    result = await roll(await settings(tmp_path, budget={"start": 0.001}))
    assert result.outcome is Outcome.SANDBOX_ERROR
    assert "starting the rollout took longer than its budget of 0.001 s" in result.detail
    assert delivered(result)["mask_sample"] is True


async def test_a_grader_that_gets_no_time_is_masked_never_a_zero(tmp_path: Path):
    result = await roll(await settings(tmp_path, budget={"grade": 0.001, "finalise": 0.2}))
    assert result.outcome in (Outcome.GRADE_ERROR, Outcome.SANDBOX_ERROR)
    assert delivered(result)["mask_sample"] is True


async def test_a_cancelled_rollout_leaves_nothing_running(tmp_path: Path):
    config = await settings(tmp_path, harness={"command": hanging("cancelled-rollout")})
    async with open_proxy(config) as proxy:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(rollout(job(config), proxy, config))
            await until_running("cancelled-rollout")
            running.cancel()
        assert running.cancelled()


async def test_rollouts_of_a_group_start_from_the_same_first_prompt(tmp_path: Path):
    config = await settings(tmp_path, engine={"scripts": ["fix", "give_up"]})
    async with open_proxy(config) as proxy, asyncio.TaskGroup() as group:
        runs = [group.create_task(rollout(job(config, index), proxy, config)) for index in range(4)]
    results = [run.result() for run in runs]
    assert contract.group_disagreements([delivered(result) for result in results]) == []
    assert [result.decision.reward for result in results] == [1.0, 0.0, 1.0, 0.0]


async def test_the_command_runs_one_rollout_and_prints_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = await settings(tmp_path, engine={"scripts": ["fix", "give_up"]})
    overrides = [
        override("engine.tokenizer", base.engine.tokenizer),
        override("engine.scripts", base.engine.scripts),
        override("harness.command", base.harness.command),
        override("store.cache", base.store.cache),
        override("store.sessions", tmp_path),
    ]
    flags = ["--engine", "scripted", "--harness", "shell", "--data", "embedded", "--index", "1"]
    assert await asyncio.to_thread(main, ["rollout", *flags, *overrides]) == 0
    row = json.loads(capsys.readouterr().out)
    assert contract.violations(row) == []
    assert (row["polar"]["harness"], row["polar"]["outcome"], row["reward"]) == ("shell", "completed", 0.0)
    assert row["polar"]["verdict"]["status"] == "empty_patch"

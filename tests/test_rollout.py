"""Composing a rollout, without a sandbox: harnesses by name, phases and their failures, and how an ending is named."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_helpers import Gated, Stage, configured
from polar_env.config import EngineConfig, HarnessConfig, PolarConfig, SandboxConfig
from polar_env.ending import Ending
from polar_env.errors import CaptureError, ConfigError, EngineError, GradeError, SandboxError
from polar_env.grade.prewarm import Prewarm
from polar_env.harness import HARNESSES
from polar_env.named import harness_class, harness_named, make_engine, make_harness
from polar_env.proxy.server import ProxyServer
from polar_env.rollout import RolloutJob, open_proxy, rollout
from polar_env.tasks import rows as task_rows
from polar_env.types import Outcome, Sampling

# --- parts by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARNESSES)
def test_every_harness_of_the_table_can_be_made(name: str):
    harness = make_harness(HarnessConfig(name=name, command=("true",)))
    assert harness.name == name


def test_a_harness_of_one_s_own_is_named_by_its_path():
    assert harness_class("gym_helpers:Gated") is Gated
    assert make_harness(HarnessConfig(name="gym_helpers:Gated")).name == "gated"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("claude", f"unknown harness 'claude'; known: {', '.join(HARNESSES)}, or module:Class"),
        ("no_such_module:X", "No module named"),
        ("gym_helpers:Nothing", "Nothing"),
        (":", "cannot be imported"),
        ("a b:c", "cannot be imported"),
    ],
)
def test_a_harness_nobody_has_is_refused_in_words(name: str, words: str):
    with pytest.raises(ConfigError, match="harness") as refused:
        harness_class(name)
    assert words in str(refused.value)


def test_a_shell_harness_without_a_command_is_refused():
    with pytest.raises(ConfigError, match=r"needs harness\.command"):
        make_harness(HarnessConfig(name="shell"))


def test_another_harness_of_the_run_has_none_of_the_configured_one_s_own_settings():
    ours = HarnessConfig(name="codex", version="1.0", command=("x",), extra_args=("--y",), max_turns=7)
    assert harness_named(ours, "codex") is ours
    assert harness_named(ours, "pi") == HarnessConfig(name="pi", max_turns=7)


def test_a_vllm_engine_without_a_server_is_refused():
    with pytest.raises(EngineError, match="base_urls"):
        make_engine(PolarConfig())


async def test_a_proxy_is_opened_only_before_an_engine_that_answers():
    engine = EngineConfig(base_urls=("http://127.0.0.1:9",), connect_timeout=1.0)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        async with open_proxy(PolarConfig(engine=engine)):
            pytest.fail("it was opened")


# --- endings before anything ran --------------------------------------------------------------------------------


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(Gated, "stage", Stage(), raising=False)
    return Gated.stage


def job(config: PolarConfig, **fields: Any) -> RolloutJob:
    return RolloutJob(task_rows.load("embedded")[0], config.harness, Sampling(), **fields)


async def run(config: PolarConfig, **fields: Any) -> Any:
    async with ProxyServer(make_engine(config), config.proxy) as proxy:
        return await rollout(job(config, **fields), proxy, config)


async def test_a_cli_that_cannot_be_installed_is_our_failure_not_the_agent_s(stage: Stage, tmp_path: Path):
    stage.gate.set()
    result = await run(configured(tmp_path, "http://127.0.0.1:9"), index=3)
    assert (result.outcome, result.decision.masked, result.verdict) == (Outcome.SANDBOX_ERROR, True, None)
    assert result.detail.startswith("the harness could not be installed: the test has no CLI")
    assert set(result.seconds) == {"start"}
    assert result.ledger.session_id.startswith("polar-env__expiry-2.3.")
    assert (tmp_path / "sessions" / result.ledger.session_id / "calls.log").stat().st_size > 0


async def test_a_start_over_its_budget_says_which_budget(stage: Stage, tmp_path: Path):
    result = await run(configured(tmp_path, "http://127.0.0.1:9", budget={"start": 0.05}))
    assert result.outcome is Outcome.SANDBOX_ERROR
    assert result.detail == (
        "starting the rollout took longer than its budget of 0.05 s; raise budget in the configuration"
    )
    assert stage.cancelled.is_set()


async def test_cancelling_a_start_closes_the_session(stage: Stage, tmp_path: Path):
    config = configured(tmp_path, "http://127.0.0.1:9")
    async with ProxyServer(make_engine(config), config.proxy) as proxy, asyncio.TaskGroup() as group:
        running = group.create_task(rollout(job(config), proxy, config))
        await stage.until(1)
        running.cancel()
    assert running.cancelled()
    assert stage.cancelled.is_set()


async def test_a_log_that_cannot_be_opened_starts_nothing(stage: Stage, tmp_path: Path):
    (tmp_path / "sessions").write_text("a file where the folder should be")
    with pytest.raises(CaptureError, match="sessions"):
        await run(configured(tmp_path, "http://127.0.0.1:9"))
    assert stage.begun == 0


async def test_a_bug_is_raised_not_hidden(stage: Stage, tmp_path: Path):
    config = configured(tmp_path, "http://127.0.0.1:9", harness={"name": "gym_helpers:Buggy"})
    with pytest.raises(ZeroDivisionError):
        await run(config)


# --- phases -----------------------------------------------------------------------------------------------------


def test_of_several_failures_the_first_is_kept_and_time_adds_up():
    ending = Ending(Prewarm(SandboxConfig()))
    with ending.phase("agent"):
        raise SandboxError("first")
    with ending.phase("agent"):
        raise GradeError("second")
    assert str(ending.error) == "first"
    assert set(ending.seconds) == {"agent"}


@pytest.mark.parametrize(
    "raised",
    [
        SandboxError("gone"),
        ExceptionGroup("tasks", [SandboxError("gone")]),
        ExceptionGroup("tasks", [ExceptionGroup("inner", [SandboxError("gone"), SandboxError("too")])]),
    ],
    ids=["plain", "from a task group", "nested"],
)
def test_a_failure_counts_however_a_task_group_wrapped_it(raised: Exception):
    ending = Ending(Prewarm(SandboxConfig()))
    with ending.phase("agent"):
        raise raised
    assert str(ending.error) == "gone"


@pytest.mark.parametrize("raised", [KeyError("bug"), ExceptionGroup("tasks", [SandboxError("x"), KeyError("bug")])])
def test_a_bug_among_failures_is_raised(raised: Exception):
    ending = Ending(Prewarm(SandboxConfig()))
    with pytest.raises((KeyError, ExceptionGroup)), ending.phase("agent"):
        raise raised
    assert ending.error is None

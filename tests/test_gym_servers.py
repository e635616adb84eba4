"""The Gym faces of polar on real sockets: what the agent answers whatever its upstream does, and the two routes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response
from nemo_gym import server_utils
from nemo_gym.base_resources_server import ReverifyMode
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig
from omegaconf import DictConfig

from engine_helpers import VllmServer
from gym_helpers import Gated, Stage, configured, masked, row
from gym_server_helpers import agent, built, post, resources, serving
from polar_env.control import send
from polar_env.errors import ConfigError, SandboxError
from polar_env.gym import environment as environment_module
from polar_env.gym.agent import PolarAgent
from polar_env.gym.environment_server import PolarEnvironmentServer
from polar_env.gym.resources_server import PolarResourcesServer, settings


@pytest.fixture(autouse=True)
async def gym_client(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    """Gym's servers share one HTTP client of the process; here, of the test."""
    monkeypatch.setattr(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None)
    session = server_utils.set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    yield
    await session.close()


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(Gated, "stage", Stage(), raising=False)
    return Gated.stage


Upstream = Callable[[Request], Awaitable[Response]]


async def ask_agent(upstream: Upstream, **fields: Any) -> dict[str, Any]:
    """A row posted to an agent whose resources server is ``upstream``; the agent answers 200 whatever that does."""
    app = FastAPI()
    app.post("/rollout")(upstream)
    async with serving(app) as port, serving(built(agent(port, **fields))) as ours:
        status, content = await post(ours, "/run", row(2, harness="codex"))
    assert status == 200
    return json.loads(content)


# --- the agent --------------------------------------------------------------------------------------------------


async def test_the_agent_passes_the_row_on_whole_and_the_answer_back_unchanged():
    answer = b'{"reward": 1.0,   "response": {"output": []}, "mask_sample": false, "more": [1, 2]}'
    seen: list[dict[str, Any]] = []

    async def upstream(request: Request) -> Response:
        seen.append(await request.json())
        return Response(answer, media_type="application/json")

    app = FastAPI()
    app.post("/rollout")(upstream)
    async with serving(app) as port, serving(built(agent(port))) as ours:
        assert await post(ours, "/run", row(2, anything={"deep": [1]})) == (200, answer)
    assert seen == [row(2, anything={"deep": [1]})]


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (500, b"boom", "answered 500: boom"),
        (422, b'{"detail": "bad"}', "answered 422"),
        (200, b"<html>a gateway</html>", "a gateway"),
        (200, b"", "answered 200"),
        (200, b'{"reward": 1.0', "answered 200"),
        (200, b"[1, 2]", "answered 200"),
        (200, b'{"detail": "something else"}', "something else"),
    ],
)
async def test_an_upstream_that_answers_no_row_costs_one_masked_row(status: int, content: bytes, words: str):
    async def upstream(request: Request) -> Response:
        return Response(content, status_code=status)

    answer = await ask_agent(upstream)
    assert words in masked(answer)
    assert (answer["polar"]["task_id"], answer["polar"]["harness"]) == (row()["task_id"], "codex")
    assert answer["responses_create_params"]["input"] == row()["responses_create_params"]["input"]


async def test_an_upstream_that_breaks_off_in_the_middle_of_an_answer_costs_one_masked_row():
    async def upstream(request: Request) -> Response:
        return Response(b'{"reward": 1.0, "response"', headers={"Content-Length": "1000"})

    masked(await ask_agent(upstream))


async def test_an_upstream_that_never_answers_is_given_up_at_the_hard_timeout():
    dropped = asyncio.Event()

    async def upstream(request: Request) -> Response:
        await request.body()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        dropped.set()
        return Response()

    reason = masked(await ask_agent(upstream, hard_timeout=0.3))
    assert "longer than hard_timeout, 0.3 s" in reason
    assert dropped.is_set()


async def test_a_rollout_the_agent_gave_up_is_cancelled_after_the_grace(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No call may reach the policy long after the row was answered (rule 12)."""
    monkeypatch.setattr(environment_module.PolarEnvironment.__init__, "__defaults__", (0.05, None))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(VllmServer().run())
        server = resources(configured(tmp_path, engine.url).model_dump(mode="json"))
        port = await stack.enter_async_context(serving(built(server)))
        ours = await stack.enter_async_context(serving(built(agent(port, hard_timeout=2.0))))
        status, content = await post(ours, "/run", row())
        await asyncio.wait_for(stage.cancelled.wait(), 10)
    assert (status, stage.begun) == (200, 1)
    assert "hard_timeout" in masked(json.loads(content))


async def test_a_client_that_drops_its_run_ends_that_rollout_and_no_other(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From its connection to the agent, over the agent's own to the server, to the rollout."""
    monkeypatch.setattr(environment_module.PolarEnvironment.__init__, "__defaults__", (0.05, None))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(VllmServer().run())
        server = resources(configured(tmp_path, engine.url).model_dump(mode="json"))
        port = await stack.enter_async_context(serving(built(server)))
        ours = await stack.enter_async_context(serving(built(agent(port))))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        drops, stays = (group.create_task(post(ours, "/run", row(index))) for index in range(2))
        await stage.until(2)
        drops.cancel()
        await asyncio.wait_for(stage.cancelled.wait(), 10)
        assert not stays.done()
        stage.gate.set()
        status, content = await stays
    assert (status, "no CLI" in masked(json.loads(content))) == (200, True)
    assert 'outcome="cancelled",trained="false"} 1.0' in server._environment.metrics.text().decode()


async def test_the_agent_has_no_single_turn():
    async with serving(built(agent(1))) as ours:
        status, content = await post(ours, "/v1/responses", {"input": "hello"})
    assert status == 500
    assert b"call /run" in content


async def test_metrics_are_the_resources_server_s(tmp_path: Path):
    server = resources(configured(tmp_path, "http://127.0.0.1:9").model_dump(mode="json"))
    responses = [{"reward": float(i), "_ng_task_index": 0, "_ng_rollout_index": i} for i in range(2)]
    async with serving(built(server)) as port, serving(built(agent(port))) as ours:
        status, content = await post(ours, "/aggregate_metrics", {"verify_responses": responses})
    assert status == 200
    assert json.loads(content)["key_metrics"]["mean/reward"] == 0.5


def test_no_server_of_ours_joins_ray():
    """Gym calls initialize_ray in every server that does not say this, and a rollout needs no Ray."""
    assert [kind.ray_enabled for kind in (PolarAgent, PolarResourcesServer, PolarEnvironmentServer)] == [False] * 3


# --- the resources server ---------------------------------------------------------------------------------------


async def test_a_row_goes_through_both_servers_and_comes_back_valid(stage: Stage, tmp_path: Path):
    stage.gate.set()
    async with VllmServer().run() as engine:
        server = resources(configured(tmp_path, engine.url).model_dump(mode="json"))
        async with serving(built(server)) as port, serving(built(agent(port))) as ours:
            status, content = await post(ours, "/run", row(3))
    answer = json.loads(content)
    assert status == 200
    assert "no CLI" in masked(answer)
    assert answer["polar"]["session_id"].startswith("polar-env__expiry-2.3.")


@pytest.mark.parametrize("body", [b"{", b"[1]", b""])
async def test_what_is_no_json_object_is_refused(tmp_path: Path, body: bytes):
    server = resources(configured(tmp_path, "http://127.0.0.1:9").model_dump(mode="json"))
    async with serving(built(server)) as port:
        assert (await post(port, "/rollout", body))[0] == 400


async def test_a_row_that_is_not_ours_is_not_verified(tmp_path: Path):
    server = resources(configured(tmp_path, "http://127.0.0.1:9").model_dump(mode="json"))
    body = row() | {"response": empty_response()}
    async with serving(built(server)) as port:
        status, content = await post(port, "/verify", body)
    assert status == 422
    assert b"no polar.patch" in content
    assert server.config.REVERIFY_MODE is ReverifyMode.STATELESS


def empty_response() -> dict[str, Any]:
    fixed = {"id": "r", "object": "response", "created_at": 0.0, "model": "m", "output": []}
    return fixed | {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True}


# --- its configuration ------------------------------------------------------------------------------------------

POLICY = {"policy_model_name": "qwen", "policy_api_key": "key"}


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a/v1", ("http://a/v1",)),
        (["http://a/v1", "http://b/v1"], ("http://a/v1", "http://b/v1")),
    ],
)
def test_the_engine_is_gym_s_policy(given: Any, urls: tuple[str, ...]):
    config = settings({}, DictConfig({"policy_base_url": given, **POLICY}))
    assert (config.engine.base_urls, config.engine.model, config.engine.api_key) == (urls, "qwen", "key")


def test_an_engine_of_its_own_wins_over_gym_s_policy():
    polar = DictConfig({"engine": {"base_urls": ["http://mine/v1"], "api_key": "own"}})
    config = settings(polar, DictConfig({"policy_base_url": "http://a/v1", **POLICY}))
    assert (config.engine.base_urls, config.engine.model, config.engine.api_key) == (("http://mine/v1",), "", "own")


@pytest.mark.parametrize("given", [None, "", []])
def test_no_engine_at_all_is_refused_when_the_server_starts(given: Any):
    with pytest.raises(ConfigError, match="policy_base_url"):
        settings({}, {"policy_base_url": given})


def test_the_scripted_engine_needs_no_policy():
    assert settings({"engine": {"kind": "scripted"}}, {}).engine.kind == "scripted"


def test_an_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'concurrency'"):
        settings({"engine": {"kind": "scripted"}, "concurency": 3}, {})


def test_nothing_is_written_into_the_folder_gym_starts_the_server_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    scripted = {"engine": {"kind": "scripted"}}
    assert settings(scripted, {}).store.cache == tmp_path
    assert settings(scripted, {}).store.sessions == tmp_path / "out" / "sessions"
    given = settings(scripted | {"store": {"cache": "/cache", "sessions": "/logs"}}, {}).store
    assert (given.cache, given.sessions) == (Path("/cache"), Path("/logs"))
    monkeypatch.delenv("POLAR_CACHE")
    assert settings(scripted, {}).store.cache.is_absolute()


# --- a trainer's orders -----------------------------------------------------------------------------------------


def controlled(tmp_path: Path, url: str, **fields: Any) -> FastAPI:
    """The resources server's application before an engine at ``url``."""
    made = resources(configured(tmp_path, url).model_dump(mode="json"))
    made.config = made.config.model_copy(update=fields)
    return built(made)


async def test_the_trainer_pauses_the_rollouts_of_the_server_and_nobody_without_the_secret_does(tmp_path: Path):
    async with VllmServer().run() as engine, serving(controlled(tmp_path, engine.url, control_secret="ours")) as port:
        url = f"http://127.0.0.1:{port}"
        assert (await asyncio.to_thread(send, url, "ours", "pause"))["paused"] is True
        with pytest.raises(ConfigError, match="401: wrong secret"):
            await asyncio.to_thread(send, url, "guessed", "resume")
        assert (await asyncio.to_thread(send, url, "ours", "state"))["paused"] is True
        told = await asyncio.to_thread(send, url, "ours", "resume", version="step-5")
        assert (told["paused"], told["version"]) == (False, "step-5")
        with pytest.raises(ConfigError, match="400: mode 'now' is none of wait, abort, keep"):
            await asyncio.to_thread(send, url, "ours", "pause", mode="now")


async def test_the_secret_may_come_from_the_environment_and_without_one_the_door_is_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with VllmServer().run() as engine, serving(controlled(tmp_path, engine.url)) as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match="403: this process has no control secret: set POLAR_CONTROL_SECRET"):
            await asyncio.to_thread(send, url, "", "pause")
        monkeypatch.setenv("POLAR_CONTROL_SECRET", "theirs")
        assert (await asyncio.to_thread(send, url, "theirs", "pause", mode="keep"))["paused"] is True


async def test_a_paused_server_asks_its_engine_nothing_not_even_whether_it_is_well(stage: Stage, tmp_path: Path):
    """A colocated engine sleeps then: the row that comes first waits with its start-up check."""
    stage.gate.set()
    async with VllmServer().run() as engine, serving(controlled(tmp_path, engine.url, control_secret="ours")) as port:
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(send, url, "ours", "pause")
        async with asyncio.TaskGroup() as group:
            posted = group.create_task(post(port, "/rollout", row()))
            await asyncio.sleep(0.3)
            assert engine.requests == []
            await asyncio.to_thread(send, url, "ours", "resume")
        status, answer = posted.result()
        assert engine.requests
    assert status == 200
    assert "the test has no CLI" in masked(json.loads(answer))


class Workers:
    """Where rollouts run, when not in the server."""

    async def run(self, row: Any) -> dict[str, Any]:
        raise SandboxError(f"no node for {row['task_id']}")

    async def order(self, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
        return 200, {"nodes": {"n1": f"{method} {path} {raw.decode()}"}}


async def test_a_server_whose_rollouts_run_elsewhere_passes_orders_and_rows_on(tmp_path: Path):
    async with VllmServer().run() as engine:
        environment = environment_module.PolarEnvironment(configured(tmp_path, engine.url), elsewhere=Workers())
        async with environment.opened():
            told = await environment.order("POST", "/control/pause", b"{}")
            answer = await environment.run(row())
    assert told == (200, {"nodes": {"n1": "POST /control/pause {}"}})
    assert "no node for polar-env__expiry-2" in masked(answer)


async def test_prometheus_is_told_of_every_row(stage: Stage, tmp_path: Path):
    stage.gate.set()
    async with VllmServer().run() as engine, serving(controlled(tmp_path, engine.url)) as port:
        await post(port, "/rollout", row())
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as got:
            page = await got.text()
    assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'polar_failures_total{kind="polar_env:sandbox_error"} 1.0' in page

"""A trainer's orders over real HTTP: what the door answers, to whom, and that no session's listener has it."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from fence_helpers import until, until_closed
from polar_env.cli import main
from polar_env.control import ORDERS, send
from polar_env.engine.fence import Fence
from polar_env.errors import ConfigError
from proxy_helpers import PlayedEngine, Stage, loopback, stage

SECRET = "only-the-trainer"


@dataclass
class Door:
    """An open control door beside a stage's model listener."""

    here: Stage
    url: str

    async def order(self, order: str, secret: str = SECRET, **fields: Any) -> dict[str, Any]:
        """What the trainer's client returns; it blocks, so in a thread."""
        return await asyncio.to_thread(send, self.url, secret, order, timeout=20.0, **fields)

    async def refused(self, order: str, secret: str = SECRET, **fields: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            await self.order(order, secret, **fields)
        return str(refused.value)

    @property
    def fence(self) -> Fence:
        return self.here.proxy.fence


@asynccontextmanager
async def door(*scripts: Any, secret: str = SECRET, **config: Any) -> AsyncGenerator[Door]:
    async with stage(PlayedEngine(*scripts), **config) as here:
        sock = loopback()
        port = sock.getsockname()[1]
        async with here.proxy.listen_control(sock, secret):
            yield Door(here, f"http://127.0.0.1:{port}")


OPEN = {
    "paused": False,
    "running": 0,
    "held": 0,
    "version": "",
    "resampled": 0,
    "broken": 0,
    "lease": None,
    "lapsed": False,
}


async def test_a_trainer_pauses_swaps_and_resumes_and_the_record_has_the_new_version():
    async with door() as it:
        assert await it.order("state") == OPEN
        assert (await it.order("pause"))["paused"]
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(it.here.ask("hi"))
            await until(it.fence, held=1)
            assert (await it.order("state"))["held"] == 1
            await it.order("resume", version="step-8")
        assert asking.result().status == 200
        assert await it.order("state") == OPEN | {"version": "step-8"}


async def test_a_pause_answers_when_what_runs_has_finished():
    gate = asyncio.Event()
    async with door([gate]) as it, asyncio.TaskGroup() as group:
        group.create_task(it.here.ask("hi"))
        await until(it.fence, running=1)
        pausing = group.create_task(it.order("pause", mode="wait"))
        await until_closed(it.fence)
        assert not pausing.done()
        gate.set()
        assert (await pausing)["running"] == 0


async def test_abort_and_version_are_orders_of_their_own():
    async with door([asyncio.Event()]) as it, asyncio.TaskGroup() as group:
        asking = group.create_task(it.here.ask("hi"))
        await until(it.fence, running=1)
        assert (await it.order("version", version="step-2"))["version"] == "step-2"
        assert not (await it.order("abort"))["paused"]
        assert (await asking).json["text"] == "answer 2"
        assert (await it.order("state"))["resampled"] == 1


SAID = {"version": {"version": "step-9"}, "cancel": {"group": "7"}}


@pytest.mark.parametrize("secret", ["wrong", SECRET[:-1], SECRET + "x", "\xe9"])
async def test_a_wrong_secret_moves_nothing(secret: str):
    async with door() as it:
        for order in ORDERS:
            assert "answered 401: wrong secret" in await it.refused(order, secret, **SAID.get(order, {}))
        assert it.fence.state.paused is False
        assert it.fence.state.version == ""


async def test_an_order_without_a_secret_is_told_where_to_put_it():
    async with door() as it:
        told = await it.refused("pause", "")
        assert "401: no secret came with the order: set POLAR_CONTROL_SECRET" in told
        assert not it.fence.closed


@pytest.mark.parametrize(
    ("order", "said", "words"),
    [
        ("pause", {"version": "step-3"}, "pause takes no version ('step-3'): it takes only mode"),
        ("state", {"mode": "wait"}, "state takes no mode ('wait'): it takes nothing else"),
        ("abort", {"task": "x"}, "abort takes no task"),
        ("version", {}, "needs the name of the weights"),
        ("cancel", {}, "needs a task, a group or a session"),
    ],
)
def test_what_an_order_does_not_take_is_not_sent(order: str, said: dict[str, str], words: str):
    with pytest.raises(ConfigError) as refused:
        send("http://127.0.0.1:9", SECRET, order, **said)
    assert words in str(refused.value)


async def test_a_proxy_alone_has_no_rollouts_to_cancel():
    async with door() as it:
        assert "404: no order POST /control/cancel" in await it.refused("cancel", group="7")
        listed = await it.refused("rollouts")
        assert "404: no order GET /control/rollouts; rollouts are listed and cancelled at the polar server's" in listed


async def test_a_session_s_key_is_no_secret_and_the_secret_is_no_key():
    async with door() as it:
        assert "401" in await it.refused("pause", it.here.session.key)
        assert (await it.here.ask("hi", key=SECRET)).status == 401


async def test_a_door_without_a_secret_is_shut_to_everybody():
    async with door(secret="") as it:
        assert "answered 403" in await it.refused("pause", "")
        assert "POLAR_CONTROL_SECRET" in await it.refused("pause", "anything")


@pytest.mark.parametrize("path", ["/control", "/control/pause", "/s/{key}/control/pause"])
async def test_a_listener_that_a_sandbox_can_reach_has_no_control(path: str):
    async with door() as it:
        url = f"http://127.0.0.1:{it.here.port}{path.format(key=it.here.session.key)}"
        for method in ("GET", "POST"):
            headers = {"Authorization": f"Bearer {SECRET}"}
            async with it.here.http.request(method, url, json={"mode": "keep"}, headers=headers) as answer:
                assert answer.status == 404
        assert not it.fence.closed


async def test_the_control_listener_serves_no_model():
    async with door() as it:
        for path in ("/plain", f"/s/{it.here.session.key}/plain"):
            headers = {"Authorization": f"Bearer {SECRET}"}
            async with it.here.http.post(it.url + path, json={"messages": ["hi"]}, headers=headers) as answer:
                assert answer.status == 404
        assert it.here.session.calls == 0


@pytest.mark.parametrize(
    ("order", "body", "words"),
    [
        ("pause", {"mode": "gently"}, "none of wait, abort, keep"),
        ("pause", {"mode": ["wait"]}, "none of wait, abort, keep"),
        ("version", {}, "must be a string"),
        ("version", {"version": 7}, "must be a string"),
        ("resume", {"version": "a+b"}, "such as step-12"),
        ("pause", [1], "a JSON object"),
        ("pause", None, "a JSON object"),
        ("pause", b"{", "JSONDecodeError"),
    ],
)
async def test_an_order_nobody_understands_is_a_400_and_changes_nothing(order: str, body: Any, words: str):
    async with door() as it:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with it.here.http.post(f"{it.url}/control/{order}", data=data, headers=headers) as answer:
            assert (answer.status, words in (await answer.json())["error"]) == (400, True)
        assert it.fence.state.paused is False


async def test_orders_are_posted_and_unknown_ones_are_not_found():
    async with door() as it:
        headers = {"Authorization": f"Bearer {SECRET}"}
        for method, path in (("GET", "/control/pause"), ("POST", "/control"), ("POST", "/control/stop"), ("GET", "/")):
            async with it.here.http.request(method, it.url + path, headers=headers) as answer:
                assert answer.status == 404
        assert not it.fence.closed


async def test_a_trainer_that_gives_up_on_a_pause_leaves_it_in_force():
    async with door([asyncio.Event()]) as it, asyncio.TaskGroup() as group:
        asking = group.create_task(it.here.ask("hi"))
        await until(it.fence, running=1)
        with pytest.raises(ConfigError, match="timed out"):
            await asyncio.to_thread(send, it.url, SECRET, "pause", timeout=0.1)
        assert it.fence.state.paused
        assert (await it.order("pause", mode="abort"))["running"] == 0
        await it.order("resume")
        assert (await asking).status == 200


async def test_a_door_that_is_not_there_says_so():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot be reached"):
            await asyncio.to_thread(send, url, SECRET, "pause", timeout=5.0)
    with pytest.raises(ConfigError, match="http://host:port"):
        send("host:8000", SECRET, "pause")


async def test_another_server_behind_the_address_is_told_apart():
    async with door() as it, aiohttp.ClientSession():
        with pytest.raises(ConfigError, match="answered 404"):
            await asyncio.to_thread(send, f"http://127.0.0.1:{it.here.port}", SECRET, "pause", timeout=5.0)


# --- the command ------------------------------------------------------------------------------------------------


async def test_the_command_gives_orders_with_the_secret_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("POLAR_CONTROL_SECRET", SECRET)
    async with door() as it:

        async def polar(*argv: str) -> int:
            return await asyncio.to_thread(main, ["control", *argv, "--url", it.url])

        assert await polar("version", "step-3") == 0
        assert json.loads(capsys.readouterr().out) == OPEN | {"version": "step-3"}
        assert await polar("pause", "--mode", "abort", "--timeout", "5") == 0
        assert json.loads(capsys.readouterr().out)["paused"] is True
        assert await polar("resume", "step-4") == 0
        assert it.fence.state.version == "step-4"
        monkeypatch.setenv("POLAR_CONTROL_SECRET", "stolen")
        assert await polar("pause") == 2
        assert "401: wrong secret" in capsys.readouterr().err
        assert not it.fence.closed

"""Weights swapped under running sessions, on a real vLLM: each record has the version that sampled it.

The trainer here is a program outside: it orders the proxy over HTTP (``polar_env.control``) and vLLM over its own
routes (dev mode), as a real one would.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from cases_helpers import Case, case, user
from e2e.vllm_helpers import VLLM, served_vllm, tiny_model
from fence_helpers import until
from polar_env.config import EngineConfig
from polar_env.control import send
from polar_env.engine.vllm import VllmEngine
from polar_env.proxy.server import ProxyServer
from polar_env.rollout import open_proxy, rollout
from polar_env.types import INFRASTRUCTURE
from proxy_helpers import loopback
from rollout_helpers import delivered, job, settings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (VLLM / "vllm").exists(), reason="no .venv-vllm: run `make test-vllm`"),
]

SECRET = "only-the-trainer"

LONG = 300
"""Tokens of a generation that a swap finds running: several seconds of this model."""


@dataclass
class Trainer:
    """The policy's weights, one folder after the other, and the two processes it orders about."""

    vllm: str
    weights: list[Path]
    step: int = 0
    door: str = ""

    async def order(self, order: str, **fields: Any) -> dict[str, Any]:
        return await asyncio.to_thread(send, self.door, SECRET, order, timeout=120.0, **fields)

    async def post(self, path: str, body: Any = None) -> None:
        async with aiohttp.ClientSession() as http, http.post(self.vllm + path, json=body or {}) as answer:
            assert answer.status == 200, await answer.text()

    async def swap(self, *, tell: bool = True) -> str:
        """Load the next weights; the name they have now."""
        self.step += 1
        path = str(self.weights[self.step % len(self.weights)])
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        await self.post("/reset_prefix_cache")
        if tell:
            await self.post("/update_weight_version", {"new_version": f"step-{self.step}"})
        return f"step-{self.step}"

    @asynccontextmanager
    async def trains(self, proxy: ProxyServer) -> AsyncGenerator[None]:
        """Open ``proxy``'s control door to this trainer."""
        sock = loopback()
        port = sock.getsockname()[1]
        async with proxy.listen_control(sock, SECRET):
            self.door = f"http://127.0.0.1:{port}"
            yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    other = await tiny_model(folder, seed=1)
    async with served_vllm(folder, max_model_len=16_384) as running:
        yield Trainer(running.url.removesuffix("/v1"), [running.model_dir, other])


@asynccontextmanager
async def talking(trainer: Trainer, folder: Path, **config: Any) -> AsyncGenerator[Case]:
    """A plain client's session before the real vLLM."""
    engine = VllmEngine(EngineConfig(base_urls=(trainer.vllm,)))
    try:
        async with case(folder, engine, **config) as it, trainer.trains(it.proxy):
            yield it
    finally:
        await engine.aclose()


async def test_weights_that_vllm_cannot_name_have_the_version_the_trainer_declared(trainer: Trainer, tmp_path: Path):
    """First of all: nobody has told this vLLM a version yet."""
    async with talking(trainer, tmp_path, max_output_tokens=8) as it:
        await trainer.order("version", version="step-0")
        await it.say(user("one"))
        await trainer.order("pause")
        await trainer.swap(tell=False)
        await trainer.order("resume", version="step-1")
        await it.say(user("two"))
        ended = await it.end()
    assert [record.policy_version for record in ended.records] == ["step-0", "step-1"]
    assert ended.row["num_policy_versions"] == 2.0
    assert (ended.row["mask_sample"], ended.ledger.holes) == (False, ())


async def test_what_runs_finishes_on_the_old_weights_and_what_is_held_begins_on_the_new(
    trainer: Trainer, tmp_path: Path
):
    await trainer.post("/update_weight_version", {"new_version": f"step-{trainer.step}"})
    old = f"step-{trainer.step}"
    async with talking(trainer, tmp_path, max_output_tokens=64) as it, asyncio.TaskGroup() as group:
        running = group.create_task(it.ask([user("one")]))
        await until(it.proxy.fence, running=1)
        assert (await trainer.order("pause", mode="wait"))["running"] == 0
        await running
        held = group.create_task(it.ask([user("two")]))
        await until(it.proxy.fence, held=1)
        new = await trainer.swap()
        await trainer.order("resume")
        await held
        ended = await it.end()
    assert [record.policy_version for record in ended.records] == [old, new]
    assert old != new


async def test_the_new_weights_are_others_and_the_old_ones_come_back(trainer: Trainer, tmp_path: Path):
    """So that a version on a record stands for what sampled it."""
    async with talking(trainer, tmp_path, max_output_tokens=12, temperature=0.0) as it:
        said = list[str]()
        for number in range(3):
            said.append((await it.ask([user("Say something.")], user=f"{number}"))["content"])
            await trainer.order("pause")
            await trainer.swap()
            await trainer.order("resume")
    assert said[0] == said[2] != said[1]


async def test_an_aborted_generation_is_sampled_again_on_the_new_weights_and_nobody_notices(
    trainer: Trainer, tmp_path: Path
):
    async with talking(trainer, tmp_path, max_output_tokens=LONG) as it, asyncio.TaskGroup() as group:
        asking = group.create_task(it.say(user("A long answer, please.")))
        await until(it.proxy.fence, running=1)
        await asyncio.sleep(0.3)
        state = await trainer.order("pause", mode="abort")
        assert (state["running"], state["resampled"], state["broken"]) == (0, 1, 0)
        new = await trainer.swap()
        await trainer.order("resume")
        await asking
        ended = await it.end()
    (record,) = ended.records
    assert (record.policy_version, record.holes) == (new, ())
    assert ended.trained == ended.tokens(0)


async def test_generations_that_go_on_over_the_swap_name_both_versions(trainer: Trainer, tmp_path: Path):
    """Three at once: the random model may end one of them before the swap."""
    await trainer.post("/update_weight_version", {"new_version": f"step-{trainer.step}"})
    old = f"step-{trainer.step}"
    async with talking(trainer, tmp_path, max_output_tokens=LONG) as it, asyncio.TaskGroup() as group:
        asking = [group.create_task(it.ask([user(f"Long answer {n}.")])) for n in range(3)]
        await until(it.proxy.fence, running=3)
        await asyncio.sleep(0.3)
        assert (await trainer.order("pause", mode="keep"))["paused"]
        await trainer.post("/pause?mode=keep")
        new = await trainer.swap()
        await trainer.post("/resume")
        await trainer.order("resume")
        for task in asking:
            await task
        ended = await it.end()
    versions = [record.policy_version for record in ended.records]
    assert set(versions) <= {old, f"{old}+{new}"}
    assert f"{old}+{new}" in versions
    assert ended.row["polar"]["policy_versions"]
    assert ended.ledger.holes == ()


async def test_vllm_s_own_abort_in_a_pause_is_sampled_again(trainer: Trainer, tmp_path: Path):
    """A trainer that stops vLLM itself (/pause?mode=abort) after it has closed the fence."""
    async with talking(trainer, tmp_path, max_output_tokens=LONG) as it, asyncio.TaskGroup() as group:
        asking = group.create_task(it.say(user("A long answer, please.")))
        await until(it.proxy.fence, running=1)
        await asyncio.sleep(0.3)
        await trainer.order("pause", mode="keep")
        await trainer.post("/pause?mode=abort")
        new = await trainer.swap()
        await trainer.post("/resume")
        await trainer.order("resume")
        await asking
        ended = await it.end()
    assert [record.policy_version for record in ended.records] == [new]


@pytest.mark.parametrize("harness", ["pi", "mini_swe_agent"])
async def test_a_real_cli_works_on_while_weights_are_swapped_under_it(trainer: Trainer, tmp_path: Path, harness: str):
    await trainer.post("/update_weight_version", {"new_version": f"step-{trainer.step}"})
    config = await settings(
        tmp_path,
        engine={"kind": "vllm", "base_urls": [trainer.vllm], "tokenizer": None},
        harness={"name": harness, "command": ()},
        proxy={"max_calls": 4, "max_output_tokens": 48},
        budget={"agent": 180.0},
    )
    async with open_proxy(config) as proxy, trainer.trains(proxy), asyncio.TaskGroup() as group:
        running = group.create_task(rollout(job(config), proxy, config))
        await until(proxy.fence, running=1)
        await trainer.order("pause", mode="abort")
        new = await trainer.swap()
        await trainer.order("resume")
        result = await asyncio.wait_for(running, 300)
    assert result.outcome not in INFRASTRUCTURE, result.detail
    assert {record.policy_version for record in result.ledger.records} == {new}
    assert result.ledger.holes == ()
    row = delivered(result)
    assert row["seconds_held"] > 0
    assert row["trainable_tokens"] > 0

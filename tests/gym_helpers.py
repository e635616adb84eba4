"""Rollouts a test holds in its hand: a harness whose installation waits, so that no sandbox is made."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from engine_helpers import VllmServer
from polar_env.config import HarnessConfig, PolarConfig, load
from polar_env.errors import HarnessError
from polar_env.gym import contract
from polar_env.gym.environment import PolarEnvironment
from polar_env.harness import Mount
from polar_env.types import CallKind, WireApi

PARAMS = {"input": [{"role": "user", "content": "fix it"}], "temperature": 1.0, "top_p": 1.0}
"""What NeMo-RL leaves in ``responses_create_params``."""


@dataclass
class Stage:
    """What the rollouts of a test do. They end, without a CLI, when ``gate`` is set."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def play(self) -> None:
        self.begun += 1
        async with self._changed:
            self._changed.notify_all()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def until(self, rollouts: int) -> None:
        """Wait until that many have begun, ever."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.begun >= rollouts)


class Gated:
    """A preset (`gym_helpers:Gated`) that waits for its stage and then cannot be installed: masked, with a reason."""

    name = "gated"
    wire = WireApi.CHAT
    stage: ClassVar[Stage]

    def __init__(self, config: HarnessConfig) -> None:
        self.version = config.version

    async def install(self, store: Path) -> tuple[Mount, ...]:
        await Gated.stage.play()
        raise HarnessError(f"the test has no CLI (version {self.version!r})")

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        return CallKind.AGENT, ""


class Buggy(Gated):
    """A preset of ours with a bug in it."""

    async def install(self, store: Path) -> tuple[Mount, ...]:
        return (Mount(store, str(1 // 0)),)


def configured(tmp_path: Path, url: str, **groups: Any) -> PolarConfig:
    """Embedded tasks, a gated harness, an engine at ``url``; ``groups`` override."""
    base: dict[str, Any] = {
        "engine": {"kind": "vllm", "base_urls": [url], "model": "tiny", "connect_timeout": 2.0},
        "harness": {"name": "gym_helpers:Gated"},
        "store": {"cache": str(tmp_path / "cache"), "sessions": str(tmp_path / "sessions")},
        "data": "embedded",
    }
    return load(base | groups)


@asynccontextmanager
async def served(tmp_path: Path, grace: float = 30.0, **groups: Any) -> AsyncGenerator[PolarEnvironment]:
    """An environment whose engine passes its check."""
    async with (
        VllmServer().run() as engine,
        PolarEnvironment(configured(tmp_path, engine.url, **groups), grace).opened() as environment,
    ):
        yield environment


def row(index: int = 0, **fields: Any) -> dict[str, Any]:
    """A dataset row of the embedded task as Gym posts it."""
    return {
        "responses_create_params": PARAMS,
        "task_id": "polar-env__expiry-2",
        "_ng_task_index": 0,
        "_ng_rollout_index": index,
        **fields,
    }


def masked(answer: Mapping[str, Any]) -> str:
    """Why a row is masked; it must be, and be one NeMo-RL takes."""
    assert contract.violations(answer) == []
    assert (answer["reward"], answer["mask_sample"]) == (0.0, True)
    return str(answer["failure_reason"])

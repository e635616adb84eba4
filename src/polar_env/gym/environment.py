"""PolarEnvironment: rollouts for a NeMo Gym server. Owns engine, proxy and queue; answers every row with a valid row.

NeMo-RL has no tolerance (one bad row ends the batch) and Gym posts a row again, for ever, when a connection drops. So
``run`` never raises for what a row can meet, and a row posted twice while its rollout runs joins that rollout.
"""

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from polar_env.config import PolarConfig
from polar_env.engine import Engine
from polar_env.errors import ConfigError, PolarError, SandboxError
from polar_env.grade.swebench import grade
from polar_env.gym import rows
from polar_env.proxy.server import ProxyServer
from polar_env.reward import decide
from polar_env.rollout import RolloutJob, make_engine, rollout
from polar_env.tasks import Task
from polar_env.tasks import rows as task_rows
from polar_env.tasks.prepare import prepare
from polar_env.trajectory import build
from polar_env.types import Outcome, RolloutResult, Sampling, SealedLedger, VerdictStatus

log = logging.getLogger(__name__)

REPOST_GRACE = 30.0
"""Seconds a rollout outlives the last connection that waited for it. Gym re-posts a dropped row after 0.5 s
(nemo_gym/server_utils.py, _request_with_retries); past the grace nobody wants the result and it is cancelled."""


@dataclass(slots=True)
class _Running:
    """One rollout under way, and how many connections wait for it."""

    task: "asyncio.Task[dict[str, Any]]"
    waiters: int = 0


class PolarEnvironment:
    """Use as ``async with PolarEnvironment(config).opened() as environment``; then ``await environment.run(row)``."""

    def __init__(self, config: PolarConfig) -> None:
        self.config = config
        self._engine: Engine = make_engine(config)
        self._proxy = ProxyServer(self._engine, config.proxy)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._running: dict[str, _Running] = {}
        self._checked = False
        self._check_lock = asyncio.Lock()
        self._tasks: dict[str, Task] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator["PolarEnvironment"]:
        """Serve until the block ends; then every rollout is cancelled and torn down."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._engine.aclose)
            await stack.enter_async_context(self._proxy)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            try:
                yield self
            finally:
                for running in self._running.values():
                    running.task.cancel()

    async def run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One dataset row -> one Gym result row that NeMo-RL accepts, whatever happens.

        Args:
            row: ``responses_create_params`` and ``task_id`` (or ``instance``, a whole task row), optionally
                ``harness`` (a name: groups of several harnesses in one run) and ``data`` (where its task is).
                Gym's ``_ng_*`` indexes are honoured.
        """
        key = _key(row)
        running = self._running.get(key) or self._start(key, row)
        running.waiters += 1
        try:
            result = await asyncio.shield(running.task)
        except asyncio.CancelledError:
            running.waiters -= 1
            asyncio.get_running_loop().call_later(REPOST_GRACE, self._abandon, key, running)
            raise
        self._running.pop(key, None)
        return result

    def _start(self, key: str, row: Mapping[str, Any]) -> _Running:
        running = self._running[key] = _Running(self._group.create_task(self._answer(row)))
        return running

    def _abandon(self, key: str, running: _Running) -> None:
        """Nobody came back for this rollout: stop it, and forget its result."""
        if running.waiters == 0 and self._running.get(key) is running:
            del self._running[key]
            running.task.cancel()

    async def _answer(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Queue for a slot (free), run, and turn the result into a row."""
        name = str(row.get("harness") or self.config.harness.name)
        async with self._slots:
            try:
                await self._check()
                result = await rollout(await self._job(row, name), self._proxy, self.config)
            except PolarError as error:
                result = unstarted(_task_id(row), name, error)
            except Exception as error:  # a bug of ours costs one masked row, not the batch
                log.exception("rollout of %s with %s", _task_id(row), name)
                result = unstarted(_task_id(row), name, SandboxError(f"{type(error).__name__}: {error}"))
        return await asyncio.to_thread(
            rows.row,
            result,
            _mapping(row, "responses_create_params"),
            model=self.config.engine.model or "policy",
            max_tokens=self.config.trajectory.max_tokens,
        )

    async def _check(self) -> None:
        """Prove the engine before the first rollout, once. An engine that is not up yet is asked again next time."""
        async with self._check_lock:
            if not self._checked:
                facts = await self._engine.check()
                log.info("engine %s: window %d, policy %s", facts.model, facts.max_model_len, facts.policy_version)
                self._checked = True

    async def regrade(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Grade a finished row's patch (``polar.patch``, base64) again: its new reward and masks.

        Raises ConfigError when the row names no known task or carries no patch.
        """
        polar = _mapping(row, "polar")
        if not isinstance(polar.get("patch"), str):
            raise ConfigError("this row has no polar.patch: only rows written by polar_env can be graded again")
        prepared = await prepare(
            await self._task({**row, **polar}), self.config.store.cache.expanduser(), sandbox=self.config.sandbox
        )
        patch = base64.b64decode(polar["patch"])
        verdict = await grade(prepared, patch, sandbox=self.config.sandbox, timeout=self.config.budget.grade)
        complete = bool(polar.get("complete")) and bool(row.get("trainable_tokens"))
        decision = decide(Outcome(polar.get("outcome", Outcome.COMPLETED)), verdict, complete, self.config.reward)
        return {
            "reward": decision.reward,
            "mask_sample": decision.masked,
            "instance_config": {**_mapping(row, "instance_config"), "mask_sample": decision.masked},
            "resolved": verdict.status is VerdictStatus.RESOLVED,
        }

    async def _job(self, row: Mapping[str, Any], harness: str) -> RolloutJob:
        ours = self.config.harness
        other = {"name": harness, "version": "", "command": (), "extra_args": ()}
        return RolloutJob(
            task=await self._task(row),
            harness=ours if harness == ours.name else ours.model_copy(update=other),
            sampling=_sampling(_mapping(row, "responses_create_params"), self.config),
            index=int(row.get("_ng_rollout_index") or 0),
        )

    async def _task(self, row: Mapping[str, Any]) -> Task:
        """The row's own ``instance``, else the task of that id in the row's or the configured data."""
        if instance := _mapping(row, "instance"):
            return task_rows.task_of(instance)
        task_id = _task_id(row)
        data = str(row.get("data") or self.config.data)
        if task_id not in self._tasks:
            found = await asyncio.to_thread(task_rows.load, data, [task_id])
            self._tasks.update({task.task_id: task for task in found})
        return self._tasks[task_id]


def unstarted(task_id: str, harness: str, error: PolarError) -> RolloutResult:
    """The result of a rollout that could not begin: masked, with its reason."""
    ledger = SealedLedger("", (), frozenset(), frozenset(), ())
    config = PolarConfig()
    return RolloutResult(
        task_id=task_id,
        harness=harness,
        outcome=error.outcome,
        detail=str(error),
        verdict=None,
        decision=decide(error.outcome, None, complete=True, config=config.reward),
        trajectory=build(ledger, config.trajectory),
        ledger=ledger,
        patch=b"",
        exit=None,
    )


def _mapping(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object of a row; absent and null are empty."""
    return cast("Mapping[str, Any]", row.get(key) or {})


def _task_id(row: Mapping[str, Any]) -> str:
    inside = _mapping(row, "instance").get("instance_id")
    return str(row.get("task_id") or row.get("instance_id") or inside or "")


def _key(row: Mapping[str, Any]) -> str:
    """Identity of a posted row. Rollouts of one group differ in their index, so equal rows are one rollout."""
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()


def _sampling(params: Mapping[str, Any], config: PolarConfig) -> Sampling:
    """NeMo-RL puts the policy's sampling on the row (_prepare_nemo_gym_rows): it wins over our configuration."""
    proxy = config.proxy
    return Sampling(
        temperature=_first(params.get("temperature"), proxy.temperature),
        top_p=_first(params.get("top_p"), proxy.top_p),
        top_k=proxy.top_k,
        max_tokens=_first(params.get("max_output_tokens"), proxy.max_output_tokens),
    )


def _first(asked: Any, default: Any) -> Any:
    return default if asked is None else asked

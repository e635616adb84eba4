"""PolarEnvironment: rollouts for a NeMo Gym server. Owns engine, proxy and queue; answers every row with a valid row.

NeMo-RL has no tolerance (one bad row ends the batch) and Gym posts a row again, for ever, when a connection drops. So
``run`` never raises for what a row can meet, and a row posted twice while its rollout runs joins that rollout.
"""

import asyncio
import base64
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

from polar_env import capacity
from polar_env.config import PolarConfig
from polar_env.engine import Engine
from polar_env.errors import ConfigError, PolarError, SandboxError, boundary
from polar_env.grade.grading import grade
from polar_env.gym import orders, revive, rows
from polar_env.gym.contract import ContractError
from polar_env.gym.flights import Flight, Flights
from polar_env.gym.groups import Chosen, Rest, Stragglers, place_of
from polar_env.gym.metrics import Metrics
from polar_env.named import harness_named, make_engine
from polar_env.proxy import control
from polar_env.proxy.server import ProxyServer
from polar_env.reward import decide
from polar_env.rollout import RolloutJob, rollout
from polar_env.tasks import Task
from polar_env.tasks import rows as task_rows
from polar_env.tasks.prepare import prepare
from polar_env.trajectory import build
from polar_env.types import RolloutResult, Sampling, SealedLedger
from polar_env.verdict import Flag, VerdictStatus

log = logging.getLogger(__name__)

REPOST_GRACE = 30.0
"""Seconds a rollout outlives the last connection that waited for it. Gym re-posts a dropped row after 0.5 s
(nemo_gym/server_utils.py, _request_with_retries); past the grace nobody wants the result and it is cancelled."""


class Elsewhere(orders.Obeys, Protocol):
    """Where rollouts run when not here: the workers of a cluster."""

    async def run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row in, its finished row out. Raises PolarError."""
        ...


class PolarEnvironment:
    """Use as ``async with PolarEnvironment(config).opened() as environment``; then ``await environment.run(row)``."""

    def __init__(
        self, config: PolarConfig, repost_grace: float = REPOST_GRACE, elsewhere: Elsewhere | None = None
    ) -> None:
        """``elsewhere`` runs the rollouts (workers of a cluster); without it they run here."""
        self.config = config
        self._elsewhere = elsewhere
        self._flights = Flights(repost_grace, self._ended)
        self._stragglers = Stragglers(config.stragglers)
        self._engine: Engine = make_engine(config)
        self._proxy = ProxyServer(self._engine, config.proxy, updates=config.engine)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._checked = False
        self._check_lock = asyncio.Lock()
        self._refusal: tuple[float, PolarError] | None = None
        self._tasks: dict[tuple[str, str], Task] = {}
        self.metrics = Metrics()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator["PolarEnvironment"]:
        """Serve until the block ends; then every rollout is cancelled and torn down.

        Raises ConfigError: so many rollouts at a time need more open files than this process may have.
        """
        capacity.open_files(self.config.concurrency if self._elsewhere is None else 0)
        capacity.settle()
        capacity.threads(self.config.concurrency)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._engine.aclose)
            await stack.enter_async_context(self._proxy)
            await stack.enter_async_context(self._flights.opened())
            yield self

    async def run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One dataset row -> one Gym result row that NeMo-RL accepts, whatever happens; numbers as arrays
        (``rows.compact``).

        Args:
            row: ``responses_create_params`` and ``task_id`` (or ``instance``, a whole task row), optionally
                ``harness`` (a name: groups of several harnesses in one run) and ``data`` (where its task is).
                Gym's ``_ng_*`` indexes are honoured.
        """
        place = place_of(row, _task_id(row), _harness(row, self.config))
        try:
            return await self._flights.join(_key(row), place, lambda flight: self._begin(row, flight))
        except PolarError as error:
            return placeholder(row, error, self.config)

    async def order(self, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
        """A trainer's order, from somebody who may give it: to the fence (``proxy.control``), or to rollouts under way
        (``gym.orders``). Returns (HTTP status, JSON)."""
        order = orders.order_of(method, path)
        if order is not None:
            return await orders.answer(order, raw, self._flights, self._elsewhere)
        if self._elsewhere is not None:
            return await self._elsewhere.order(method, path, raw)
        return await control.answer(self._proxy.fence, method, path, raw)

    def _begin(self, row: Mapping[str, Any], flight: Flight) -> Coroutine[Any, Any, dict[str, Any]]:
        return self._counted(row, flight, self._stragglers.began(flight.key, flight.place))

    def _ended(self, flight: Flight, answer: Mapping[str, Any]) -> None:
        self._hurry(self._stragglers.ended(flight.key, flight.place, answer))

    async def _counted(self, row: Mapping[str, Any], flight: Flight, rest: Rest | None) -> dict[str, Any]:
        """Play a row and count it. ``rest``: its group has nearly finished already."""
        self._hurry(rest)
        with self.metrics.running():
            answer = await self._played(row, flight)
        try:
            self.metrics.observe(answer)
        except Exception:  # a number that cannot be counted must not cost the row, or the other rollouts
            log.exception("counting the rollout of %s", _task_id(row))
        return answer

    async def _played(self, row: Mapping[str, Any], flight: Flight) -> dict[str, Any]:
        """The row's answer; of a rollout that was cancelled for a reason, once it is torn down, the placeholder."""
        try:
            return await self._answer(row, flight)
        except asyncio.CancelledError:
            if flight.reason is None:
                raise
            return placeholder(row, flight.reason, self.config)

    def _hurry(self, rest: Rest | None) -> None:
        if rest is None:
            return
        if self._elsewhere is not None:
            self._flights.spawn(orders.hurry_elsewhere(rest, self._elsewhere))
        else:
            self._flights.hurry(Chosen(keys=rest.keys), rest.seconds, rest.error)

    async def _answer(self, row: Mapping[str, Any], flight: Flight) -> dict[str, Any]:
        """Queue for a slot (free), run, and turn the result into a row. Never raises but when it is cancelled."""
        posted = time.monotonic()
        try:
            if self._elsewhere is not None:
                return await self._elsewhere.run(row)
            async with self._slots:
                queued = time.monotonic() - posted
                await self._check()
                result = await rollout(await self._job(row), self._proxy, self.config, flight.opened)
            result = replace(result, seconds={**result.seconds, "queue": queued})
            return await asyncio.to_thread(_row, row, result, self.config)
        except PolarError as error:
            return placeholder(row, error, self.config)
        except Exception as error:  # a bug of ours costs one masked row, not the batch
            log.exception("the rollout of %s", _task_id(row))
            return placeholder(row, SandboxError(f"{type(error).__name__}: {error}"), self.config)

    async def _check(self) -> None:
        """Prove the engine before the first rollout, once. An engine that is not up yet is asked again by the next
        row; rows that waited while it was asked share the answer, so a dead one costs them one timeout together."""
        self._proxy.fence.usable()
        asked = time.monotonic()
        async with self._check_lock:
            if self._checked:
                return
            if self._refusal is not None and self._refusal[0] >= asked:
                raise self._refusal[1]
            try:
                facts = await self._proxy.fence.check()
            except PolarError as error:
                self._refusal = (time.monotonic(), error)
                raise
            log.info("engine %s: window %d, policy %s", facts.model, facts.max_model_len, facts.policy_version)
            self._checked = True

    async def regrade(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Grade a finished row's patch (``polar.patch``, base64) again: its new reward, masks and ``polar.verdict``.

        Raises:
            ConfigError: the row names no known task or carries no patch.
            GradeError: the grader failed; the row's reward is as it was.
            CaptureError: the row was masked, this verdict would train it, and its tokens are not to be had: they are
                read from its session's log in ``store.sessions``.
        """
        polar = _mapping(row, "polar")
        if not isinstance(polar.get("patch"), str):
            raise ConfigError("this row has no polar.patch: only rows written by polar_env can be graded again")
        with boundary(ConfigError, "reading the row's polar.outcome and polar.patch"):
            outcome, patch = revive.ended(polar), base64.b64decode(polar["patch"], validate=True)
        prepared = await prepare(
            await self._task({**row, **polar}), self.config.store.cache.expanduser(), sandbox=self.config.sandbox
        )
        verdict = await grade(prepared, patch, sandbox=self.config.sandbox, timeout=self.config.budget.grade)
        if row.get("egress_packets"):
            verdict = verdict.flagged(Flag.EGRESS)
        # A row without token ids is masked for that alone, and its reward is what an evaluation and `polar export
        # --format sft` go by. Any other that was masked holds a placeholder token, which no verdict makes fit to train.
        text = bool(row.get("text_only"))
        decision = decide(outcome, verdict, bool(polar.get("complete")), self.config.reward)
        if not (decision.masked or text or (row.get("trainable_tokens") and not row.get("mask_sample"))):
            sessions = self.config.store.sessions.expanduser()
            made = await asyncio.to_thread(revive.revived, row, outcome, verdict, decision, sessions)
            return made | {"resolved": verdict.status is VerdictStatus.RESOLVED}
        masked = decision.masked or text
        return {
            "reward": decision.reward,
            "mask_sample": masked,
            "instance_config": {**_mapping(row, "instance_config"), "mask_sample": masked},
            "resolved": verdict.status is VerdictStatus.RESOLVED,
            "polar": {**polar, "verdict": rows.told(verdict)},
        }

    async def _job(self, row: Mapping[str, Any]) -> RolloutJob:
        with boundary(ConfigError, "reading the dataset row"):
            index = int(row.get("_ng_rollout_index") or 0)
            sampling = _sampling(_mapping(row, "responses_create_params"), self.config)
        harness = harness_named(self.config.harness, _harness(row, self.config))
        return RolloutJob(await self._task(row), harness, sampling, index)

    async def _task(self, row: Mapping[str, Any]) -> Task:
        """The row's own ``instance``, else the task of that id in the row's or the configured data."""
        if instance := _mapping(row, "instance"):
            return task_rows.task_of(instance)
        task_id, data = _task_id(row), str(row.get("data") or self.config.data)
        if not task_id:
            raise ConfigError("the row has no task_id (and no instance): write rows with `polar dataset`")
        if (data, task_id) not in self._tasks:
            found = await asyncio.to_thread(task_rows.load, data, [task_id])
            self._tasks.update({(data, task.task_id): task for task in found})
        return self._tasks[data, task_id]


def placeholder(row: Mapping[str, Any], error: PolarError, config: PolarConfig) -> dict[str, Any]:
    """The answer to a row whose rollout could not begin or was lost: valid, masked, with its reason."""
    result = unstarted(_task_id(row), _harness(row, config), error)
    try:
        return _row(row, result, config)
    except ContractError:  # the row's own parameters cannot be echoed
        return _row({}, result, config)


def _row(row: Mapping[str, Any], result: RolloutResult, config: PolarConfig) -> dict[str, Any]:
    params = _mapping(row, "responses_create_params")
    model = config.engine.model or "policy"
    return rows.compact(result, params, model=model, max_tokens=config.trajectory.max_tokens)


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
    """A nested object of a row; anything else is empty."""
    value = row.get(key)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _task_id(row: Mapping[str, Any]) -> str:
    inside = _mapping(row, "instance").get("instance_id")
    return str(row.get("task_id") or row.get("instance_id") or inside or "")


def _harness(row: Mapping[str, Any], config: PolarConfig) -> str:
    return str(row.get("harness") or config.harness.name)


def _key(row: Mapping[str, Any]) -> str:
    """Identity of a posted row. Rollouts of one group differ in their index, so equal rows are one rollout."""
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()


def _sampling(params: Mapping[str, Any], config: PolarConfig) -> Sampling:
    """NeMo-RL puts the policy's sampling on the row (_prepare_nemo_gym_rows): it wins over our configuration."""
    proxy = config.proxy
    temperature, top_p, limit = (params.get(name) for name in ("temperature", "top_p", "max_output_tokens"))
    return Sampling(
        temperature=proxy.temperature if temperature is None else float(temperature),
        top_p=proxy.top_p if top_p is None else float(top_p),
        top_k=proxy.top_k,
        max_tokens=proxy.max_output_tokens if limit is None else int(limit),
    )

"""Rollouts spread over a Ray cluster: one worker a node, each a PolarEnvironment with a proxy and sandboxes of its own.

The Gym server stays a door: it joins rows that are posted twice, picks a node and waits. A row whose worker or node is
lost runs again elsewhere; a worker that cannot be reached is killed first, so that no rollout is played twice at once.
"""

import asyncio
import hashlib
import logging
import math
import pickle
import sys
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polar_env.config import PolarConfig, StragglersConfig, load
from polar_env.errors import ConfigError, SandboxError, boundary
from polar_env.gym.environment import PolarEnvironment
from polar_env.proxy import control

log = logging.getLogger(__name__)

AT_ONCE = 10_000
"""Calls an actor takes at a time; how many rollouts run is ``concurrency``, and the rest wait there for free."""

CROWDED = 1.25
"""A node is passed over when it holds more than this times its fair share: siblings then use the next node."""


class Worker:
    """The actor on a node. ``live`` runs as long as the worker does."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = load(config)
        self._environment: PolarEnvironment | None = None
        self._settled, self._stopping = asyncio.Event(), asyncio.Event()

    async def live(self) -> None:
        """Serve rollouts until ``stop``. Raises what keeps the node from serving."""
        try:
            async with PolarEnvironment(self._config, repost_grace=0.0).opened() as environment:
                self._environment = environment
                self._settled.set()
                await self._stopping.wait()
        finally:
            self._environment = None
            self._settled.set()

    async def run(self, row: Mapping[str, Any]) -> bytes:
        """One row in, one row out, pickled: its numbers are arrays (``rows.compact``). Raises SandboxError: this node
        cannot serve."""
        await self._settled.wait()
        if self._environment is None:
            raise SandboxError("the worker of this node has ended")
        answer = await self._environment.run(row)
        answer["polar"] = {**answer.get("polar", {}), "node": ray.get_runtime_context().get_node_id()}
        return await asyncio.to_thread(pickle.dumps, answer)

    async def order(self, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
        """A trainer's order to this node's fence. Raises SandboxError: this node cannot serve."""
        await self._settled.wait()
        if self._environment is None:
            raise SandboxError("the worker of this node has ended")
        return await self._environment.order(method, path, raw)

    async def stop(self) -> None:
        self._stopping.set()


@dataclass(slots=True)
class _Node:
    """A node with its worker, and the rows it holds."""

    node_id: str
    actor: Any
    rows: int = 0


class Fleet:
    """The workers of a cluster. Use as ``async with Fleet(config, address).opened() as fleet``."""

    def __init__(self, config: PolarConfig, address: str = "") -> None:
        """``address``: Ray's GCS address, as Gym and NeMo-RL hand it on; empty: the Ray this process already joined."""
        self._settings = config.workers
        alone = {"workers": config.workers.model_copy(update={"ray": False}), "stragglers": StragglersConfig()}
        worker = config.model_copy(update=alone)  # a worker sees only its part of a group
        self._config = worker.model_dump(mode="json")
        self._address = address
        self._nodes: dict[str, _Node] = {}
        self._changed = asyncio.Condition()
        self._standing: dict[str, bytes] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator["Fleet"]:
        """Serve until the block ends; then every worker ends its rollouts and is gone.

        Raises ConfigError: there is no Ray cluster to join.
        """
        await asyncio.to_thread(self._join)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follow(group))
            try:
                yield self
            finally:
                following.cancel()
                await asyncio.shield(self._end())

    async def run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row's result. Raises SandboxError when no node serves, or its workers were lost more than ``retries``."""
        lost: BaseException | None = None
        for _ in range(1 + self._settings.retries):
            node = await self._pick(row)
            node.rows += 1
            try:
                return cast("dict[str, Any]", await asyncio.to_thread(pickle.loads, await self._play(node, row)))
            except RayActorError as error:
                lost = error
                await self._lose(node, error)
            finally:
                node.rows -= 1
        raise SandboxError(f"the workers that ran it were lost ({str(lost).splitlines()[0]}); see the nodes' Ray logs")

    async def order(self, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
        """The order, to every node at once: (the worst status, node -> what it said). A node that was lost has nothing
        left to fence; one that joins later is told what stands."""
        self._standing = standing(self._standing, path, raw)
        async with asyncio.TaskGroup() as group:
            asked = {
                node.node_id: group.create_task(self._told(node, node.actor.order.remote(method, path, raw)))
                for node in self._nodes.values()
            }
        said = {node_id: task.result() for node_id, task in asked.items()}
        return max((status for status, _ in said.values()), default=200), {
            "nodes": {node_id: body for node_id, (_, body) in said.items()}
        }

    async def _told(self, node: _Node, answer: Awaitable[Any]) -> tuple[int, dict[str, Any]]:
        """What a node answers to an order. One that cannot be reached is ended: it might go on sampling."""
        try:
            return cast("tuple[int, dict[str, Any]]", await answer)
        except RayActorError as error:
            await self._lose(node, error)
            return 200, {"lost": str(error).splitlines()[0]}
        except RayError as error:
            ended = isinstance(error, RayTaskError) and isinstance(error.cause, SandboxError)
            return (200 if ended else 500), {"lost": str(error).splitlines()[-1]}

    async def _play(self, node: _Node, row: Mapping[str, Any]) -> bytes:
        reference = node.actor.run.remote(dict(row))
        try:
            return cast("bytes", await reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            raise SandboxError(f"node {node.node_id[:12]}: {error.cause}") from error

    # --- which node --------------------------------------------------------------------------------------------

    async def _pick(self, row: Mapping[str, Any]) -> _Node:
        """The node for this row's group (its prepared task is there), or the next one when that is crowded."""
        try:
            async with asyncio.timeout(self._settings.wait), self._changed:
                await self._changed.wait_for(lambda: bool(self._nodes))
        except TimeoutError:
            raise SandboxError(
                f"no Ray node {self._wanted()}served for {self._settings.wait:g} s; look at `ray status`"
            ) from None
        return choose(row, tuple(self._nodes.values()))

    def _wanted(self) -> str:
        return f"with the resource {self._settings.resource!r} " if self._settings.resource else ""

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        """Start a worker on every node that joins. Ray tells of nodes only when it is asked."""
        while True:
            for node_id in await asyncio.to_thread(self._alive):
                if node_id not in self._nodes:
                    node = self._start(node_id)
                    group.create_task(self._watch(node))
                    self._admit(node, group)
                    async with self._changed:
                        self._changed.notify_all()
            await asyncio.sleep(self._settings.refresh)

    def _admit(self, node: _Node, group: asyncio.TaskGroup) -> None:
        """Orders and rows go to this node from now on, what stands first. At once, nothing awaited: an order between
        the two would never reach it, and a worker takes up calls in the order they were sent."""
        for order, raw in self._standing.items():
            group.create_task(self._told(node, node.actor.order.remote("POST", order, raw)))
        self._nodes[node.node_id] = node

    def _alive(self) -> list[str]:
        wanted = self._settings.resource
        nodes = cast("list[dict[str, Any]]", ray.nodes())
        return [node["NodeID"] for node in nodes if node["Alive"] and (not wanted or wanted in node["Resources"])]

    def _start(self, node_id: str) -> _Node:
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        made = cast("Any", ray.remote(Worker)).options(
            num_cpus=0,
            max_concurrency=AT_ONCE,
            scheduling_strategy=place,
            runtime_env={"py_executable": sys.executable},
        )
        return _Node(node_id, made.remote(self._config))

    async def _watch(self, node: _Node) -> None:
        """A worker that ended takes no more rows; the rows it held see that for themselves."""
        try:
            await node.actor.live.remote()
        except RayError as error:
            log.warning("the worker of node %s ended: %s", node.node_id, error)
        finally:
            if self._nodes.get(node.node_id) is node:
                del self._nodes[node.node_id]

    async def _lose(self, node: _Node, error: BaseException) -> None:
        """Nothing of a worker we lost sight of may go on: it is killed before its rows run elsewhere."""
        log.warning("node %s was lost: %s", node.node_id, error)
        if self._nodes.get(node.node_id) is node:
            del self._nodes[node.node_id]
        with suppress(RayError):
            await asyncio.to_thread(cast("Any", ray.kill), node.actor)

    # --- beginning and end -------------------------------------------------------------------------------------

    def _join(self) -> None:
        if ray.is_initialized():
            return
        if not self._address:
            raise ConfigError("workers.ray=true needs a Ray cluster: run under NeMo-RL or `gym env start`, or join one")
        with boundary(SandboxError, f"joining the Ray cluster at {self._address}"):
            ray.init(address=self._address, ignore_reinit_error=True, log_to_driver=False)

    async def _end(self) -> None:
        for node in tuple(self._nodes.values()):
            with suppress(RayError):
                await node.actor.stop.remote()


def standing(before: Mapping[str, bytes], path: str, raw: bytes) -> dict[str, bytes]:
    """The orders (path -> body) that hold after this one: a pause until its resume, and the last version. Pure."""
    place, _, order = path.rstrip("/").rpartition("/")
    held, named = dict(before), control.names(raw)
    if named is None:  # every fence refuses it, and nothing changes
        return held
    if order == "pause":
        held[f"{place}/pause"] = raw
    if order == "resume":
        held.pop(f"{place}/pause", None)
    if order in ("resume", "version") and named:
        held[f"{place}/version"] = raw
    return held


def choose(row: Mapping[str, Any], nodes: tuple[_Node, ...]) -> _Node:
    """Rendezvous hashing with bounded loads (Mirrokni et al. 2016): a group keeps its node while that has room, a lost
    node moves only its own groups, and no node holds more than ``CROWDED`` times its share. Pure."""
    group = f"{row.get('task_id') or row.get('instance')}\n{row.get('harness') or ''}"
    room = math.ceil(CROWDED * (1 + sum(node.rows for node in nodes)) / len(nodes))

    def rank(node: _Node) -> bytes:
        return hashlib.sha256(f"{group}\n{node.node_id}".encode()).digest()

    return next(node for node in sorted(nodes, key=rank) if node.rows < room)

"""Which node of a cluster a row goes to. The cluster itself is in tests/e2e/test_workers.py."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayError

from polar_env.config import load
from polar_env.engine.fence import Fence
from polar_env.errors import ConfigError
from polar_env.gym.workers import CROWDED, Fleet, _Node, choose, standing
from polar_env.proxy import control
from proxy_helpers import PlayedEngine


def cluster(*rows: int) -> tuple[_Node, ...]:
    return tuple(_Node(f"node{at}", None, held) for at, held in enumerate(rows))


def test_a_group_keeps_its_node_while_that_has_room():
    nodes = cluster(0, 0, 0, 0)
    homes = {task: choose({"task_id": task}, nodes).node_id for task in map(str, range(40))}
    assert {choose({"task_id": task}, nodes[::-1]).node_id for task in homes} == set(homes.values())
    assert all(choose({"task_id": task}, nodes[::-1]).node_id == home for task, home in homes.items())
    assert len(set(homes.values())) == 4


def test_harnesses_of_one_task_are_groups_of_their_own():
    nodes = cluster(*[0] * 16)
    homes = {choose({"task_id": "t", "harness": name}, nodes).node_id for name in ("codex", "pi", "claude_code")}
    assert len(homes) > 1


def test_a_lost_node_moves_only_its_own_groups():
    nodes = cluster(0, 0, 0, 0, 0)
    before = {task: choose({"task_id": task}, nodes) for task in map(str, range(60))}
    left = nodes[1:]
    moved = [task for task, home in before.items() if choose({"task_id": task}, left) is not home]
    assert moved == [task for task, home in before.items() if home is nodes[0]]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.text(max_size=8))
def test_no_node_is_given_more_than_its_share(rows: list[int], task: str):
    nodes = cluster(*rows)
    chosen = choose({"task_id": task}, nodes)
    assert chosen.rows < CROWDED * (1 + sum(rows)) / len(rows) + 1


@given(st.integers(1, 64), st.integers(1, 8))
def test_a_group_larger_than_a_node_spreads(siblings: int, size: int):
    nodes = cluster(*[0] * size)
    for _ in range(siblings):
        choose({"task_id": "one"}, nodes).rows += 1
    assert max(node.rows for node in nodes) <= CROWDED * siblings / size + 1


async def test_a_server_without_a_cluster_says_how_to_get_one():
    with pytest.raises(ConfigError, match="needs a Ray cluster"):
        async with Fleet(load({"workers": {"ray": True}})).opened():
            pass


def test_what_a_node_that_joins_later_must_be_told():
    """A pause until its resume, and the version declared last: otherwise it samples while the weights are changed."""
    paused = standing({}, "/control/pause", b'{"mode": "abort"}')
    assert paused == {"/control/pause": b'{"mode": "abort"}'}
    named = standing(paused, "/control/version", b'{"version": "step-1"}')
    assert list(named) == ["/control/pause", "/control/version"]
    resumed = standing(named, "/control/resume/", b'{"version": "step-2"}')
    assert resumed == {"/control/version": b'{"version": "step-2"}'}
    assert standing(resumed, "/control/resume", b"") == resumed
    assert standing(resumed, "/control/abort", b"") == resumed


@pytest.mark.parametrize(
    ("order", "raw"),
    [
        ("pause", b'{"mode": "hard"}'),
        ("resume", b'{"version": "step 3"}'),
        ("resume", b'{"version": 3}'),
        ("version", b'{"version": ""}'),
        ("version", b"{}"),
        ("version", b'{"version": null}'),
        ("version", b"step-3"),
        ("rollouts", b""),
    ],
)
async def test_an_order_that_every_fence_refused_changes_nothing_for_a_node_that_joins(order: str, raw: bytes):
    """A resume with a typing error leaves the others paused: a new node must not sample beside them."""
    stands = standing(standing({}, "/control/version", b'{"version": "a"}'), "/control/pause", b'{"mode": "keep"}')
    assert standing(stands, f"/control/{order}", raw) == stands
    fence = Fence(PlayedEngine())
    for path, body in stands.items():
        assert (await control.answer(fence, "POST", path, body))[0] == 200
    assert (await control.answer(fence, "POST", f"/control/{order}", raw))[0] in (400, 404)
    assert (fence.state.paused, fence.state.version) == (True, "a")


def test_a_resume_that_says_that_it_names_nothing_keeps_the_name():
    named = standing({}, "/control/version", b'{"version": "step-1"}')
    assert standing(named, "/control/resume", b'{"version": null}') == named


class Orders:
    """The ``order`` method of a node's actor: what it was sent, in order, and what it answers."""

    def __init__(self, answer: Any = (200, {})) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self._answer = answer

    @property
    def order(self) -> "Orders":
        return self

    async def _answered(self) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def remote(self, method: str, path: str, raw: bytes) -> Any:
        self.sent.append((path, raw))
        return self._answered()


async def test_an_order_given_while_a_node_joins_reaches_it_after_what_stood():
    """A resume that missed it would leave its rollouts held for ever; a missed pause would sample over the swap."""
    fleet, actor = Fleet(load({"workers": {"ray": True}})), Orders()
    await fleet.order("POST", "/control/pause", b"{}")
    async with asyncio.TaskGroup() as group:
        fleet._admit(_Node("late", actor), group)
        status, said = await fleet.order("POST", "/control/resume", b"{}")
    assert actor.sent == [("/control/pause", b"{}"), ("/control/resume", b"{}")]
    assert (status, list(said["nodes"])) == (200, ["late"])


async def test_a_node_that_could_not_obey_is_told_as_a_failure():
    """A trainer that reads 200 swaps the weights."""
    fleet = Fleet(load({"workers": {"ray": True}}))
    async with asyncio.TaskGroup() as group:
        fleet._admit(_Node("well", Orders()), group)
        fleet._admit(_Node("odd", Orders(RayError("no memory left"))), group)
        status, said = await fleet.order("POST", "/control/pause", b"{}")
    assert (status, said["nodes"]["odd"]) == (500, {"lost": "no memory left"})

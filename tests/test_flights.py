"""Rollouts under way: one row's connections come and go, a trainer cancels some, the last of a group are hurried."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from fence_helpers import until
from polar_env.errors import GroupTimeout, Straggler
from polar_env.gym.flights import ClosedError, Flight, Flights
from polar_env.gym.groups import Chosen, Place
from polar_env.proxy.session import Session
from polar_env.types import Outcome
from proxy_helpers import PlayedEngine, Stage, bit, stage

Row = dict[str, Any]


@dataclass
class Plays:
    """Rollouts that end when their session does or the test lets them, and take a moment to be torn down."""

    here: Stage
    flights: Flights
    sessions: dict[str, Session] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def play(self, flight: Flight) -> Row:
        self.sessions[flight.key] = session = self.here.open(f"session-{flight.key}")
        flight.opened(session)
        await self._tell()
        try:
            await session.ended.wait()
            return {"outcome": session.outcome, "why": str(session.first_error)}
        except asyncio.CancelledError:
            if flight.reason is None:
                raise
            return {"outcome": flight.reason.outcome, "why": str(flight.reason)}
        finally:
            await asyncio.shield(session.close())
            self.gone.append(flight.key)
            await self._tell()

    async def post(self, key: str, group: str = "7", task: str = "t") -> Row:
        return await self.flights.join(key, Place(task, "codex", group, key), self.play)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, stands: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(stands)

    async def begun(self, *keys: str) -> None:
        await self.until(lambda: self.sessions.keys() >= set(keys))

    async def call(self, key: str) -> int:
        """The harness of that rollout asks its model; the status it gets."""
        return (await self.here.ask("hi", key=self.sessions[key].key)).status


@asynccontextmanager
async def playing(engine: PlayedEngine | None = None, grace: float = 30.0) -> AsyncGenerator[Plays]:
    async with stage(engine or PlayedEngine()) as here, Flights(grace).opened() as flights:
        yield Plays(here, flights)


def all_of(**names: str) -> Chosen:
    return Chosen(**names)


# --- cancelled --------------------------------------------------------------------------------------------------


async def test_a_cancelled_group_is_torn_down_before_the_order_is_answered_and_the_others_play_on():
    async with playing() as it, asyncio.TaskGroup() as group:
        posts = {key: group.create_task(it.post(key, group=key[0])) for key in ("7a", "7b", "8a")}
        await it.begun(*posts)
        told = await it.flights.cancel(all_of(group="7"), "cancelled by the trainer's order (group 7)")
        assert sorted(it.gone) == ["7a", "7b"]
        assert [(entry["session"], entry["group"]) for entry in told] == [("session-7a", "7"), ("session-7b", "7")]
        assert (await posts["7a"])["outcome"] is Outcome.CANCELLED
        assert (await posts["7b"])["why"] == "cancelled by the trainer's order (group 7); its log: session-7b"
        assert await it.call("8a") == 200
        assert not posts["8a"].done()
        assert [entry["key"] for entry in it.flights.told()] == ["8a"]
        it.sessions["8a"].stop(Straggler("enough"))


@pytest.mark.parametrize(
    "wanted",
    [Chosen(task="t2"), Chosen(session="session-b"), Chosen(keys=frozenset("b")), Chosen(task="t2", group="7")],
)
async def test_an_order_ends_exactly_what_it_names(wanted: Chosen):
    async with playing() as it, asyncio.TaskGroup() as group:
        posts = {key: group.create_task(it.post(key, task=task)) for key, task in (("a", "t"), ("b", "t2"))}
        await it.begun("a", "b")
        assert [entry["key"] for entry in await it.flights.cancel(wanted, "so ordered")] == ["b"]
        assert it.gone == ["b"]
        await it.flights.cancel(Chosen(group="7"), "the rest")
        assert (await posts["a"])["why"].startswith("the rest")


async def test_what_its_engine_was_sampling_is_stopped():
    engine = PlayedEngine([bit("x"), asyncio.Event()])
    async with playing(engine) as it, asyncio.TaskGroup() as group:
        group.create_task(it.post("a"))
        await it.begun("a")
        asking = group.create_task(it.call("a"))
        await until(it.here.proxy.fence, running=1)
        await it.flights.cancel(all_of(task="t"), "so ordered")
        assert engine.live == 0
        assert await asking == 410


async def test_an_order_that_finds_nothing_ends_nothing():
    async with playing() as it, asyncio.TaskGroup() as group:
        group.create_task(it.post("a"))
        await it.begun("a")
        assert await it.flights.cancel(all_of(group="8"), "so ordered") == []
        assert it.gone == []
        await it.flights.cancel(all_of(group="7"), "the end of the test")


async def test_two_orders_at_once_tear_down_once_and_both_wait_for_it():
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(it.post("a"))
        await it.begun("a")
        orders = [group.create_task(it.flights.cancel(all_of(task="t"), f"order {at}")) for at in range(2)]
        assert [len(await order) for order in orders] == [1, 1]
        assert it.gone == ["a"]
        assert (await post)["why"].startswith("order 0")


async def test_both_connections_of_a_joined_row_are_told_that_it_was_cancelled():
    async with playing() as it, asyncio.TaskGroup() as group:
        posts = [group.create_task(it.post("a")) for _ in range(2)]
        await it.begun("a")
        await it.flights.cancel(all_of(task="t"), "so ordered")
        assert [(await post)["outcome"] for post in posts] == [Outcome.CANCELLED] * 2


async def test_a_row_cancelled_before_it_ever_ran_says_so():
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(_lost(it, "a"))
        await asyncio.sleep(0)  # posted, and its rollout not begun
        assert len(await it.flights.cancel(all_of(task="t"), "so ordered")) == 1
        assert await post == "so ordered"
        assert it.sessions == {}


async def test_a_row_cancelled_before_it_ever_ran_can_be_posted_again():
    """The next step may post the same task: it must not be told of an order that is over."""
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(_lost(it, "a"))
        await asyncio.sleep(0)
        await it.flights.cancel(all_of(task="t"), "so ordered")
        await post
        again = group.create_task(it.post("a"))
        await it.begun("a")
        it.sessions["a"].stop(Straggler("the end of the test"))
        assert (await again)["outcome"] is Outcome.STRAGGLER


async def _lost(it: Plays, key: str) -> str:
    with pytest.raises(Exception, match="ordered") as lost:
        await it.post(key)
    return str(lost.value)


async def test_a_row_posted_again_after_it_was_cancelled_is_a_new_rollout():
    async with playing() as it, asyncio.TaskGroup() as group:
        first = group.create_task(it.post("a"))
        await it.begun("a")
        await it.flights.cancel(all_of(task="t"), "so ordered")
        await first
        it.sessions.clear()
        again = group.create_task(it.post("a"))
        await it.begun("a")
        it.sessions["a"].stop(Straggler("the end of the test"))
        assert (await again)["outcome"] is Outcome.STRAGGLER


async def test_a_closed_server_takes_no_rows():
    async with playing() as it:
        pass
    with pytest.raises(ClosedError, match="not open"):
        await it.post("a")


# --- a lost connection ------------------------------------------------------------------------------------------


async def dropped(post: "asyncio.Task[Row]") -> None:
    post.cancel()
    with pytest.raises(asyncio.CancelledError):
        await post


async def test_a_row_whose_only_connection_is_lost_ends_alone_after_the_grace():
    async with playing(grace=0.05) as it, asyncio.TaskGroup() as group:
        lost, other = (group.create_task(it.post(key)) for key in "ab")
        await it.begun("a", "b")
        await dropped(lost)
        await it.until(lambda: it.gone == ["a"])
        assert await it.call("b") == 200
        it.sessions["b"].stop(Straggler("the end of the test"))
        await other


async def test_a_joined_row_outlives_one_of_its_connections():
    async with playing(grace=0.0) as it, asyncio.TaskGroup() as group:
        stays, goes = (group.create_task(it.post("a")) for _ in range(2))
        await it.begun("a")
        await dropped(goes)
        await asyncio.sleep(0.05)
        assert await it.call("a") == 200
        assert it.gone == []
        it.sessions["a"].stop(Straggler("the end of the test"))
        await stays


# --- hurried ----------------------------------------------------------------------------------------------------


async def hurried(it: Plays, seconds: float, then: Callable[[str], Straggler] = Straggler) -> int:
    return len(it.flights.hurry(all_of(group="7"), seconds, then("it was given its time")))


@pytest.mark.parametrize(("error", "outcome"), [(Straggler, Outcome.STRAGGLER), (GroupTimeout, Outcome.GROUP_TIMEOUT)])
async def test_a_rollout_that_has_had_its_time_is_ended_with_the_reason_and_its_harness_hears_no_more(
    error: type[Straggler], outcome: Outcome
):
    engine = PlayedEngine([bit("x"), asyncio.Event()])
    async with playing(engine) as it, asyncio.TaskGroup() as group:
        post = group.create_task(it.post("a"))
        await it.begun("a")
        asking = group.create_task(it.call("a"))
        await until(it.here.proxy.fence, running=1)
        assert await hurried(it, 0.05, error) == 1
        assert await asyncio.wait_for(post, 10) == {"outcome": outcome, "why": "it was given its time"}
        assert await asking == 404
        assert engine.live == 0


async def test_one_that_finishes_in_its_time_is_left_alone():
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(it.post("a"))
        await it.begun("a")
        assert await it.call("a") == 200
        await hurried(it, 30.0)
        it.sessions["a"].stop(ClosedError("it finished"))
        assert (await asyncio.wait_for(post, 10))["why"] == "it finished"


async def test_a_rollout_that_has_not_begun_to_play_has_its_whole_time_from_then_on():
    """It waits for a slot, or its sandbox starts: neither is its own doing."""
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(it.post("a"))
        await it.begun("a")
        assert await hurried(it, 0.1) == 1
        await asyncio.sleep(0.3)
        assert not post.done()
        assert await it.call("a") == 200
        assert (await asyncio.wait_for(post, 10))["outcome"] is Outcome.STRAGGLER


async def test_time_at_the_fence_is_not_the_straggler_s():
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(it.post("a"))
        await it.begun("a")
        await it.call("a")
        fence = it.here.proxy.fence
        await fence.pause()
        asking = group.create_task(it.call("a"))
        await until(fence, held=1)
        await hurried(it, 0.2)
        await asyncio.sleep(0.5)
        assert not post.done()
        fence.resume()
        assert await asking == 200
        assert (await asyncio.wait_for(post, 10))["outcome"] is Outcome.STRAGGLER


async def test_a_rollout_keeps_the_time_it_was_given_first():
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(it.post("a"))
        await it.begun("a")
        await it.call("a")
        assert await hurried(it, 60.0) == 1
        assert await hurried(it, 0.0) == 0
        await asyncio.sleep(0.05)
        assert not post.done()
        it.sessions["a"].stop(ClosedError("the end of the test"))


async def test_a_rollout_that_is_being_graded_is_left_alone():
    async with playing() as it, asyncio.TaskGroup() as group:
        post = group.create_task(it.post("a"))
        await it.begun("a")
        await it.call("a")
        await it.sessions["a"].close()
        assert it.flights.told()[0]["stage"] == "grading"
        await hurried(it, 0.0)
        await asyncio.sleep(0.05)
        assert not post.done()
        await it.flights.cancel(all_of(task="t"), "the end of the test")


async def test_a_trainer_sees_where_each_rollout_stands():
    async with playing() as it, asyncio.TaskGroup() as group:
        group.create_task(it.post("a"))
        await it.begun("a")
        (waiting,) = it.flights.told()
        await it.call("a")
        (at_work,) = it.flights.told()
        assert (waiting["stage"], at_work["stage"]) == ("waiting", "playing")
        expected = {"key": "a", "task": "t", "harness": "codex", "group": "7", "index": "a", "session": "session-a"}
        assert {name: at_work[name] for name in expected} == expected
        assert 0.0 <= at_work["seconds"] < 60.0
        await it.flights.cancel(all_of(task="t"), "the end of the test")

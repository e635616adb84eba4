"""What ends sessions at the fence: tokens that are too many updates old, and a trainer that paused and died."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from fence_helpers import until
from polar_env.config import EngineConfig
from polar_env.engine.fence import Fence, Pause
from polar_env.errors import EngineError, StalePolicy
from polar_env.types import EngineReply, Outcome
from proxy_helpers import PlayedEngine, Stage, bit, say, stage


def told(text: str) -> EngineReply:
    """A reply of an engine that does not know its weights."""
    return replace(say(text), policy_version="tiny@server", versioned=False)


def named(text: str, version: str) -> EngineReply:
    """A reply of an engine that does."""
    return replace(say(text), policy_version=version)


def limit(age: int, **fields: Any) -> EngineConfig:
    return EngineConfig(max_policy_age=age, **fields)


async def ended(here: Stage) -> str:
    """Why the session was ended; its harness is to be killed."""
    await asyncio.wait_for(here.session.ended.wait(), 5)
    return str(here.session.first_error)


# --- age --------------------------------------------------------------------------------------------------------


async def test_a_rollout_whose_oldest_tokens_got_too_old_is_ended_at_once_and_told_so():
    async with stage(PlayedEngine(otherwise=[told("x")]), updates=limit(1)) as here:
        fence = here.proxy.fence
        fence.declare("step-3")
        await here.ask("one")
        fence.declare("step-4")
        await here.ask("two")
        assert not here.session.ended.is_set(), "one update behind is allowed"
        fence.declare("step-5")
        why = await ended(here)
        assert why == "sampled by step-3 to step-4, and step-3 is 2 updates behind step-5: engine.max_policy_age is 1"
        assert here.session.outcome is Outcome.STALE_POLICY
        late = await here.ask("three")
        assert (late.status, late.json["message"]) == (404, "this session is over")
        ledger = await here.session.close()
        assert [call.policy_version for call in ledger.records] == ["step-3", "step-4"]


async def test_what_it_is_sampling_is_stopped_and_the_engine_is_free():
    engine = PlayedEngine([told("x")], [bit("y"), asyncio.Event()])
    async with stage(engine, updates=limit(0)) as here:
        here.proxy.fence.declare("a")
        await here.ask("one")
        client = await here.raw("two", stream=True)
        await client.until(b"data: y\n\n")
        here.proxy.fence.declare("b")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(client.rest(), 5)
        assert "a is 1 updates behind b" in await ended(here)
        await until(here.proxy.fence)
        assert engine.live == 0
        assert here.session.usage.failed == 0, "no failure of the engine"


async def test_a_generation_that_goes_on_over_too_many_updates_is_not_waited_for():
    """Its first token is of the weights it began with, whatever samples its last."""
    engine = PlayedEngine([asyncio.Event(), told("late")])
    async with stage(engine, updates=limit(1)) as here, asyncio.TaskGroup() as group:
        fence = here.proxy.fence
        fence.declare("step-1")
        asking = group.create_task(here.ask("hi"))
        await until(fence, running=1)
        for step in ("step-2", "step-3"):
            await fence.pause(Pause.KEEP)
            fence.resume(step)
        assert "step-1 is 2 updates behind step-3" in await ended(here)
        assert (await asking).status == 404
        assert (await here.session.close()).records == ()


async def test_a_generation_that_was_stopped_and_is_sampled_again_is_as_young_as_what_samples_it():
    engine = PlayedEngine([asyncio.Event()], [told("new")])
    async with stage(engine, updates=limit(0)) as here, asyncio.TaskGroup() as group:
        fence = here.proxy.fence
        fence.declare("step-1")
        asking = group.create_task(here.ask("hi"))
        await until(fence, running=1)
        await fence.pause(Pause.ABORT)
        fence.resume("step-9")
        assert (await asking).json["text"] == "new"
        assert not here.session.ended.is_set()


async def test_a_call_that_never_trains_does_not_age_its_rollout():
    """Claude Code asks for a title before its first turn; an update in between costs nothing."""
    async with stage(PlayedEngine(otherwise=[told("x")]), updates=limit(0)) as here:
        here.proxy.fence.declare("step-1")
        await here.ask("a title, please", headers={"x-kind": "side"})
        here.proxy.fence.declare("step-2")
        assert (await here.ask("and now the work")).status == 200
        assert not here.session.ended.is_set()
        here.proxy.fence.declare("step-3")
        assert "step-2 is 1 updates behind step-3" in await ended(here)


async def test_a_session_that_sampled_nothing_yet_has_no_age():
    async with stage(PlayedEngine(), updates=limit(0)) as here:
        for step in range(5):
            here.proxy.fence.declare(f"step-{step}")
        assert not here.session.ended.is_set()


async def test_only_the_old_are_ended():
    async with stage(PlayedEngine(otherwise=[told("x")]), updates=limit(1)) as here:
        fence, young = here.proxy.fence, here.open("young")
        fence.declare("step-1")
        await here.ask("hi")
        fence.declare("step-2")
        await here.ask("hi", key=young.key)
        fence.declare("step-3")
        await ended(here)
        assert not young.ended.is_set()
        await young.close()


async def test_weights_an_engine_names_itself_are_counted_as_they_appear():
    """vLLM tells the version in every answer: the first one that is new ages everybody else's."""
    replies = [[named("x", version)] for version in ("weights-aa", "weights-bb", "weights-cc")]
    async with stage(PlayedEngine(*replies), updates=limit(1)) as here:
        other = here.open("other")
        await here.ask("hi")
        await here.ask("hi", key=other.key)
        assert not here.session.ended.is_set()
        await here.ask("more", key=other.key)
        why = await ended(here)
        assert "weights-aa is 2 updates behind weights-cc" in why
        assert not other.ended.is_set()
        assert [call.policy_version for call in (await other.close()).records] == ["weights-bb", "weights-cc"]


async def test_the_reply_that_shows_the_age_is_recorded_before_the_session_ends():
    engine = PlayedEngine([named("x", "aa+bb")])
    async with stage(engine, updates=limit(0)) as here:
        await here.ask("hi")
        assert "sampled by aa+bb, and aa+bb is 1 updates behind bb" in await ended(here)
        assert len((await here.session.close()).records) == 1


@pytest.mark.parametrize("policy", ["mask", "report"])
async def test_nothing_is_ended_before_its_time_where_age_is_judged_at_the_end(policy: str):
    async with stage(PlayedEngine(otherwise=[told("x")]), updates=limit(0, stale_rollouts=policy)) as here:
        here.proxy.fence.declare("step-1")
        await here.ask("one")
        here.proxy.fence.declare("step-9")
        assert (await here.ask("two")).status == 200
        assert here.session.outcome is None
        stale = here.proxy.fence.stale(["step-1", "step-9"])
        assert isinstance(stale, StalePolicy)
        assert "8 updates behind" in str(stale)


async def test_a_limit_that_cannot_work_because_nobody_names_the_weights_is_told(caplog: pytest.LogCaptureFixture):
    fence = Fence(PlayedEngine(), limit(1))
    await fence.pause()
    fence.resume()
    assert "nobody names the weights" in caplog.text
    caplog.clear()
    fence.resume("step-1")
    fence.resume()
    assert caplog.text == ""


async def test_without_a_limit_nothing_is_too_old():
    fence = Fence(PlayedEngine())
    fence.declare("step-1")
    fence.declare("step-900")
    assert fence.stale(["step-1"]) is None
    assert fence.versions.age("step-1") == 899


# --- a trainer that died ----------------------------------------------------------------------------------------


def lease(seconds: float | None) -> EngineConfig:
    return EngineConfig(pause_lease=seconds)


async def test_a_pause_nobody_renews_lapses_and_the_calls_it_held_are_failures_of_the_engine(
    caplog: pytest.LogCaptureFixture,
):
    engine = PlayedEngine()
    async with stage(engine, updates=lease(0.1)) as here, asyncio.TaskGroup() as group:
        state = await here.proxy.fence.pause()
        assert state.lease is not None
        assert 0.0 < state.lease <= 0.1
        asking = group.create_task(here.ask("hi"))
        with caplog.at_level(logging.WARNING):
            why = await ended(here)
        assert here.session.outcome is Outcome.ENGINE_ERROR
        assert "nobody knows its weights" in why
        assert "engine.pause_lease" in caplog.text
        answer = await asking
        assert (answer.status, "trainer" in answer.text) == (404, False), "a sandbox reads this"
        assert engine.requests == []
        state = here.proxy.fence.state
        assert (state.paused, state.lapsed, state.lease) == (True, True, 0.0)


async def test_a_pause_that_is_repeated_is_renewed():
    async with stage(PlayedEngine(), updates=lease(60.0)) as here:
        fence = here.proxy.fence
        await fence.pause()
        await asyncio.sleep(0.2)
        left = fence.state.lease
        assert left is not None
        assert left <= 59.8
        renewed = (await fence.pause(Pause.KEEP)).lease
        assert renewed is not None
        assert renewed > left
        assert fence.resume("step-2").lease is None, "an open fence has no lease"


async def test_a_resume_in_time_ends_the_lease():
    async with stage(PlayedEngine(), updates=lease(0.1)) as here:
        await here.proxy.fence.pause()
        here.proxy.fence.resume("step-2")
        await asyncio.sleep(0.2)
        assert not here.proxy.fence.state.lapsed
        assert (await here.ask("hi")).status == 200


async def test_what_comes_after_the_lapse_is_refused_until_the_trainer_is_back():
    async with stage(PlayedEngine(), updates=lease(0.05)) as here:
        fence, late = here.proxy.fence, here.open("late")
        await fence.pause()
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="polar control resume"):
            fence.usable()
        with pytest.raises(EngineError, match="polar control resume"):
            await fence.check()
        assert not late.ended.is_set(), "it asked for nothing: it is at a command of its own"
        assert (await here.ask("hi", key=late.key)).status in (404, 503)
        assert late.outcome is Outcome.ENGINE_ERROR
        assert late.ended.is_set()
        fence.resume("step-2")
        fence.usable()
        assert (await here.ask("hi")).status == 200
        await late.close()


async def test_a_trainer_that_comes_back_and_pauses_again_holds_what_is_new():
    async with stage(PlayedEngine(), updates=lease(0.5)) as here, asyncio.TaskGroup() as group:
        fence = here.proxy.fence
        await fence.pause()
        await asyncio.sleep(0.6)
        assert fence.state.lapsed
        assert not (await fence.pause()).lapsed
        asking = group.create_task(here.ask("hi"))
        await until(fence, held=1)
        fence.resume()
        assert (await asking).status == 200


async def test_what_runs_on_under_a_pause_that_lapses_is_of_unknown_weights_and_ends_too():
    engine = PlayedEngine([bit("x"), asyncio.Event()])
    async with stage(engine, updates=lease(0.1)) as here:
        client = await here.raw("hi", stream=True)
        await client.until(b"data: x\n\n")
        await here.proxy.fence.pause(Pause.KEEP)
        assert "nobody knows" in await ended(here)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(client.rest(), 5)
        await until(here.proxy.fence)
        assert engine.live == 0


async def test_a_trainer_that_waits_for_the_pause_is_alive_however_long_that_takes():
    gate = asyncio.Event()
    async with stage(PlayedEngine([gate, told("x")]), updates=lease(0.1)) as here, asyncio.TaskGroup() as group:
        fence = here.proxy.fence
        asking = group.create_task(here.ask("hi"))
        await until(fence, running=1)
        pausing = group.create_task(fence.pause(Pause.WAIT))
        await asyncio.sleep(0.3)
        assert (fence.state.lapsed, fence.state.lease) == (False, None)
        gate.set()
        assert (await pausing).lease is not None
        assert (await asking).status == 200


async def test_a_pause_that_is_sent_again_is_not_cut_short_by_the_connection_that_was_given_up():
    gate = asyncio.Event()
    async with stage(PlayedEngine([gate, told("x")]), updates=lease(0.1)) as here, asyncio.TaskGroup() as group:
        fence = here.proxy.fence
        asking = group.create_task(here.ask("hi"))
        await until(fence, running=1)
        lost, again = (group.create_task(fence.pause()) for _ in range(2))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.sleep(0.3)
        assert (fence.state.lapsed, fence.state.lease) == (False, None)
        gate.set()
        assert (await again).lease is not None
        assert (await asking).status == 200


async def test_a_trainer_that_died_while_it_waited_began_its_lease_then():
    async with stage(PlayedEngine([asyncio.Event()]), updates=lease(0.1)) as here, asyncio.TaskGroup() as group:
        fence = here.proxy.fence
        asking = group.create_task(here.ask("hi"))
        await until(fence, running=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fence.pause(), 0.02)
        assert fence.state.lease is not None
        assert "nobody knows" in await ended(here)
        assert (await asking).status in (404, 503)


async def test_a_pause_without_a_lease_waits_for_ever():
    async with stage(PlayedEngine(), updates=lease(None)) as here:
        assert (await here.proxy.fence.pause()).lease is None
        here.proxy.fence.usable()

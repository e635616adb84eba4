"""The fence before an engine, alone and behind a live proxy: what a pause holds, what an abort does, what is dated."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from fence_helpers import until
from polar_env.engine import Session as EngineSession
from polar_env.engine.fence import Fence, Hold, Pause
from polar_env.errors import BadRequest, EngineBusy, EngineError
from polar_env.types import Delta, EngineReply, ModelRequest, Outcome, Sampling, StopReason, WireApi
from proxy_helpers import PlayedEngine, Step, bit, say, stage

STREAMED = ModelRequest(WireApi.CHAT, "any", ({"role": "user", "content": "hi"},), stream=True)
WHOLE = replace(STREAMED, stream=False)


def told(text: str) -> EngineReply:
    """A reply of an engine that does not know its weights."""
    return replace(say(text), policy_version="tiny@server", versioned=False)


async def sampled(fence: Fence, request: ModelRequest = WHOLE, session: str = "s") -> list[Delta | EngineReply]:
    async with aclosing(fence.generate(request, Sampling(), EngineSession(session))) as items:
        return [item async for item in items]


async def texts(fence: Fence, request: ModelRequest = WHOLE, session: str = "s") -> list[str]:
    items = await sampled(fence, request, session)
    return [item.text if isinstance(item, Delta) else item.turn.text for item in items]


# --- pause and resume -------------------------------------------------------------------------------------------


async def test_an_open_fence_changes_nothing():
    engine = PlayedEngine([bit("a"), bit("b"), say("ab")])
    fence = Fence(engine)
    assert await texts(fence, STREAMED) == ["a", "b", "ab"]
    assert engine.requests == [STREAMED]
    assert (await fence.check()).model == "played"
    assert fence.state.running == fence.state.held == 0


async def test_a_paused_fence_holds_what_is_new_and_the_engine_hears_nothing_of_it():
    engine = PlayedEngine()
    fence = Fence(engine)
    assert (await fence.pause()).paused
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(texts(fence)) for _ in range(3)]
        await until(fence, held=3)
        assert engine.requests == []
        fence.resume()
    assert sorted(task.result()[0] for task in held) == ["answer 1", "answer 2", "answer 3"]
    assert not fence.state.paused


async def test_wait_returns_when_the_last_running_generation_has_finished():
    gates = asyncio.Event(), asyncio.Event()
    fence = Fence(PlayedEngine([gates[0], say("one")], [gates[1], say("two")]))
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(texts(fence)) for _ in range(2)]
        await until(fence, running=2)
        pausing = group.create_task(fence.pause(Pause.WAIT))
        gates[0].set()
        await running[0]
        await asyncio.sleep(0)
        assert not pausing.done()
        gates[1].set()
        assert (await pausing).running == 0
    assert [task.result() for task in running] == [["one"], ["two"]]


async def test_keep_returns_at_once_and_the_running_generation_goes_on():
    gate = asyncio.Event()
    fence = Fence(PlayedEngine([bit("a"), gate, say("ab")]))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(texts(fence, STREAMED))
        await until(fence, running=1)
        assert (await fence.pause(Pause.KEEP)).running == 1
        gate.set()
        assert await running == ["a", "ab"]


async def test_a_resume_ends_a_pause_that_still_waits():
    gate = asyncio.Event()
    fence = Fence(PlayedEngine([gate, say("late")]))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(texts(fence))
        await until(fence, running=1)
        pausing = group.create_task(fence.pause())
        await asyncio.sleep(0)
        fence.resume()
        assert not (await pausing).paused
        gate.set()
        assert await running == ["late"]


async def test_a_pause_given_up_by_its_caller_stays_in_force():
    fence = Fence(PlayedEngine([asyncio.Event()]))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(texts(fence))
        await until(fence, running=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fence.pause(), 0.02)
        assert fence.state.paused
        running.cancel()


async def test_a_fence_closed_again_before_the_held_call_woke_holds_it():
    engine = PlayedEngine()
    fence = Fence(engine)
    await fence.pause()
    async with asyncio.TaskGroup() as group:
        held = group.create_task(texts(fence))
        await until(fence, held=1)
        fence.resume()
        await fence.pause()
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.requests == []
        fence.resume()
        assert await held == ["answer 1"]


async def test_the_start_up_check_samples_and_so_is_held_and_a_count_is_not():
    fence = Fence(PlayedEngine())
    await fence.pause()
    assert await fence.count_tokens(WHOLE) == 1
    async with asyncio.TaskGroup() as group:
        checking = group.create_task(fence.check())
        await asyncio.sleep(0)
        assert not checking.done()
        fence.resume()
    assert checking.result().model == "played"


# --- abort ------------------------------------------------------------------------------------------------------


async def test_an_aborted_generation_nobody_has_seen_is_sampled_again_after_the_pause():
    engine = PlayedEngine([asyncio.Event(), say("old")], [say("new")])
    fence = Fence(engine)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(texts(fence, STREAMED))
        await until(fence, running=1)
        state = await fence.pause(Pause.ABORT)
        assert (state.running, engine.live, engine.aborted.is_set()) == (0, 0, True)
        await until(fence, held=1)
        assert fence.resume().resampled == 1
        assert await asking == ["new"]
    assert len(engine.requests) == 2


async def test_an_abort_without_a_pause_samples_again_at_once():
    fence = Fence(PlayedEngine([asyncio.Event()], [say("again")]))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(texts(fence))
        await until(fence, running=1)
        assert not (await fence.abort()).paused
        assert await asking == ["again"]


async def test_a_generation_that_had_shown_a_part_breaks_and_says_busy():
    fence = Fence(PlayedEngine([bit("par"), asyncio.Event()]))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_busy(fence))
        await until(fence, running=1)
        await asyncio.sleep(0)
        await fence.pause(Pause.ABORT)
        assert await asking == 1.0
    assert (fence.state.broken, fence.state.resampled) == (1, 0)


async def _busy(fence: Fence) -> float:
    with pytest.raises(EngineBusy, match="change of weights") as busy:
        await sampled(fence, STREAMED)
    return busy.value.retry_after


async def test_a_request_that_does_not_stream_is_shown_nothing_before_its_reply_and_so_never_breaks():
    fence = Fence(PlayedEngine([bit("par"), asyncio.Event()], [bit("who"), bit("le"), say("whole")]))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(texts(fence, WHOLE))
        await until(fence, running=1)
        await fence.abort()
        assert await asking == ["whole"]


async def test_an_abort_while_the_reader_holds_a_part_stops_the_engine_when_it_comes_back():
    engine = PlayedEngine([bit("a"), bit("b"), say("ab")])
    fence = Fence(engine)
    items = fence.generate(STREAMED, Sampling(), EngineSession("s"))
    assert await anext(items) == bit("a")
    async with asyncio.TaskGroup() as group:
        stopping = group.create_task(fence.abort())
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await anext(items)
        assert (await stopping).running == 0
    assert engine.live == 0


async def test_two_aborts_at_once_are_one():
    fence = Fence(PlayedEngine([asyncio.Event()], [say("again")]))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(texts(fence))
        await until(fence, running=1)
        stops = group.create_task(fence.abort()), group.create_task(fence.pause(Pause.ABORT))
        assert [(await stop).running for stop in stops] == [0, 0]
        assert fence.resume().resampled == 1
        assert await asking == ["again"]


async def test_an_abort_the_trainer_gave_the_engine_itself_in_a_pause_is_one_of_ours():
    """vLLM's own /pause?mode=abort ends what runs with the finish reason abort."""
    gate = asyncio.Event()
    fence = Fence(PlayedEngine([gate, say("cut", stop=StopReason.ABORT)], [say("whole")]))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(texts(fence))
        await until(fence, running=1)
        await fence.pause(Pause.KEEP)
        gate.set()
        await until(fence, held=1)
        fence.resume()
        assert await asking == ["whole"]


async def test_an_engine_s_own_abort_outside_a_pause_is_its_failure_to_tell():
    fence = Fence(PlayedEngine([say("cut", stop=StopReason.ABORT)]))
    (reply,) = await sampled(fence)
    assert isinstance(reply, EngineReply)
    assert reply.turn.stop is StopReason.ABORT


async def test_an_engine_s_failure_passes_through():
    fence = Fence(PlayedEngine([EngineError("down")], [TimeoutError()]))
    with pytest.raises(EngineError, match="down"):
        await sampled(fence)
    with pytest.raises(TimeoutError):
        await sampled(fence)
    assert fence.state.running == 0


# --- versions ---------------------------------------------------------------------------------------------------


async def version(fence: Fence) -> str:
    reply = (await sampled(fence))[-1]
    assert isinstance(reply, EngineReply)
    return reply.policy_version


async def test_a_declared_version_is_used_where_the_engine_tells_none():
    fence = Fence(PlayedEngine([told("a")], [told("b")], [say("c")]))
    assert await version(fence) == "tiny@server"
    fence.declare("step-1")
    assert await version(fence) == "step-1"
    assert await version(fence) == "policy-1", "an engine that knows its weights knows best"


async def test_a_version_declared_during_a_generation_is_named_beside_the_one_it_began_with():
    gates = [asyncio.Event() for _ in range(3)]
    fence = Fence(PlayedEngine(*([gate, told("x")] for gate in gates)))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(version(fence))
        await until(fence, running=1)
        fence.declare("step-1")
        gates[0].set()
        assert await first == "tiny@server+step-1"
        second = group.create_task(version(fence))
        await until(fence, running=1)
        fence.declare("step-1")
        await fence.pause(Pause.KEEP)
        fence.resume("step-2")
        fence.resume("step-3")
        gates[1].set()
        assert await second == "step-1+step-2+step-3"
        gates[2].set()
    assert await version(fence) == "step-3"


async def test_what_is_sampled_again_has_only_the_version_it_was_sampled_with():
    fence = Fence(PlayedEngine([asyncio.Event()], [told("new")]))
    fence.declare("step-1")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(version(fence))
        await until(fence, running=1)
        await fence.pause(Pause.ABORT)
        fence.resume("step-2")
        assert await asking == "step-2"


@pytest.mark.parametrize("name", ["", "a b", "step-1+step-2", "x" * 201, "line\n"])
async def test_a_version_that_could_not_be_read_back_is_refused_and_the_fence_stays_shut(name: str):
    fence = Fence(PlayedEngine())
    await fence.pause()
    with pytest.raises(BadRequest, match="such as step-12"):
        fence.resume(name)
    assert (fence.state.paused, fence.state.version) == (True, "")


# --- whose time it is -------------------------------------------------------------------------------------------


async def test_time_at_the_fence_is_the_union_over_a_session_s_calls_and_nobody_else_s():
    fence = Fence(PlayedEngine())
    await fence.pause()
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(texts(fence, session="busy"))
        await until(fence, held=4)
        await asyncio.sleep(0.1)
        fence.resume()
    lost = fence.hold("busy").seconds
    assert 0.1 <= lost <= time.monotonic() - began
    assert fence.hold("idle").seconds == 0.0
    await asyncio.sleep(0.01)
    assert fence.hold("busy").seconds == lost


async def test_generations_thrown_away_are_lost_time_once_however_many_ran():
    fence = Fence(PlayedEngine(*[[asyncio.Event()]] * 3))
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(texts(fence))
        await until(fence, running=3)
        await asyncio.sleep(0.1)
        await fence.abort()
    assert 0.1 <= fence.hold("s").seconds <= time.monotonic() - began


async def test_a_deadline_is_moved_by_what_was_lost_and_by_no_more():
    hold = Hold()
    assert hold.owed(0.0) == 0.0
    with hold.held():
        await asyncio.sleep(0.05)
        assert hold.owed(0.0) == 1.0, "asked again in a second, not in a moment"
    assert 0.05 <= hold.owed(0.0) < 1.0
    assert hold.owed(hold.seconds) == hold.owed(2.0) == 0.0


# --- behind a live proxy ----------------------------------------------------------------------------------------


async def test_a_held_stream_is_kept_alive_and_then_answered():
    engine = PlayedEngine()
    async with stage(engine, keep_alive=0.02) as here:
        await here.proxy.fence.pause()
        client = await here.raw("hi", stream=True)
        for _ in range(3):
            await asyncio.wait_for(client.until(b"event: ping\n\n"), 5)
        assert engine.requests == []
        here.proxy.fence.resume("step-1")
        assert b"data: answer 1" in await asyncio.wait_for(client.until(b"event: end s-0000\n\n"), 5)


async def test_a_harness_sees_nothing_of_an_abort_before_its_first_token():
    scripts: list[list[Step]] = [[asyncio.Event()], [bit("new"), told("new")]]
    engine = PlayedEngine(*scripts)
    async with stage(engine, keep_alive=0.02) as here:
        client = await here.raw("hi", stream=True)
        await asyncio.wait_for(client.until(b"event: ping\n\n"), 5)
        await here.proxy.fence.pause(Pause.ABORT)
        here.proxy.fence.resume("step-2")
        got = await asyncio.wait_for(client.until(b"event: end s-0000\n\n"), 5)
        assert got.count(b"data: ") == 1
        ledger = await here.session.close()
    assert [(call.policy_version, call.turn.text) for call in ledger.records] == [("step-2", "new")]
    assert (here.session.usage.failed, here.session.limits.calls, here.session.outcome) == (0, 1, None)


async def test_a_broken_stream_is_reset_and_the_retry_is_sampled_anew_on_the_new_weights():
    engine = PlayedEngine([bit("par"), asyncio.Event()], [told("whole")])
    async with stage(engine) as here:
        client = await here.raw("hi", stream=True)
        await asyncio.wait_for(client.until(b"data: par\n\n"), 5)
        await here.proxy.fence.pause(Pause.ABORT)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(client.rest(), 5)
        async with asyncio.TaskGroup() as group:
            again = group.create_task(here.ask("hi"))
            await until(here.proxy.fence, held=1)
            here.proxy.fence.resume("step-2")
        assert again.result().json["text"] == "whole"
        ledger = await here.session.close()
    assert [(call.index, call.policy_version) for call in ledger.records] == [(1, "step-2")]
    assert here.session.limits.calls == 1, "the call that we broke is given back"


async def test_any_number_of_aborts_is_no_dead_engine():
    engine = PlayedEngine(*[[bit("x"), asyncio.Event()] for _ in range(8)])
    async with stage(engine) as here:
        for number in range(8):
            client = await here.raw(f"hi {number}", stream=True)
            await asyncio.wait_for(client.until(b"data: x\n\n"), 5)
            await here.proxy.fence.abort()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(client.rest(), 5)
        assert not here.session.ended.is_set()
        assert (await here.ask("and now")).json["text"] == "answer 9"
        assert here.session.outcome is None


async def test_a_held_call_of_a_session_that_ends_is_let_go():
    engine = PlayedEngine()
    async with stage(engine) as here:
        await here.proxy.fence.pause()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(here.ask("hi"))
            await until(here.proxy.fence, held=1)
            ledger = await here.session.close()
        assert asking.result().status == 410
        assert (ledger.records, engine.requests) == ((), [])
        await until(here.proxy.fence, held=0)


async def test_a_client_that_left_a_held_call_has_the_grace_of_any_other():
    engine = PlayedEngine()
    async with stage(engine, retry_grace=0.02) as here:
        await here.proxy.fence.pause()
        client = await here.raw("hi")
        await until(here.proxy.fence, held=1)
        await client.leave()
        await until(here.proxy.fence, held=0)
        here.proxy.fence.resume()
        assert here.session.usage.aborted == 1
        assert engine.requests == []


async def test_the_session_s_own_clock_does_not_run_at_the_fence():
    async with stage(PlayedEngine(), max_seconds=0.1) as here:
        await here.proxy.fence.pause()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(here.ask("hi"))
            await asyncio.sleep(0.3)
            assert here.session.outcome is None
            here.proxy.fence.resume()
        assert asking.result().status == 200
        await asyncio.wait_for(here.session.ended.wait(), 5)
        assert here.session.outcome is Outcome.AGENT_TIMEOUT
        assert 0.2 < here.session.hold.seconds < 5.0


async def test_sessions_of_a_process_share_one_fence_and_each_has_its_own_time():
    async with stage(PlayedEngine()) as here:
        other = here.open("other")
        await here.proxy.fence.pause()
        async with asyncio.TaskGroup() as group:
            group.create_task(here.ask("hi"))
            await until(here.proxy.fence, held=1)
            assert here.session.hold.calls == 1
            assert other.hold.calls == 0
            here.proxy.fence.resume()
        await other.close()
        assert here.proxy.fence.hold("other") is not other.hold, "what it knew of a closed session is let go"

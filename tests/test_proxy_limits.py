"""What a session may use: calls, turns, tokens, wall clock. Each limit as the conversation that runs into it."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.capture import Ledger
from polar_env.config import ProxyConfig
from polar_env.errors import EngineError, EngineOverflow
from polar_env.proxy import DIALECTS
from polar_env.proxy.attempts import Attempt, Refusal, TurnLimit
from polar_env.proxy.limits import Limits
from polar_env.types import EngineReply, Outcome, StopReason, Usage
from proxy_helpers import PlayedEngine, Stage, bit, say, stage


async def until_over(s: Stage, most: int = 20) -> int:
    """Ask until the session says no; how many were answered."""
    for turn in range(most):
        if (await s.ask(f"turn {turn}")).status != 200:
            return turn
    raise AssertionError(f"{most} calls and no limit")


def long_reply(prompt: int, sampled: int) -> EngineReply:
    return say("x" * sampled, prompt=prompt)


# --- every limit tells the harness to stop, in its own words and ours ---------------------------------------------


@pytest.mark.parametrize(
    ("limit", "answered", "words"),
    [
        ({"max_calls": 3}, 3, "its 3 model calls"),
        ({"max_turns": 2}, 2, "its 2 turns"),
        ({"max_total_prompt_tokens": 250}, 3, "its 250 prompt tokens"),
        ({"max_total_output_tokens": 60}, 3, "its 60 output tokens"),
        ({"max_total_output_tokens": 61}, 4, "its 61 output tokens"),
        ({"max_calls": 9, "max_turns": 4, "max_total_prompt_tokens": 10_000}, 4, "its 4 turns"),
    ],
)
async def test_over_a_limit_the_harness_gets_the_404_it_stops_at(
    limit: dict[str, int], answered: int, words: str
) -> None:
    engine = PlayedEngine(otherwise=[long_reply(prompt=100, sampled=20)])
    async with stage(engine, **limit) as s:
        assert await until_over(s) == answered
        reply = await s.ask("and once more")
        assert (reply.status, reply.json["plain_error"]) == (404, 404)
        assert words in reply.json["message"]
        assert (s.session.outcome, s.session.ended.is_set()) == (Outcome.TURN_LIMIT, True)
        assert words in str(s.session.first_error)
        assert len(engine.requests) == len((await s.session.close()).records) == answered


async def test_without_limits_on_tokens_and_turns_there_are_none() -> None:
    engine = PlayedEngine(otherwise=[long_reply(prompt=100_000, sampled=5)])
    async with stage(engine) as s:
        assert [(await s.ask(f"turn {turn}")).status for turn in range(15)] == [200] * 15
        assert (s.session.limits.prompt_tokens, s.session.limits.output_tokens) == (1_500_000, 75)


async def test_an_answer_thrown_away_has_cost_its_tokens() -> None:
    async with stage(PlayedEngine(otherwise=[long_reply(prompt=10, sampled=4)])) as s:
        for _ in range(3):
            await s.ask("the same again")
        assert (s.session.limits.prompt_tokens, s.session.limits.output_tokens) == (30, 12)


async def test_a_session_that_is_over_stays_over_for_its_side_calls_too() -> None:
    async with stage(PlayedEngine(), max_turns=1) as s:
        assert (await s.ask("first")).status == 200
        assert (await s.ask("title?", headers={"X-Kind": "side"})).status == 200
        assert (await s.ask("second")).status == 404
        assert (await s.ask("title now?", headers={"X-Kind": "side"})).status == 404


# --- what a turn is -----------------------------------------------------------------------------------------------


async def test_side_calls_and_sub_agents_are_no_turns() -> None:
    async with stage(PlayedEngine(), max_turns=2) as s:
        for number in range(3):
            assert (await s.ask(f"title {number}", headers={"X-Kind": "side"})).status == 200
            assert (await s.ask(f"look {number}", headers={"X-Thread": "worker"})).status == 200
        assert [(await s.ask(f"turn {turn}")).status for turn in range(3)] == [200, 200, 404]


async def test_a_question_asked_again_takes_no_second_turn() -> None:
    engine = PlayedEngine([say("")], [say("")], [say("an answer")])
    async with stage(engine, max_turns=2) as s:
        assert [(await s.ask("go")).status for _ in range(3)] == [200] * 3
        assert s.session.limits.turns() == 1
        assert [(await s.ask(text)).status for text in ("go on", "and on")] == [200, 404]
        assert len((await s.session.close()).superseded) == 2


async def test_an_engine_that_fails_takes_no_turn_and_an_overflow_takes_none() -> None:
    engine = PlayedEngine([EngineError("blip")], [say("one")], [EngineOverflow("too long")], [say("two")])
    async with stage(engine, max_turns=2) as s:
        statuses = [(await s.ask(text)).status for text in ("go", "go", "far too long", "shorter", "more")]
        assert statuses == [503, 200, 400, 200, 404]


async def test_a_turn_in_flight_is_taken_and_a_retry_of_it_is_not_another() -> None:
    go = asyncio.Event()
    async with stage(PlayedEngine([go, say("slow")]), max_turns=1) as s, asyncio.TaskGroup() as group:
        tries = [group.create_task(s.ask("go")) for _ in range(2)]
        await s.arrivals.until(2)
        assert (await s.ask("something else")).status == 404
        go.set()
        assert [(await one).status for one in tries] == [200, 200]
        assert s.session.limits.turns() == 1


async def test_an_answer_that_never_arrived_and_is_not_asked_for_again_was_no_turn() -> None:
    go = asyncio.Event()
    async with stage(PlayedEngine([bit("hel"), go, say("hello")]), max_turns=1, retry_grace=30.0) as s:
        client = await s.raw("hi", stream=True)
        await client.until(b"data: hel\n\n")
        await client.leave()
        go.set()
        await s.ledger.committed.wait()
        assert (await s.ask("hi", "hel", "you were cut off")).status == 200
        assert (await s.ask("more")).status == 404
        sealed = await s.session.close()
        assert (len(sealed.records), sealed.delivered) == (2, {"s-0001"})


async def test_a_replay_takes_its_turn_back() -> None:
    go = asyncio.Event()
    async with stage(PlayedEngine([bit("hel"), go, say("hello")]), max_turns=1, retry_grace=30.0) as s:
        client = await s.raw("hi", stream=True)
        await client.until(b"data: hel\n\n")
        await client.leave()
        go.set()
        await s.ledger.committed.wait()
        assert s.session.limits.turns() == 0
        assert (await s.ask("hi")).json["text"] == "hello"
        assert s.session.limits.turns() == 1
        assert (await s.ask("more")).status == 404


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["new", "again", "failed", "side"]), max_size=12), st.integers(1, 6))
def test_turns_are_the_questions_that_were_answered(story: list[str], most: int) -> None:
    """Without a proxy: each step starts a call if it may; the count is that of questions with an answer."""
    limits = Limits(ProxyConfig(max_calls=10_000), max_turns=most)
    answered, last = 0, None
    for index, step in enumerate(story):
        attempt = Attempt(f"c{index}", index, 1.0)
        again = last if step == "again" else None
        turn = step != "side"
        try:
            limits.check(turn=turn, again=again)
        except TurnLimit:
            assert turn
            assert answered - (again is not None) >= most
            break
        limits.started(attempt, turn=turn, again=again)
        if step == "failed":
            attempt.fail(EngineError("blip"))
            limits.returned()
        elif turn:
            attempt.delivered = True
            answered += again is None
            last = attempt
        assert limits.turns() == answered <= most


def test_usage_adds_up() -> None:
    limits = Limits(ProxyConfig())
    for usage in (Usage(100, 5, 90), Usage(7, 0)):
        limits.sampled(usage)
    assert (limits.prompt_tokens, limits.output_tokens) == (107, 5)


# --- wall clock ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_when_the_time_is_up_what_runs_is_aborted_and_the_rest_refused(stream: bool) -> None:
    engine = PlayedEngine([bit("I was abo"), asyncio.Event()])
    async with stage(engine, max_seconds=0.1) as s:
        client = await s.raw("go", stream=stream)
        await asyncio.wait_for(s.session.ended.wait(), 5)
        await asyncio.wait_for(engine.aborted.wait(), 5)
        if stream:
            with pytest.raises(ConnectionResetError):
                await client.rest()
        else:
            assert b"404" in await client.until(b"\r\n")
        reply = await s.ask("go")
        assert reply.status == 404
        assert "0.1 seconds" in reply.json["message"]
        assert s.session.outcome is Outcome.AGENT_TIMEOUT
        assert (await s.session.close()).records == ()


async def test_the_clock_starts_with_the_first_call_and_ends_with_the_session() -> None:
    async with stage(PlayedEngine(), max_seconds=0.05) as s:
        await asyncio.sleep(0.1)  # a harness that takes long to start has not used any of its time
        assert (await s.ask("first")).status == 200
        await s.session.close()
        await asyncio.sleep(0.1)
        assert (s.session.outcome, s.session.ended.is_set()) == (None, False)


async def test_an_answer_on_its_way_to_the_disk_is_kept_when_the_time_is_up() -> None:
    gate, reached = asyncio.Event(), asyncio.Event()

    class Slow(Ledger):
        async def append(self, record: Any, request: Any = None) -> None:
            reached.set()
            await gate.wait()
            await super().append(record, request)

    async with stage(PlayedEngine([say("sampled")]), max_seconds=0.5) as s, asyncio.TaskGroup() as group:
        other = s.open("other", ledger=Slow("other"))
        asking = group.create_task(s.ask("go", key=other.key))
        await asyncio.wait_for(reached.wait(), 5)
        await asyncio.wait_for(other.ended.wait(), 5)
        gate.set()
        assert (await asking).status == 200
        assert [record.turn.text for record in (await other.close()).records] == ["sampled"]


async def test_the_first_ending_is_the_one_that_is_told() -> None:
    async with stage(PlayedEngine(), max_turns=1, max_seconds=0.05) as s:
        await s.ask("one")
        await s.ask("two")
        await asyncio.sleep(0.1)
        assert s.session.outcome is Outcome.TURN_LIMIT


# --- how Claude Code goes on after a broken or cut answer ---------------------------------------------------------

CUT = "<system-reminder>\nYour response above was cut off. Resume from where it stops.\n</system-reminder>"


def messages(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"model": "policy", "max_tokens": 32000, "stream": True, "messages": said, **more}


async def claude(s: Stage, body: dict[str, Any]) -> tuple[int, str]:
    async with s.http.post(s.url("/v1/messages?beta=true"), json=body) as response:
        return response.status, await response.text()


async def test_the_continuation_of_a_stream_the_engine_broke_is_the_same_turn() -> None:
    died = asyncio.Event()
    engine = PlayedEngine([bit("I was about"), died, EngineError("worker 3 died")], [say(" to say this")])
    async with stage(engine, dialects=DIALECTS, max_turns=1) as s:
        client = await s.send(s.url("/v1/messages").partition(str(s.port))[2], json.dumps(messages("fix it")).encode())
        await client.until(b"I was about")
        died.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()
        status, text = await claude(s, messages("fix it", "I was about", CUT))
        assert (status, " to say this" in text) == (200, True)
        sealed = await s.session.close()
        assert [record.message_count for record in sealed.records] == [3]
        assert sealed.delivered == {record.call_id for record in sealed.records}
        assert (s.session.limits.turns(), s.session.outcome) == (1, None)


async def test_a_reply_cut_at_its_length_was_delivered_and_going_on_is_a_turn_of_its_own() -> None:
    engine = PlayedEngine([say("a very long", stop=StopReason.LENGTH)], [say(" answer")])
    async with stage(engine, dialects=DIALECTS, max_turns=2) as s:
        status, text = await claude(s, messages("explain"))
        assert (status, '"stop_reason": "max_tokens"' in text or '"stop_reason":"max_tokens"' in text) == (200, True)
        assert (await claude(s, messages("explain", "a very long", CUT, max_tokens=128_000)))[0] == 200
        sealed = await s.session.close()
        assert len(sealed.delivered) == s.session.limits.turns() == 2
        assert sealed.superseded == frozenset()


async def test_the_plain_request_after_a_broken_stream_gets_the_generation_that_goes_on() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([bit("hel"), go, say("hello")])
    async with stage(engine, dialects=DIALECTS, max_turns=1, retry_grace=30.0) as s:
        client = await s.send(s.url("/v1/messages").partition(str(s.port))[2], json.dumps(messages("hi")).encode())
        await client.until(b"hel")
        await client.leave()
        go.set()
        status, text = await claude(s, messages("hi", stream=False, max_tokens=21_333))
        assert (status, json.loads(text)["content"][0]["text"]) == (200, "hello")
        assert (len(engine.requests), s.session.limits.turns(), s.session.usage.undelivered) == (1, 1, 0)


def test_a_busy_refusal_always_says_when_to_come_back() -> None:
    assert Refusal(429, "busy").retry_after == 1.0
    assert Refusal(429, "busy", retry_after=9.0).retry_after == 9.0
    assert Refusal(503, "down").retry_after is None

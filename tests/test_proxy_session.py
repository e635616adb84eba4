"""Sessions and attempts without sockets: which request is which call, and how a session's ending is told."""

import asyncio
import gc
import random
import weakref
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.capture import Ledger, SegmentLog
from polar_env.config import ProxyConfig
from polar_env.errors import BadRequest, CaptureError, EngineBusy, EngineError, EngineOverflow, PolarError, SandboxError
from polar_env.proxy.attempts import NOT_IDENTITY, Attempt, Refusal, TurnLimit, chunks, refusal, retry_key
from polar_env.proxy.session import MAX_FAILURES, Session, policy
from polar_env.segment_log import read as read_log
from polar_env.types import ModelRequest, Outcome, Sampling, SealedLedger, WireApi
from proxy_helpers import GatedLog, PlainEncoder, PlayedEngine, bit, open_session, say, stage
from session_helpers import opened


def ask(session: Session, *messages: str, thread: str = "") -> Attempt:
    body = {"messages": list(messages)}
    request = ModelRequest(WireApi.CHAT, "any", tuple({"role": "user", "content": text} for text in messages))
    return session.call(request, {"x-thread": thread}, body, repr(body).encode())


async def read(session: Session, attempt: Attempt, *, stay: bool = True) -> str:
    """Read one attempt to its end, as a client that stays, or that is gone when the last byte comes."""
    with attempt.reading():
        turn = await attempt.answer()
        if stay:
            session.delivered(attempt)
        return turn.text


# --- which request is which call --------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=5), JSON, st.randoms(use_true_random=False))
def test_a_retry_is_known_whatever_its_key_order_stream_flag_and_token_cap(body: dict, value: Any, order) -> None:
    shuffled = list(body.items())
    order.shuffle(shuffled)
    retry = dict.fromkeys(NOT_IDENTITY, value) | dict(shuffled)
    retry |= dict.fromkeys(NOT_IDENTITY & body.keys(), value)
    assert retry_key(WireApi.CHAT, "", body) == retry_key(WireApi.CHAT, "", retry)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=5), st.text(max_size=6), JSON)
def test_a_body_that_says_something_else_is_another_call(body: dict, name: str, value: Any) -> None:
    changed = {**body, name: value}
    same = {k: v for k, v in body.items() if k not in NOT_IDENTITY} == {
        k: v for k, v in changed.items() if k not in NOT_IDENTITY
    }
    equal = retry_key(WireApi.CHAT, "", body) == retry_key(WireApi.CHAT, "", changed)
    assert equal == same or {type(body.get(name)), type(value)} == {bool, int}, "1 == True only in Python"


def test_thread_and_wire_api_tell_equal_bodies_apart() -> None:
    body = {"messages": [{"role": "user", "content": "look"}]}
    keys = {retry_key(wire, thread, body) for wire in WireApi for thread in ("", "a", "b")}
    assert len(keys) == len(WireApi) * 3


def test_codex_metadata_in_another_order_is_the_same_call() -> None:
    first = {"input": [1], "client_metadata": {"a": "1", "b": "2"}, "stream": True}
    again = {"stream": True, "client_metadata": {"b": "3", "c": "4"}, "input": [1]}
    assert retry_key(WireApi.RESPONSES, "t", first) == retry_key(WireApi.RESPONSES, "t", again)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_only_a_full_delivery_makes_the_same_body_a_new_call(stays: list[bool]) -> None:
    async def conversation() -> tuple[PlayedEngine, Session, SealedLedger]:
        engine = PlayedEngine()
        async with opened(engine) as session:
            for stay in stays:
                await read(session, ask(session, "same"), stay=stay)
            return engine, session, await session.close()

    engine, session, sealed = asyncio.run(conversation())
    full = sum(stays)
    generations = 1 + sum(stays[:-1])
    assert len(engine.requests) == session.calls == generations
    assert len(sealed.delivered) == full
    assert len(sealed.superseded) == session.usage.superseded == generations - 1
    assert session.usage.replayed == len(stays) - generations
    assert session.usage.undelivered == generations - full


# --- attempts ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=8), st.integers(0, 2**32), st.integers(1, 4))
def test_every_reader_gets_the_whole_text_once_whenever_it_comes(parts: list[str], seed: int, readers: int) -> None:
    chance = random.Random(seed)

    async def reader(attempt: Attempt) -> bytes:
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        got = b""
        async with aclosing(chunks(attempt, PlainEncoder("c"), 60.0)) as stream:
            async for part in stream:
                got += part
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
        return got

    async def conversation() -> list[bytes]:
        attempt = Attempt("c", 0, 60.0)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(reader(attempt)) for _ in range(readers)]
            for part in parts:
                await asyncio.sleep(0)
                attempt.add(bit(part))
            await asyncio.sleep(0)
            attempt.reply(say("".join(parts) + "!").turn)
            await asyncio.sleep(0)
            attempt.commit(recorded=True)
        return [task.result() for task in tasks]

    for got in asyncio.run(conversation()):
        lines = got.decode().split("\n\n")
        assert lines[0] == "event: start"
        assert lines[-2:] == ["event: end c", ""]
        assert "".join(line.removeprefix("data: ") for line in lines[1:-2]) == "".join(parts) + "!"


async def test_keep_alives_fill_the_silence_and_stop_when_the_engine_speaks() -> None:
    attempt = Attempt("c", 0, 60.0)
    async with aclosing(chunks(attempt, PlainEncoder("c"), 0.01)) as stream:
        assert await anext(stream) == b"event: start\n\n"
        assert await anext(stream) == b"event: ping\n\n"
        assert await anext(stream) == b"event: ping\n\n"
        attempt.add(bit("word"))
        assert await anext(stream) == b"data: word\n\n"


async def test_what_was_said_before_a_failure_is_sent_and_the_stream_has_no_end() -> None:
    attempt = Attempt("c", 0, 60.0)
    attempt.add(bit("half"))
    attempt.fail(EngineError("died"))
    got: list[bytes] = []

    async def listen() -> None:
        async for part in chunks(attempt, PlainEncoder("c"), 60.0):
            got.append(part)

    with pytest.raises(Refusal):
        await listen()
    assert got == [b"event: start\n\n", b"data: half\n\n"]


async def test_an_answered_attempt_cannot_be_aborted_and_a_failed_one_fails_once() -> None:
    answered = Attempt("c", 0, 60.0)
    answered.reply(say("sampled").turn)
    answered.abort(EngineError("too late"))
    assert (answered.running, answered.error) == (True, None)
    failed = Attempt("c", 1, 60.0)
    failed.fail(EngineError("first"))
    failed.fail(EngineError("second"))
    assert str(failed.error) == "first"


async def test_a_retry_within_the_grace_period_keeps_the_generation_alive() -> None:
    attempt = Attempt("c", 0, 0.01)
    with attempt.reading():
        pass
    with attempt.reading():
        assert not await attempt.news(0.05), "longer than the grace period, and nothing happened"
    assert attempt.running
    with pytest.raises(Refusal):
        await attempt.answer()
    assert "did not come back" in str(attempt.error)


async def test_one_of_two_readers_leaving_starts_no_clock() -> None:
    attempt = Attempt("c", 0, 0.0)
    with attempt.reading():
        with attempt.reading():
            pass
        assert not await attempt.news(0.02)
        assert attempt.running


async def test_a_harness_profile_with_a_bug_is_our_failure() -> None:
    async with stage(PlayedEngine()) as s:
        other = open_session(s.proxy, "odd", Ledger("odd"), classify=lambda headers, body: (headers["x-kind"], ""))
        assert (await s.ask("hi", key=other.key)).status == 503
        assert other.outcome is Outcome.ENGINE_ERROR
        assert "KeyError" in str(other.first_error)


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "overflow", "words"),
    [
        (EngineOverflow("maximum context length is 9"), 400, None, True, "maximum context length is 9"),
        (EngineBusy("queue", retry_after=4.0), 429, 4.0, False, "busy"),
        (EngineError("http://node-3:8000 refused"), 503, None, False, "engine failed"),
        (BadRequest("n must be 1"), 400, None, False, "n must be 1"),
        (SandboxError("/srv/secret"), 503, None, False, "engine failed"),
        (Refusal(410, "closed"), 410, None, False, "closed"),
    ],
)
def test_what_a_harness_is_told(error: PolarError, status: int, retry_after: float, overflow: bool, words: str) -> None:
    told = refusal(error)
    assert (told.status, told.retry_after, told.overflow) == (status, retry_after, overflow)
    assert words in str(told)
    assert "node-3" not in str(told)
    assert "secret" not in str(told)


def test_a_session_s_own_sampling_wins_below_the_proxys_token_cap() -> None:
    config = ProxyConfig(temperature=0.7, top_p=0.9, top_k=20, max_output_tokens=100)
    assert policy(config, None) == Sampling(0.7, 0.9, 20, 100)
    assert policy(config, Sampling(temperature=0.0)) == Sampling(0.0, None, None, 100)
    assert policy(config, Sampling(max_tokens=50)).max_tokens == 50
    assert policy(config, Sampling(max_tokens=500)).max_tokens == 100


# --- how a session ends -----------------------------------------------------------------------------------------


async def test_a_fine_session_has_no_outcome_of_its_own() -> None:
    async with opened(PlayedEngine()) as session:
        assert await read(session, ask(session, "hi")) == "answer 1"
        assert (session.outcome, session.first_error) == (None, None)


async def test_keys_are_secret_and_their_own() -> None:
    async with opened(PlayedEngine()) as one, opened(PlayedEngine()) as two:
        assert one.key != two.key
        assert len(one.key) >= 32
        assert one.key.replace("-", "").replace("_", "").isalnum()


async def test_the_first_of_several_failures_is_the_one_that_is_kept() -> None:
    async with opened(PlayedEngine([EngineError("first")], [EngineOverflow("second")])) as session:
        for turn in range(2):
            with pytest.raises(Refusal):
                await read(session, ask(session, f"turn {turn}"))
        assert str(session.first_error) == "first"
        assert session.outcome is Outcome.ENGINE_ERROR


async def test_an_older_call_that_succeeds_does_not_hide_a_newer_failure() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([go, say("slow but fine")], [EngineError("died")])
    async with opened(engine) as session:
        older = ask(session, "older")
        with pytest.raises(Refusal):
            await read(session, ask(session, "newer"))
        go.set()
        await read(session, older)
        assert session.outcome is Outcome.ENGINE_ERROR
        await read(session, ask(session, "newer"))
        assert session.outcome is None


async def test_a_busy_engine_is_never_a_dead_one() -> None:
    async with opened(PlayedEngine(otherwise=[EngineBusy("queue full")])) as session:
        for _ in range(2 * MAX_FAILURES):
            with pytest.raises(Refusal, match="busy"):
                await read(session, ask(session, "go"))
        assert not session.ended.is_set()
        assert session.outcome is Outcome.ENGINE_ERROR, "if the harness gives up on it, the agent is not to blame"


async def test_a_lost_record_outranks_every_other_ending(tmp_path) -> None:
    class Forgetful(Ledger):
        async def append(self, record, request=None) -> None:
            raise CaptureError("the disk is gone")

    async with opened(PlayedEngine(), Forgetful("s"), max_calls=1) as session:
        await read(session, ask(session, "hi"))
        with pytest.raises(TurnLimit):
            ask(session, "one more")
        assert session.outcome is Outcome.CAPTURE_INCOMPLETE
        assert str(session.first_error) == "the disk is gone"
        sealed = await session.close()
        assert [hole.call_id for hole in sealed.holes] == ["s-0000"]


async def test_a_foreign_failure_of_the_ledger_is_a_lost_record_too() -> None:
    class Broken(Ledger):
        async def append(self, record, request=None) -> None:
            raise OSError("no space left")

    async with opened(PlayedEngine(), Broken("s")) as session:
        assert await read(session, ask(session, "hi")) == "answer 1"
        assert session.outcome is Outcome.CAPTURE_INCOMPLETE


async def test_the_limit_counts_what_is_in_flight() -> None:
    go = asyncio.Event()
    engine = PlayedEngine(otherwise=[go, say("ok")])
    async with opened(engine, max_calls=2) as session:
        two = [ask(session, f"agent {number}") for number in range(2)]
        with pytest.raises(TurnLimit):
            ask(session, "agent 3")
        assert ask(session, "agent 0") is two[0], "a retry is no new call, even over the limit"
        go.set()
        assert [await read(session, attempt) for attempt in two] == ["ok", "ok"]


async def test_a_call_after_the_close_is_refused_and_a_join_is_too() -> None:
    async with opened(PlayedEngine(otherwise=[asyncio.Event()])) as session:
        ask(session, "hi")
        await session.close()
        for text in ("hi", "new"):
            with pytest.raises(Refusal, match="closed") as caught:
                ask(session, text)
            assert caught.value.status == 410


async def test_readers_of_a_cancelled_generation_are_told_even_if_it_never_ran() -> None:
    engine = PlayedEngine()
    async with opened(engine) as session:
        attempt = ask(session, "hi")
        assert attempt.task is not None
        attempt.task.cancel()
        with pytest.raises(Refusal, match="shutting down"):
            await read(session, attempt)
        assert engine.requests == []


async def test_an_answered_attempt_is_kept_for_a_replay_and_holds_nothing_of_its_generation() -> None:
    """Attempts live as long as their session: at 100 calls a task and an event each are as much as the texts."""
    async with opened(PlayedEngine([say("sampled")])) as session:
        attempt = ask(session, "hi")
        generation = weakref.ref(attempt.task) if attempt.task is not None else None
        assert await read(session, attempt) == "sampled"
        assert generation is not None
        await asyncio.sleep(0)
        gc.collect()
        assert (attempt.task, generation(), attempt.deltas) == (None, None, [])
        assert not [kept for kept in gc.get_referents(attempt) if isinstance(kept, asyncio.Event)]
        assert await attempt.answer() is attempt.turn


async def test_closing_twice_at_once_seals_once(tmp_path) -> None:
    async with GatedLog(tmp_path / "log") as log:
        log.gate, log.reached = asyncio.Event(), asyncio.Event()
        async with opened(PlayedEngine([say("sampled")]), Ledger("s", log)) as session, asyncio.TaskGroup() as group:
            ask(session, "hi")
            await log.reached.wait()
            both = [group.create_task(session.close()) for _ in range(2)]
            await asyncio.sleep(0)
            log.gate.set()
            first, second = [await close for close in both]
            assert first is second
            assert len(first.records) == 1


async def test_what_the_model_was_asked_is_in_the_log_with_its_call(tmp_path) -> None:
    async with SegmentLog(tmp_path / "log") as log, opened(PlayedEngine(), Ledger("s", log)) as session:
        await read(session, ask(session, "hi"))
        await session.close()
    kept = read_log(tmp_path / "log").conversations()
    assert [message["content"] for message in kept["s-0000"].messages] == ["hi"]


async def test_records_are_let_go_when_a_session_closes() -> None:
    async with opened(PlayedEngine()) as session:
        await read(session, ask(session, "hi"))
        await session.close()
        assert session._latest == {}
        assert session._running == set()


async def test_deltas_are_let_go_once_a_call_is_committed() -> None:
    async with opened(PlayedEngine([bit("one "), bit("two"), say("one two")])) as session:
        attempt = ask(session, "hi")
        await read(session, attempt)
        assert attempt.deltas == []

"""The proxy over real sockets: each rule of the design's proxy table as the conversation it describes."""

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.capture import Ledger, SegmentLog, rebuild
from polar_env.config import ProxyConfig
from polar_env.errors import EngineBusy, EngineError, EngineOverflow
from polar_env.proxy.chat import Chat
from polar_env.proxy.server import ProxyServer, decode, well_formed
from polar_env.types import CallKind, HoleKind, ModelRequest, Outcome, Sampling, StopReason, WireApi
from proxy_helpers import PLAIN, GatedLog, PlayedEngine, Reply, Stage, bit, open_session, say, stage

# --- identity ---------------------------------------------------------------------------------------------------


async def test_the_key_is_found_wherever_a_client_can_put_it() -> None:
    async with stage(PlayedEngine()) as s:
        base, key = f"http://127.0.0.1:{s.port}", s.session.key
        places = [
            (f"{base}/s/{key}/plain", {}),
            (f"{base}/plain", {"Authorization": f"Bearer {key}"}),
            (f"{base}/plain", {"x-api-key": key}),
            (f"{base}/plain", {"x-goog-api-key": key}),
            (f"{base}/plain?key={key}", {}),
            (f"{base}/s/{key}/plain", {"x-api-key": "a CLI's own placeholder"}),
        ]
        for turn, (url, headers) in enumerate(places):
            async with s.http.post(url, json={"messages": [f"turn {turn}"]}, headers=headers) as response:
                assert response.status == 200, url
        assert s.session.calls == len(places)


async def test_an_unknown_key_gets_401_in_the_dialects_shape_and_costs_nothing() -> None:
    engine = PlayedEngine()
    async with stage(engine) as s:
        reply = await s.ask("hello", key="guessed")
        assert reply.status == 401
        assert reply.json["plain_error"] == 401
        async with s.http.post(f"http://127.0.0.1:{s.port}/plain", json={"messages": ["no key"]}) as response:
            assert response.status == 401
        assert engine.requests == []
        assert not s.session.first_call.is_set()
        assert (await s.session.close()).records == ()


async def test_fifty_calls_without_a_key_leave_nothing_in_memory_or_on_the_disk(tmp_path: Path) -> None:
    engine = PlayedEngine()
    async with SegmentLog(tmp_path / "log") as log, stage(engine, log=log) as s:

        async def keyless(number: int) -> int:
            body = {"messages": [f"hello {number}"], "stream": bool(number % 2)}
            async with s.http.post(f"http://127.0.0.1:{s.port}/plain", json=body) as response:
                return response.status

        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(keyless(number)) for number in range(50)]
        assert {call.result() for call in calls} == {401}
        assert (engine.requests, s.session.calls, s.session.usage.rejected.total()) == ([], 0, 0)
        assert (await s.session.close()).records == ()
    assert rebuild(tmp_path / "log").records == ()
    stored = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}  # noqa: ASYNC240
    assert list(stored) == ["calls.log"]
    assert b"hello" not in stored["calls.log"]


async def test_a_closed_session_gets_410_and_nothing_more_is_recorded() -> None:
    engine = PlayedEngine()
    async with stage(engine) as s:
        assert (await s.ask("before")).status == 200
        sealed = await s.session.close()
        reply = await s.ask("after")
        assert (reply.status, reply.json["plain_error"]) == (410, 410)
        assert await s.session.close() is sealed
        assert [record.call_id for record in sealed.records] == ["s-0000"]
        assert len(engine.requests) == 1


async def test_only_the_latest_closed_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar_env.proxy.server.REMEMBERED", 1)
    async with stage(PlayedEngine()) as s:
        older, newer = s.open("older"), s.open("newer")
        for session in (older, newer):
            await session.close()
        assert [(await s.ask("hi", key=session.key)).status for session in (older, newer)] == [401, 410]


async def test_one_session_closed_leaves_its_neighbour_alone() -> None:
    async with stage(PlayedEngine()) as s:
        other = s.open("other")
        await s.session.close()
        assert (await s.ask("still here", key=other.key)).status == 200


async def test_an_unknown_path_is_a_json_404_with_or_without_a_key() -> None:
    async with stage(PlayedEngine()) as s:
        for path in ("/admin", "/sessions", "/s/", "/metrics"):
            async with s.http.get(s.url(path)) as response:
                assert response.status == 404
                assert "message" in (await response.json())["error"]


async def test_only_a_websocket_upgrade_gets_426() -> None:
    async with stage(PlayedEngine()) as s:
        async with s.http.get(s.url("/plain")) as response:
            assert response.status == 426
        assert (await s.ask("over HTTP then")).status == 200


async def test_health_needs_no_key_and_models_lists_the_served_name() -> None:
    async with stage(PlayedEngine()) as s:
        async with s.http.head(f"http://127.0.0.1:{s.port}/") as response:
            assert response.status == 200
        async with s.http.get(s.url("/names")) as response:
            assert await response.json() == {"names": ["policy"]}
        async with s.http.get(s.url("/names", key="guessed")) as response:
            assert response.status == 401


async def test_token_counts_come_from_the_engine_and_generate_nothing() -> None:
    engine = PlayedEngine()
    async with stage(engine) as s:
        async with s.http.post(s.url("/count"), json={"messages": ["three short words"]}) as response:
            assert await response.json() == {"tokens": 3}
        assert engine.requests == []
        assert s.session.calls == 0


# --- what a request may be --------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 50_000, b'{"messages": 7}', b"{}"])
async def test_a_body_that_cannot_be_read_is_a_400_in_the_dialects_shape(body: bytes) -> None:
    engine = PlayedEngine()
    async with stage(engine) as s:
        async with s.http.post(s.url(), data=body) as response:
            assert response.status == 400
            assert (await response.json())["plain_error"] == 400
        assert engine.requests == []
        assert s.session.usage.rejected == {400: 1}


async def test_what_would_change_the_meaning_is_refused_and_an_unknown_field_is_counted() -> None:
    async with stage(PlayedEngine()) as s:
        assert (await s.ask("two please", n=2)).status == 400
        assert (await s.ask("hello", shiny_new_option=True)).status == 200
        assert s.session.usage.ignored == {"shiny_new_option": 1}
        sealed = await s.session.close()
        assert sealed.records[0].ignored == ("shiny_new_option",)


async def test_a_body_over_the_limit_is_a_413_whether_it_says_its_length_or_not() -> None:
    async def pieces():
        for _ in range(40):
            yield b"x" * 100

    engine = PlayedEngine()
    async with stage(engine, max_body_bytes=2000) as s:
        assert (await s.ask("x" * 3000)).status == 413
        async with s.http.post(s.url(), data=pieces()) as response:
            assert response.status == 413
        assert (await s.ask("short")).status == 200
        assert len(engine.requests) == 1


async def test_the_session_samples_by_its_policy_and_records_what_was_asked() -> None:
    engine = PlayedEngine()
    async with stage(engine, temperature=0.9, top_p=0.95, max_output_tokens=512) as s:
        await s.ask("hot", temperature=0.1, max_tokens=99_999)
        own = s.open("own", sampling=Sampling(temperature=0.3, max_tokens=4096))
        await s.ask("cold", key=own.key)
        assert engine.samplings == [Sampling(0.9, 0.95, None, 512), Sampling(0.3, None, None, 512)]
        record = (await s.session.close()).records[0]
        assert record.asked == Sampling(temperature=0.1, max_tokens=99_999)
        assert record.sampling == Sampling(0.9, 0.95, None, 512)


async def test_kind_and_thread_come_from_the_harness_profile() -> None:
    async with stage(PlayedEngine()) as s:
        await s.ask("a title", headers={"X-Kind": "side"})
        await s.ask("sub", headers={"X-Thread": "sub-1"})
        records = (await s.session.close()).records
        assert [(r.kind, r.thread) for r in records] == [(CallKind.SIDE, ""), (CallKind.AGENT, "sub-1")]


# --- streaming --------------------------------------------------------------------------------------------------


async def test_deltas_leave_as_they_come() -> None:
    second, last = asyncio.Event(), asyncio.Event()
    async with stage(PlayedEngine([bit("one "), second, bit("two"), last, say("one two")])) as s:
        client = await s.raw("go", stream=True)
        head = await client.until(b"data: one \n\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        assert b"event: start" in head
        assert b"two" not in head
        second.set()
        assert b"end" not in await client.until(b"data: two\n\n")
        last.set()
        assert b"event: end s-0000" in await client.until(b"0\r\n\r\n")


async def test_headers_and_the_first_event_leave_before_a_slow_engine_says_anything() -> None:
    slow = asyncio.Event()
    async with stage(PlayedEngine([slow, say("at last")]), keep_alive=0.02) as s:
        client = await s.raw("go", stream=True)
        head = await client.until(b"event: start\n\n")
        assert b"200 OK" in head
        await client.until(b"event: ping\n\n")
        await client.until(b"event: ping\n\n")
        slow.set()
        rest = await client.until(b"0\r\n\r\n")
        assert rest.index(b"at last") < rest.index(b"event: end")


async def test_a_burst_reply_is_a_whole_stream() -> None:
    async with stage(PlayedEngine([say("all at once")])) as s:
        reply = await s.ask("go", stream=True)
        assert reply.text == "event: start\n\ndata: all at once\n\nevent: end s-0000\n\n"


async def test_the_terminal_event_waits_for_the_disk(tmp_path) -> None:
    async with GatedLog(tmp_path / "log") as log:
        log.gate, log.reached = asyncio.Event(), asyncio.Event()
        async with stage(PlayedEngine([bit("text"), say("text, all of it")]), log=log) as s:
            client = await s.raw("go", stream=True)
            await client.until(b"data: , all of it\n\n\r\n")
            await log.reached.wait()
            assert s.session.calls == 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.reader.read(1)
            log.gate.set()
            assert b"event: end s-0000" in await client.until(b"0\r\n\r\n")
            assert s.session.calls == 1
    sealed = rebuild(tmp_path / "log")
    assert [record.call_id for record in sealed.records] == ["s-0000"]


async def test_a_plain_answer_waits_for_the_disk_too(tmp_path) -> None:
    async with GatedLog(tmp_path / "log") as log, asyncio.TaskGroup() as group:
        log.gate, log.reached = asyncio.Event(), asyncio.Event()
        async with stage(PlayedEngine([say("done")]), log=log) as s:
            asking = group.create_task(s.ask("go"))
            await log.reached.wait()
            assert not asking.done()
            log.gate.set()
            assert (await asking).json == {"id": "s-0000", "text": "done", "stop": "stop"}


async def test_a_failure_in_mid_stream_resets_the_connection_and_the_retry_is_answered() -> None:
    broken = asyncio.Event()
    engine = PlayedEngine([bit("partial"), broken, EngineError("worker 3 died")], [say("whole answer")])
    async with stage(engine) as s:
        client = await s.raw("go", stream=True)
        await client.until(b"data: partial\n\n")
        broken.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()
        retry = await s.ask("go", stream=True)
        assert "whole answer" in retry.text
        sealed = await s.session.close()
        assert [record.turn.text for record in sealed.records] == ["whole answer"]
        assert s.session.outcome is None, "the harness recovered"


async def test_an_engine_that_fails_at_once_is_an_http_status_even_for_a_stream() -> None:
    engine = PlayedEngine([EngineError("connect to host-17:8000 refused")])
    async with stage(engine) as s:
        reply = await s.ask("go", stream=True)
        assert reply.status == 503
        assert "host-17" not in reply.text, "engine details stay out of the sandbox"
        assert "host-17" in str(s.session.first_error)


# --- engine refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overflow_is_the_dialects_own_400(stream: bool) -> None:
    async with stage(PlayedEngine([EngineOverflow("maximum context length is 4096 tokens")])) as s:
        reply = await s.ask("far too long", stream=stream)
        assert reply.status == 400
        assert reply.json == {"plain_overflow": "maximum context length is 4096 tokens"}
        assert s.session.outcome is Outcome.CONTEXT_OVERFLOW
        assert (await s.ask("compacted")).status == 200
        assert s.session.outcome is None, "the harness compacted and went on"


async def test_an_overflow_that_shows_too_late_resets_the_stream_and_is_told_to_the_retry() -> None:
    late = asyncio.Event()
    engine = PlayedEngine([late, EngineOverflow("maximum context length is 4096 tokens")])
    async with stage(engine, keep_alive=0.01) as s:
        client = await s.raw("far too long", stream=True)
        await client.until(b"event: ping\n\n")
        late.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()
        for _ in range(2):
            retry = await s.ask("far too long", stream=True)
            assert (retry.status, "plain_overflow" in retry.json) == (400, True)
        assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_we_cannot_write_ends_the_session_as_our_failure(stream: bool) -> None:
    async with stage(PlayedEngine(), dialects=("proxy_helpers:Mute",)) as s:
        with suppress(aiohttp.ClientError):
            assert (await s.ask("hi", stream=stream)).status == 503
        assert s.session.ended.is_set()
        assert s.session.outcome is Outcome.ENGINE_ERROR
        assert "answering the harness: KeyError" in str(s.session.first_error)
        sealed = await s.session.close()
        assert (len(sealed.records), sealed.delivered) == (1, frozenset())


@pytest.mark.parametrize(("asked", "sent"), [(2.0, "2"), (0.2, "1"), (7.1, "8")])
async def test_a_busy_engine_is_a_429_with_retry_after(asked: float, sent: str) -> None:
    async with stage(PlayedEngine([EngineBusy("queue full", retry_after=asked)])) as s:
        reply = await s.ask("go", stream=True)
        assert (reply.status, reply.headers["Retry-After"]) == (429, sent)


async def test_an_engine_that_never_replies_or_aborts_has_failed() -> None:
    engine = PlayedEngine([bit("half")], [say("cut off", stop=StopReason.ABORT)], [ValueError("a bug in the engine")])
    async with stage(engine) as s:
        for turn in range(3):
            assert (await s.ask(f"turn {turn}")).status == 503
        assert s.session.usage.failed == 3
        assert s.session.outcome is Outcome.ENGINE_ERROR
        assert not s.session.ended.is_set()


async def test_a_dead_engine_ends_the_session_after_five_failures_in_a_row() -> None:
    engine = PlayedEngine(otherwise=[EngineError("connection refused")])
    async with stage(engine) as s:
        for _ in range(5):
            assert not s.session.ended.is_set()
            assert (await s.ask("go")).status == 503
        assert s.session.ended.is_set()
        assert s.session.outcome is Outcome.ENGINE_ERROR
        assert str(s.session.first_error) == "connection refused"
        assert (await s.ask("go")).status == 503
        assert len(engine.requests) == 5, "a dead engine is left alone"


async def test_one_success_starts_the_count_of_failures_again() -> None:
    down = [EngineError("blip")]
    async with stage(PlayedEngine(*[down] * 4, [say("up")], *[down] * 4)) as s:
        statuses = [(await s.ask(f"turn {turn}")).status for turn in range(9)]
        assert statuses == [503] * 4 + [200] + [503] * 4
        assert not s.session.ended.is_set()


async def test_calls_that_fail_together_count_as_one_failure() -> None:
    down = asyncio.Event()
    engine = PlayedEngine(otherwise=[down, EngineError("restarting")])
    async with stage(engine) as s, asyncio.TaskGroup() as group:
        calls = [group.create_task(s.ask(f"agent {number}")) for number in range(8)]
        await engine.until(8)
        down.set()
        assert {(await call).status for call in calls} == {503}
        assert not s.session.ended.is_set()


# --- retries ----------------------------------------------------------------------------------------------------


async def test_a_retry_in_flight_joins_and_both_get_the_one_generation() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([bit("hel"), go, say("hello")])
    async with stage(engine) as s, asyncio.TaskGroup() as group:
        first = await s.raw("hi", stream=True)
        await first.until(b"data: hel\n\n")
        second = await s.raw("hi", stream=True)
        await second.until(b"data: hel\n\n")
        third = group.create_task(s.ask("hi", stream=False, max_tokens=777))
        await s.arrivals.until(3)
        go.set()
        ends = [await client.until(b"0\r\n\r\n") for client in (first, second)]
        assert all(b"data: lo\n\n" in end and b"event: end s-0000" in end for end in ends)
        assert (await third).json == {"id": "s-0000", "text": "hello", "stop": "stop"}
        assert len(engine.requests) == 1
        assert s.session.calls == 1


async def test_a_client_that_vanishes_and_retries_gets_the_same_generation_replayed() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([bit("hel"), go, say("hello")])
    async with stage(engine, retry_grace=30.0) as s:
        first = await s.raw("hi", stream=True)
        await first.until(b"data: hel\n\n")
        await first.leave()
        go.set()
        await s.ledger.committed.wait()
        assert s.session.usage.undelivered == 1
        retry = await s.ask("hi", stream=True)
        assert retry.text == "event: start\n\ndata: hello\n\nevent: end s-0000\n\n"
        assert (len(engine.requests), s.session.calls, s.session.usage.replayed) == (1, 1, 1)
        sealed = await s.session.close()
        assert sealed.delivered == {"s-0000"}
        assert s.session.usage.undelivered == 0


async def test_claudes_plain_request_after_a_broken_stream_is_the_same_turn() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([bit("hel"), go, say("hello")])
    async with stage(engine, retry_grace=30.0) as s:
        stream = await s.raw("hi", stream=True, max_tokens=32_000)
        await stream.until(b"data: hel\n\n")
        await stream.leave()
        go.set()
        fallback = await s.ask("hi", max_tokens=21_333)
        assert fallback.json == {"id": "s-0000", "text": "hello", "stop": "stop"}
        assert len(engine.requests) == 1


async def test_the_same_body_after_a_full_delivery_is_sampled_again_and_supersedes() -> None:
    engine = PlayedEngine([say("")], [say("better")])
    async with stage(engine) as s:
        assert (await s.ask("hi")).json["id"] == "s-0000"
        assert (await s.ask("hi")).json == {"id": "s-0001", "text": "better", "stop": "stop"}
        sealed = await s.session.close()
        assert sealed.superseded == {"s-0000"}
        assert sealed.delivered == {"s-0000", "s-0001"}
        assert s.session.usage.superseded == 1


async def test_another_body_is_another_call() -> None:
    async with stage(PlayedEngine()) as s:
        await s.ask("hi")
        await s.ask("hi", "and then?")
        sealed = await s.session.close()
        assert (len(sealed.records), sealed.superseded) == (2, frozenset())


async def test_two_sub_agents_with_one_task_are_two_calls() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([go, say("one")], [go, say("two")])
    async with stage(engine) as s, asyncio.TaskGroup() as group:
        asks = [group.create_task(s.ask("look", headers={"x-thread": thread})) for thread in ("a", "b")]
        await engine.until(2)
        go.set()
        assert {(await ask).json["text"] for ask in asks} == {"one", "two"}


async def test_a_generation_nobody_comes_back_for_is_aborted_and_never_recorded() -> None:
    never = asyncio.Event()
    engine = PlayedEngine([bit("hel"), never], [say("again")])
    async with stage(engine, retry_grace=0.02) as s:
        client = await s.raw("hi", stream=True)
        await client.until(b"data: hel\n\n")
        await client.leave()
        await engine.aborted.wait()
        assert (await s.ask("hi")).json == {"id": "s-0001", "text": "again", "stop": "stop"}
        sealed = await s.session.close()
        assert [record.call_id for record in sealed.records] == ["s-0001"]
        assert s.session.usage.aborted == 1
        assert s.session.outcome is None


async def test_a_reply_the_client_did_not_stay_for_is_not_delivered() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([bit("hel"), go, say("hello")])
    async with stage(engine, retry_grace=30.0) as s:
        client = await s.raw("hi", stream=True)
        await client.until(b"data: hel\n\n")
        await client.leave()
        go.set()
        await s.ledger.committed.wait()
        sealed = await s.session.close()
        assert (len(sealed.records), sealed.delivered) == (1, frozenset())


async def test_a_client_that_stops_reading_has_not_been_delivered_to() -> None:
    more_than_the_kernel_takes = say("x" * 60_000)
    async with stage(PlayedEngine([more_than_the_kernel_takes]), retry_grace=30.0) as s:
        client = await s.raw("hi")
        client.writer.transport.pause_reading()
        await s.ledger.committed.wait()
        await asyncio.sleep(0.05)  # time in which a careless server would have called its buffer "delivered"
        assert s.session.usage.undelivered == 1
        client.writer.transport.resume_reading()
        await client.until(b'"stop"}')
        assert (await s.session.close()).delivered == {"s-0000"}


# --- limits -----------------------------------------------------------------------------------------------------


async def test_the_call_limit_stops_the_harness_and_names_the_outcome() -> None:
    engine = PlayedEngine()
    async with stage(engine, max_calls=2) as s:
        assert [(await s.ask(f"turn {turn}")).status for turn in range(2)] == [200, 200]
        assert not s.session.ended.is_set(), "the last call was still within the limit"
        reply = await s.ask("one more")
        assert (reply.status, reply.json["plain_error"]) == (404, 404)
        assert "2 model calls" in reply.json["message"]
        assert s.session.ended.is_set()
        assert s.session.outcome is Outcome.TURN_LIMIT
        assert len(engine.requests) == 2


async def test_engine_failures_use_up_no_calls() -> None:
    down = [EngineError("blip")]
    async with stage(PlayedEngine(down, down, [say("one")], down, [say("two")]), max_calls=2) as s:
        statuses = [(await s.ask(f"turn {turn}")).status for turn in range(5)]
        assert statuses == [503, 503, 200, 503, 200]
        assert s.session.outcome is None


async def test_overflows_do_use_up_calls_so_a_compaction_loop_ends() -> None:
    engine = PlayedEngine(otherwise=[EngineOverflow("too long")])
    async with stage(engine, max_calls=3) as s:
        statuses = [(await s.ask(text)).status for text in ("one", "one", "two", "two")]
        assert statuses == [400, 400, 400, 404]
        assert s.session.ended.is_set()


async def test_too_many_calls_at_once_get_429_with_retry_after() -> None:
    go = asyncio.Event()
    engine = PlayedEngine(otherwise=[go, say("ok")])
    async with stage(engine, max_concurrent=2) as s, asyncio.TaskGroup() as group:
        two = [group.create_task(s.ask(f"agent {number}")) for number in range(2)]
        await engine.until(2)
        refused = await s.ask("agent 3")
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        go.set()
        assert {(await call).status for call in two} == {200}
        assert (await s.ask("agent 3")).status == 200


# --- capture ----------------------------------------------------------------------------------------------------


async def test_a_malformed_engine_reply_is_answered_and_carries_its_holes() -> None:
    reply = say("hello")
    reply.log_probs.pop()
    async with stage(PlayedEngine([reply])) as s:
        assert (await s.ask("hi")).json["text"] == "hello"
        sealed = await s.session.close()
        assert [hole.kind for hole in sealed.records[0].holes] == [HoleKind.LENGTH_MISMATCH]
        assert not sealed.complete
        assert s.session.outcome is None, "a hole masks what it touches; it is not the session's ending"


async def test_a_full_disk_never_breaks_the_call_and_never_hides(tmp_path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "calls.log").symlink_to("/dev/full")
    async with SegmentLog(tmp_path / "log") as log, stage(PlayedEngine(), log=log) as s:
        assert (await s.ask("hi")).json["text"] == "answer 1"
        stream = await s.ask("hi again", stream=True)
        assert "event: end s-0001" in stream.text
        assert s.session.outcome is Outcome.CAPTURE_INCOMPLETE
        assert s.session.calls == 0
        sealed = await s.session.close()
        assert not sealed.complete
        told = [(hole.kind, hole.call_id) for hole in sealed.holes]
        assert told == [(HoleKind.LOST_RECORD, "s-0000"), (HoleKind.LOST_RECORD, "s-0001")], "each once"


async def test_the_record_holds_the_engines_own_ids_and_log_probs() -> None:
    reply = say("exact")
    async with stage(PlayedEngine([reply])) as s:
        await s.ask("hi")
        record = (await s.session.close()).records[0]
        assert (record.prompt_ids, record.sampled_ids) == (reply.prompt_ids, reply.sampled_ids)
        assert record.log_probs == reply.log_probs
        assert (record.policy_version, record.message_count, record.index) == ("policy-1", 1, 0)
        assert record.started <= record.ended


# --- endings ----------------------------------------------------------------------------------------------------


async def test_closing_aborts_what_runs_refuses_what_waits_and_resets_what_streams() -> None:
    never = asyncio.Event()
    engine = PlayedEngine([never], [bit("par"), never])
    async with stage(engine) as s, asyncio.TaskGroup() as group:
        waiting = group.create_task(s.ask("plain"))
        await engine.until(1)
        streaming = await s.raw("stream", stream=True)
        await streaming.until(b"data: par\n\n")
        await engine.until(2)
        sealed = await s.session.close()
        assert engine.live == 0
        assert (await waiting).status == 410
        with pytest.raises(ConnectionResetError):
            await streaming.rest()
        assert sealed.records == ()
        assert s.session.usage.aborted == 2


async def test_closing_lets_a_commit_finish(tmp_path) -> None:
    async with GatedLog(tmp_path / "log") as log, asyncio.TaskGroup() as group:
        log.gate, log.reached = asyncio.Event(), asyncio.Event()
        async with stage(PlayedEngine([say("sampled")]), log=log) as s:
            asking = group.create_task(s.ask("go"))
            await log.reached.wait()
            closing = group.create_task(s.session.close())
            await asyncio.sleep(0)
            assert s.session.closed
            log.gate.set()
            assert [record.turn.text for record in (await closing).records] == ["sampled"]
            assert (await asking).status == 200


async def test_a_cancelled_close_can_be_repeated(tmp_path) -> None:
    async with GatedLog(tmp_path / "log") as log, asyncio.TaskGroup() as group:
        log.gate, log.reached = asyncio.Event(), asyncio.Event()
        async with stage(PlayedEngine([say("sampled")]), log=log) as s:
            asking = group.create_task(s.ask("go"))
            await log.reached.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await s.session.close()
            log.gate.set()
            assert len((await s.session.close()).records) == 1
            assert (await asking).status == 200


async def test_a_disk_that_hangs_costs_the_record_and_not_the_rollout(tmp_path) -> None:
    async with GatedLog(tmp_path / "log") as log:
        log.gate, log.reached = asyncio.Event(), asyncio.Event()
        async with stage(PlayedEngine([say("sampled")]), log=log) as s:
            await s.raw("go", stream=True)
            await log.reached.wait()
            s.session.commit_wait = 0.02
            sealed = await s.session.close()
            assert [hole.kind for hole in sealed.holes] == [HoleKind.LOST_RECORD]
            assert s.session.outcome is Outcome.CAPTURE_INCOMPLETE


async def test_leaving_the_proxy_closes_every_session_and_keeps_the_callers_error() -> None:
    engine = PlayedEngine(otherwise=[asyncio.Event()])
    left: list[Stage] = []

    async def leave_in_a_hurry() -> None:
        async with stage(engine) as s:
            left.append(s)
            await s.raw("never answered")
            await engine.until(1)
            raise LookupError("the caller's own")

    with pytest.raises(LookupError, match="the caller's own"):
        await leave_in_a_hurry()
    assert engine.live == 0
    assert left[0].session.closed
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", left[0].port)


async def test_a_session_left_open_is_closed_by_the_proxy() -> None:
    engine = PlayedEngine(otherwise=[asyncio.Event()])
    request = ModelRequest(WireApi.CHAT, "any", ())
    async with ProxyServer(engine, ProxyConfig(), dialects=PLAIN) as proxy:
        session = open_session(proxy, "left", Ledger("left"))
        attempt = session.call(request, {}, {}, b"")
        await engine.until(1)
    assert session.closed
    assert engine.live == 0
    assert "closed" in str(attempt.error)


async def test_first_call_tells_that_the_harness_has_started() -> None:
    async with stage(PlayedEngine()) as s, asyncio.TaskGroup() as group:
        started = group.create_task(s.session.first_call.wait())
        await asyncio.sleep(0)
        assert not started.done()
        await s.ask("hello")
        assert await started


# --- many -------------------------------------------------------------------------------------------------------


async def _chat(s: Stage, name: str, turns: int) -> list[Reply]:
    session = s.open(name)
    replies = []
    for turn in range(turns):
        replies.append(await s.ask(f"{name} turn {turn}", key=session.key, stream=bool(turn % 2)))
    await session.close()
    return replies


async def test_no_word_crosses_between_64_sessions() -> None:
    class Parrot(PlayedEngine):
        async def generate(self, request, sampling, session):
            yield bit(session.session_id + ":")
            await asyncio.sleep(0)
            yield say(f"{session.session_id}: {request.messages[0]['content']}")

    names = [f"canary-{number:02d}" for number in range(64)]
    async with stage(Parrot()) as s:
        async with asyncio.TaskGroup() as group:
            chats = {name: group.create_task(_chat(s, name, 3)) for name in names}
        for name, chat in chats.items():
            for reply in chat.result():
                assert f"{name}: {name} turn" in reply.text.replace("\n\ndata: ", "")
                assert not any(other in reply.text for other in names if other != name)


async def test_250_calls_at_once_reach_the_engine_as_250() -> None:
    go = asyncio.Event()
    engine = PlayedEngine(otherwise=[go, say("ok")])
    async with stage(engine, max_calls=300, max_concurrent=300) as s, asyncio.TaskGroup() as group:
        calls = [group.create_task(s.ask(f"call {number}", stream=bool(number % 2))) for number in range(250)]
        await engine.until(250)
        assert engine.peak == 250
        go.set()
        assert {(await call).status for call in calls} == {200}
        sealed = await s.session.close()
        assert sorted(record.index for record in sealed.records) == list(range(250))
        assert len(sealed.delivered) == 250


async def test_a_listener_made_elsewhere_serves_and_closes_with_its_connections() -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(b"\0polar-proxy-test")
    async with ProxyServer(PlayedEngine(), ProxyConfig(), dialects=PLAIN) as proxy:
        session = open_session(proxy, "unix", Ledger("unix"))
        async with proxy.listen(sock):
            reader, writer = await asyncio.open_unix_connection(b"\0polar-proxy-test".decode())
            body = json.dumps({"messages": ["hi"]}).encode()
            head = f"POST /plain HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            assert b'"answer 1"' in await reader.readuntil(b"}")
        assert await reader.read() == b"", "an idle connection does not outlive its listener"
        writer.close()


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_whole_characters_pass_and_half_ones_are_replaced(value: object) -> None:
    assert well_formed(value) == value
    assert well_formed(["\ud83d\ude00", {"\ud800x": "cut \ud83d"}]) == ["\U0001f600", {"\ufffdx": "cut \ufffd"}]


def test_an_emoji_cut_in_two_reaches_the_engine_as_a_replacement_character() -> None:
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "cut \\ud83d here, \\uD83D\\uDE00 whole"}]}'
    request, _ = decode(Chat(), "/v1/chat/completions", {}, raw)
    assert request.messages[0]["content"] == "cut \ufffd here, \U0001f600 whole"

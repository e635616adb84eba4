"""What every served engine shares: which replica, which typed error, and what a harness is told of a refusal."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import Answer, Step, VllmServer
from polar_env.config import EngineConfig
from polar_env.engine import Session
from polar_env.engine.replicas import Replicas, dialling, parsed, root, with_v1
from polar_env.engine.vllm import VllmEngine
from polar_env.errors import EngineBusy, EngineError, EngineOverflow, EngineRefused
from polar_env.proxy import DIALECTS
from polar_env.types import INFRASTRUCTURE, Outcome
from proxy_helpers import stage
from served_helpers import always, serving

SCHEMA = {"error": {"message": "tools[0].function.parameters: 'strin' is not a type", "code": 400}}


@contextlib.asynccontextmanager
async def replicas(*bases: str, **settings):
    found = Replicas(EngineConfig(base_urls=bases, **settings), bases)
    try:
        yield found
    finally:
        await found.aclose()


async def posted(url: str, body: dict | None = None, **settings) -> object:
    """The answer to one POST, through what a generation goes through."""
    async with replicas(url, **settings) as found, found.open((url,), "/chat", body or {}) as at:
        return parsed(await at.response.read())


# --- an HTTP status is a typed error ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 415, 422])
async def test_a_request_the_engine_refuses_is_the_requests_fault_in_the_engines_words(status):
    async with serving({"POST /chat": always(status, SCHEMA)}) as url:
        with pytest.raises(EngineRefused, match=rf"^the engine answered {status}: tools\[0\].*'strin' is not a type$"):
            await posted(url)


async def test_a_refusal_names_no_host_because_a_sandbox_reads_it():
    async with serving({"POST /chat": always(400, SCHEMA)}) as url:
        with pytest.raises(EngineRefused) as caught:
            await posted(url)
    assert "127.0.0.1" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "set engine.api_key"),
        (403, "set engine.api_key"),
        (404, "check engine.model and engine.base_urls"),
        (405, "look at the engine's log"),
        (500, "look at the engine's log"),
        (502, "look at the engine's log"),
    ],
)
async def test_a_wrong_address_key_or_model_is_ours_and_says_what_to_change(status, remedy):
    async with serving({"POST /chat": always(status, text="no")}) as url:
        with pytest.raises(EngineError, match=rf"{url} answered {status}: no; {remedy}") as caught:
            await posted(url)
    assert not isinstance(caught.value, EngineRefused | EngineOverflow | EngineBusy)


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 64 tokens. However, you requested 65.",
        "Prompt length (70) fills or exceeds max_model_len (64). No room for output tokens.",
        "Requested token count exceeds the model's maximum context length of 64 tokens.",
    ],
)
async def test_a_prompt_that_does_not_fit_is_an_overflow_whatever_the_status(status, words):
    async with serving({"POST /chat": always(status, {"error": {"message": words}})}) as url:
        with pytest.raises(EngineOverflow, match="64"):
            await posted(url)


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("-3", 0.0), ("tomorrow", 2.0), (None, 2.0)])
async def test_a_busy_server_says_when_to_come_back(header, seconds):
    headers = {} if header is None else {"Retry-After": header}
    async with serving({"POST /chat": always(429, text="slow", headers=headers)}) as url:
        with pytest.raises(EngineBusy) as caught:
            await posted(url)
    assert caught.value.retry_after == seconds


async def test_a_cap_that_does_not_fit_is_dropped_once():
    caps = []

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        caps.append(body.get("max_tokens"))
        if "max_tokens" in body:
            return web.json_response({"error": "maximum context length"}, status=400)
        return web.json_response({"fine": True})

    async with serving({"POST /chat": chat}) as url:
        assert await posted(url, {"max_tokens": 9}) == {"fine": True}
    assert caps == [9, None]


# --- which replica --------------------------------------------------------------------------------------------------


@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=8), st.text(max_size=20))
def test_the_order_of_replicas_depends_on_the_session_alone(names, session):
    bases = tuple(f"http://{name}" for name in sorted(names))
    forwards, backwards = Replicas(EngineConfig(), bases), Replicas(EngineConfig(), bases[::-1])
    order = forwards.order(Session(session))
    assert order == backwards.order(Session(session))
    assert sorted(order) == sorted(bases)


@given(st.sets(st.integers(0, 99), min_size=2, max_size=8), st.text(max_size=20))
def test_a_replica_taken_away_leaves_the_order_of_the_others(names, session):
    bases = tuple(f"http://{name}" for name in sorted(names))
    whole = Replicas(EngineConfig(), bases).order(Session(session))
    assert Replicas(EngineConfig(), bases[1:]).order(Session(session)) == tuple(b for b in whole if b != bases[0])


async def test_a_replica_that_refused_a_connection_is_tried_last_from_then_on():
    async with serving({"POST /chat": always(200, {})}) as alive:
        async with serving({}) as gone:
            pass
        async with replicas(gone, alive) as found:
            session = next(Session(str(i)) for i in range(99) if found.order(Session(str(i)))[0] == gone)
            async with found.open(found.order(session), "/chat", {}) as at:
                assert at.base == alive
            assert found.order(session) == (alive, gone)


async def test_a_loop_that_is_late_does_not_take_a_live_server_for_a_dead_one():
    """As with a thousand sessions: all that is ready runs before the connection is looked at, and a timer is due."""
    async with serving({"POST /chat": always(200, {"fine": True})}) as url:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(posted(url, connect_timeout=0.3))
            for late in range(4):
                asyncio.get_running_loop().call_later(0.01 * late, time.sleep, 0.2)
        assert asked.result() == {"fine": True}


@pytest.mark.parametrize(("seconds", "tries"), [(0.5, 1), (3.0, 1), (3.1, 2), (7.0, 2), (10.0, 3), (60.0, 5)])
def test_the_kernel_gives_up_a_connection_after_the_configured_time(seconds, tries):
    with dialling(seconds, (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 9))) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT) == tries


@pytest.mark.e2e  # three seconds
async def test_a_host_that_swallows_connections_is_given_up_for_the_next_replica():
    with socket.socket() as swallows, contextlib.ExitStack() as stack:
        swallows.bind(("127.0.0.1", 0))
        swallows.listen(0)
        for _ in range(4):  # its queue is full, and the kernel answers nobody
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(swallows.getsockname())
        dead = f"http://127.0.0.1:{swallows.getsockname()[1]}"
        async with (
            serving({"POST /chat": always(200, {"fine": True})}) as url,
            replicas(dead, url, connect_timeout=1.0) as found,
            found.open((dead, url), "/chat", {}) as at,
        ):
            assert at.base == url


async def test_what_is_asked_before_the_request_goes_to_the_replica_that_takes_it():
    asked = []

    async def before(base: str) -> str:
        asked.append(base)
        return f"version of {base}"

    async with serving({}) as gone:
        pass
    async with (
        serving({"POST /chat": always(200, {})}) as alive,
        replicas(gone, alive) as found,
        found.open((gone, alive), "/chat", {}, before) as at,
    ):
        assert (at.base, at.before) == (alive, f"version of {alive}")
    assert asked == [gone, alive]


async def test_a_replica_that_dies_while_it_answers_is_not_asked_twice():
    """The request may have been sampled: sending it to another replica would sample it again, unseen."""
    asked = []

    async def die(request: web.Request) -> web.Response:
        asked.append(1)
        request.transport.abort()
        return web.Response()

    async with serving({"POST /chat": die}) as one, serving({"POST /chat": die}) as two, replicas(one, two) as found:
        with pytest.raises(EngineError, match=r"connection to .* was lost"):
            async with found.open((one, two), "/chat", {}):
                pass
    assert asked == [1]


@pytest.mark.parametrize(
    ("url", "base", "server"),
    [
        ("http://h:1", "http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1/v1", "http://h:1"),
        ("http://h/api/v1", "http://h/api/v1", "http://h/api"),
    ],
)
def test_an_address_is_taken_with_and_without_v1(url, base, server):
    assert with_v1(url) == base
    assert root(base) == server


# --- small questions --------------------------------------------------------------------------------------------------


async def test_json_of_any_size_is_read_and_anything_else_is_an_engine_error():
    large = list(range(100_000))
    assert parsed(json.dumps(large)) == large
    with pytest.raises(EngineError, match="is a proxy in between"):
        parsed("<html>")
    with pytest.raises(EngineError, match="is a proxy in between"):
        parsed("x" * (1 << 19))


async def test_a_question_answered_with_no_object_is_an_engine_error():
    async with serving({"GET /models": always(200, [1])}) as url, replicas(url) as found:
        with pytest.raises(EngineError, match="is it a model server"):
            await found.ask("GET", f"{url}/models")


async def test_the_card_is_that_of_the_configured_model_or_the_first():
    cards = {"data": [{"id": "a"}, {"id": "b", "max_model_len": 7}]}
    async with serving({"GET /models": always(200, cards)}) as url, replicas(url) as found:
        assert (await found.card(url, ""))["id"] == "a"
        assert (await found.card(url, "b"))["max_model_len"] == 7
        with pytest.raises(EngineError, match=r"serves \['a', 'b'\], not 'c'; correct engine.model"):
            await found.card(url, "c")


# --- a refusal, as the harness and the rollout see it -----------------------------------------------------------------

MESSAGES = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
ASKED = {
    "/v1/messages": MESSAGES,
    "/v1/chat/completions": MESSAGES,
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1beta/models/m:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


@contextlib.asynccontextmanager
async def behind_the_proxy(server: VllmServer, **config):
    """The real proxy and the real vLLM engine in front of ``server``."""
    async with server.run():
        engine = VllmEngine(EngineConfig(base_urls=(server.url,), model=server.model))
        try:
            async with stage(engine, dialects=DIALECTS, **config) as s:
                yield s
        finally:
            await engine.aclose()


async def said(s, path: str, body: dict, kind: str = "agent") -> tuple[int, str]:
    async with s.http.post(s.url(path), json=body, headers={"x-kind": kind}) as response:
        text = await response.text()
        return response.status, text if response.status == 200 else json.loads(text)["error"]["message"]


@pytest.mark.parametrize("path", ASKED)
async def test_a_refusal_is_each_dialects_own_400_with_the_engines_words(path):
    async with behind_the_proxy(VllmServer(fault="bad_request")) as s:
        assert await said(s, path, ASKED[path]) == (400, "the engine answered 400: tools: bad schema")


async def test_the_same_body_again_is_told_the_same_without_the_engine_and_uses_up_a_call():
    server = VllmServer(fault="bad_request")
    async with behind_the_proxy(server, max_calls=4) as s:
        statuses = [(await said(s, "/v1/messages", MESSAGES))[0] for _ in range(5)]
    assert statuses == [400] * 4 + [404]
    assert len(server.requests) == 1


async def test_refusals_are_counted_and_never_a_dead_engine():
    server = VllmServer(fault="bad_request")
    async with behind_the_proxy(server) as s:
        for turn in range(12):
            body = MESSAGES | {"messages": [{"role": "user", "content": f"try {turn}"}]}
            assert (await said(s, "/v1/messages", body))[0] == 400
        assert not s.session.ended.is_set()
        assert (s.session.usage.refused, s.session.usage.rejected[400]) == (12, 12)
        server.fault = ""
        assert (await said(s, "/v1/messages", MESSAGES))[0] == 200, "the engine was well all along"


async def test_a_session_that_was_only_ever_refused_is_masked_and_says_why():
    async with behind_the_proxy(VllmServer(fault="bad_request")) as s:
        await said(s, "/v1/messages", MESSAGES)
        assert s.session.outcome is Outcome.REQUEST_REFUSED
        assert str(s.session.first_error) == "the engine answered 400: tools: bad schema"
    assert Outcome.REQUEST_REFUSED in INFRASTRUCTURE


async def test_a_title_that_was_answered_does_not_make_a_refused_agent_an_honest_zero():
    server = VllmServer()
    async with behind_the_proxy(server) as s:
        assert (await said(s, "/v1/messages", MESSAGES, "side"))[0] == 200
        server.fault = "bad_request"
        await said(s, "/v1/messages", MESSAGES | {"messages": [{"role": "user", "content": "the task"}]})
        assert s.session.outcome is Outcome.REQUEST_REFUSED


async def test_the_limits_a_refused_harness_runs_into_do_not_make_it_an_honest_zero_either():
    async with behind_the_proxy(VllmServer(fault="bad_request"), max_calls=2) as s:
        for _ in range(4):
            await said(s, "/v1/messages", MESSAGES)
        assert s.session.ended.is_set()
        assert s.session.outcome is Outcome.REQUEST_REFUSED


async def test_an_agent_that_has_had_a_turn_cannot_mask_its_rollout_by_sending_nonsense():
    server = VllmServer()
    async with behind_the_proxy(server) as s:
        assert (await said(s, "/v1/messages", MESSAGES))[0] == 200
        server.fault = "bad_request"
        assert (await said(s, "/v1/messages", MESSAGES | {"messages": [{"role": "user", "content": "{"}]}))[0] == 400
        assert s.session.outcome is None
        assert "bad schema" in str(s.session.refused), "it is not hidden"


async def test_a_wrong_key_is_an_engine_failure_that_ends_the_session():
    async with behind_the_proxy(VllmServer(fault="unauthorised")) as s:
        statuses = [(await said(s, "/v1/messages", MESSAGES))[0] for _ in range(5)]
        assert statuses == [503] * 5
        assert (s.session.ended.is_set(), s.session.outcome) == (True, Outcome.ENGINE_ERROR)


async def test_requests_refused_together_are_each_told():
    server = VllmServer(fault="bad_request")
    async with behind_the_proxy(server) as s, asyncio.TaskGroup() as group:
        bodies = [MESSAGES | {"messages": [{"role": "user", "content": str(i)}]} for i in range(8)]
        told = [group.create_task(said(s, "/v1/messages", body)) for body in bodies]
    assert {task.result() for task in told} == {(400, "the engine answered 400: tools: bad schema")}


async def test_words_are_kept_short():
    async with serving({"POST /chat": always(400, {"error": {"message": "x" * 5000}})}) as url:
        with pytest.raises(EngineRefused) as caught:
            await posted(url)
    assert len(str(caught.value)) < 700


async def test_an_answer_after_a_refusal_is_captured_as_ever():
    server = VllmServer(fault="bad_request")
    async with behind_the_proxy(server) as s:
        await said(s, "/v1/messages", MESSAGES)
        server.fault, server.answer = "", Answer((Step((1, 2), (-1.0, -2.0), {"content": "ok"}),), finish="stop")
        assert (await said(s, "/v1/messages", MESSAGES | {"messages": [{"role": "user", "content": "again"}]}))[
            0
        ] == 200
        sealed = await s.session.close()
    assert [list(record.sampled_ids) for record in sealed.records] == [[1, 2]]
    assert sealed.complete

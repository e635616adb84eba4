"""Every refusal in every wire API's official shape, as its official client reads it; and usage that is the record's."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings

from dialect_helpers import ask, events, read_anthropic, read_chat, read_gemini, read_responses, split_turns
from polar_env.capture import Ledger
from polar_env.config import ProxyConfig
from polar_env.errors import EngineBusy, EngineError, EngineOverflow
from polar_env.proxy import DIALECTS, Dialect
from polar_env.proxy.anthropic import Anthropic
from polar_env.proxy.attempts import chunks
from polar_env.proxy.chat import Chat
from polar_env.proxy.gemini import Gemini
from polar_env.proxy.responses import Responses
from polar_env.proxy.server import ProxyServer
from polar_env.types import AssistantTurn, CallRecord, Delta, EngineReply, StopReason, Usage
from proxy_helpers import PlayedEngine, Stage, open_session, say, stage

APIS = ("anthropic", "chat", "responses", "gemini")
WINDOW = "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens."

# --- asking with the official clients ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a client knows of a refusal."""

    status: int
    headers: Mapping[str, str]
    error: dict[str, Any]
    kind: type[Exception] | None = None
    """The class its official client raised."""


async def told(s: Stage, api: str, text: str, *, stream: bool, key: str | None = None) -> Told:
    """Ask and be refused."""
    if api == "gemini":
        return await _gemini(s, text, stream, key or s.session.key)
    base, key, said = f"http://127.0.0.1:{s.port}", key or s.session.key, [{"role": "user", "content": text}]
    try:
        if api == "anthropic":
            async with anthropic.AsyncAnthropic(api_key=key, base_url=base, max_retries=0) as client:
                await client.messages.create(model="m", max_tokens=9, messages=said, stream=stream)
        async with openai.AsyncOpenAI(api_key=key, base_url=f"{base}/v1", max_retries=0) as client:
            if api == "chat":
                await client.chat.completions.create(model="m", messages=said, stream=stream)
            await client.responses.create(model="m", input=said, stream=stream)
    except (anthropic.APIStatusError, openai.APIStatusError) as error:
        return Told(error.status_code, error.response.headers, error.response.json(), type(error))
    raise AssertionError("answered")


async def _gemini(s: Stage, text: str, stream: bool, key: str) -> Told:
    """As the @google/genai client of Gemini CLI asks (no official Python client is installed)."""
    operation = "streamGenerateContent?alt=sse" if stream else "generateContent"
    body = {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    url = f"http://127.0.0.1:{s.port}/v1beta/models/m:{operation}"
    async with s.http.post(url, json=body, headers={"x-goog-api-key": key}) as response:
        assert response.status >= 400, "answered"
        return Told(response.status, response.headers, await response.json())


# --- what is refused --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    status: int
    scripts: tuple[Any, ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    before: str = ""
    """What happens first: ``closed``, ``asked`` (one answered call), ``busy`` (one call in flight)."""
    text: str = "hello"
    key: str | None = None


CASES = {
    "unknown key": Case(401, key="guessed"),
    "call limit": Case(404, config=(("max_calls", 1),), before="asked"),
    "turn limit": Case(404, config=(("max_turns", 1),), before="asked"),
    "token limit": Case(404, config=(("max_total_output_tokens", 1),), before="asked"),
    "sealed": Case(410, before="closed"),
    "too large": Case(413, config=(("max_body_bytes", 600),), text="x" * 601),
    "engine busy": Case(429, (EngineBusy("queue of http://node-3:8000 is full", retry_after=7.0),)),
    "too many at once": Case(429, config=(("max_concurrent", 1),), before="busy"),
    "engine failed": Case(503, (EngineError("http://node-3:8000 refused"),)),
    "overflow": Case(400, (EngineOverflow(WINDOW),)),
}


@asynccontextmanager
async def ready(case: Case, api: str) -> AsyncGenerator[Stage]:
    """A proxy at which the next request is refused."""
    scripts = [[say("first")]] if case.before == "asked" else [[asyncio.Event()]] if case.before == "busy" else []
    engine = PlayedEngine(*scripts, otherwise=case.scripts or None)
    async with stage(engine, dialects=DIALECTS, **dict(case.config)) as s:
        if case.before in ("asked", "busy"):
            path = "/v1/messages" if api != "anthropic" else "/v1/chat/completions"  # it matters to none of the rules
            body = json.dumps({"messages": [{"role": "user", "content": "first"}]}).encode()
            client = await s.send(f"/s/{s.session.key}{path}", body)
            await (engine.until(1) if case.before == "busy" else client.until(b"200 OK"))
        if case.before == "closed":
            await s.session.close()
        yield s


ANTHROPIC = {
    400: ("invalid_request_error", anthropic.BadRequestError),
    401: ("authentication_error", anthropic.AuthenticationError),
    404: ("not_found_error", anthropic.NotFoundError),
    410: ("invalid_request_error", anthropic.APIStatusError),
    413: ("request_too_large", anthropic.APIStatusError),
    429: ("rate_limit_error", anthropic.RateLimitError),
    503: ("overloaded_error", anthropic.APIStatusError),
}
OPENAI: dict[int, tuple[str, type[Exception]]] = {
    400: ("context_length_exceeded", openai.BadRequestError),
    401: ("invalid_api_key", openai.AuthenticationError),
    404: ("not_found", openai.NotFoundError),
    410: ("session_ended", openai.APIStatusError),
    413: ("", openai.APIStatusError),
    429: ("rate_limit_exceeded", openai.RateLimitError),
    503: ("server_is_overloaded", openai.InternalServerError),
}
GOOGLE = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def assert_anthropic(refused: Told) -> str:
    """docs.anthropic.com, "Errors": the type follows the status."""
    kind, raised = ANTHROPIC[refused.status]
    assert refused.error.keys() == {"type", "error"}
    assert (refused.error["type"], refused.error["error"].keys()) == ("error", {"type", "message"})
    assert refused.error["error"]["type"] == kind
    assert refused.kind is not None
    assert issubclass(refused.kind, raised)
    return refused.error["error"]["message"]


def assert_openai(refused: Told) -> str:
    """platform.openai.com, "Error codes": message, type, param, code."""
    code, raised = OPENAI[refused.status]
    error = refused.error["error"]
    assert (refused.error.keys(), error.keys()) == ({"error"}, {"message", "type", "param", "code"})
    assert (error["code"] or "") == code
    assert isinstance(error["type"], str)
    assert refused.kind is not None
    assert issubclass(refused.kind, raised)
    return error["message"]


def assert_google(refused: Told) -> str:
    """google.rpc.Status as JSON: the HTTP status, the canonical name, a message."""
    error = refused.error["error"]
    assert (refused.error.keys(), error.keys()) == ({"error"}, {"code", "message", "status"})
    assert (error["code"], error["status"]) == (refused.status, GOOGLE[refused.status])
    return error["message"]


SHAPES: dict[str, Callable[[Told], str]] = {
    "anthropic": assert_anthropic,
    "chat": assert_openai,
    "responses": assert_openai,
    "gemini": assert_google,
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("api", APIS)
async def test_a_refusal_has_the_apis_official_shape(api: str, name: str, stream: bool) -> None:
    case = CASES[name]
    async with ready(case, api) as s:
        refused = await told(s, api, case.text, stream=stream, key=case.key)
        assert refused.status == case.status
        assert refused.headers["Content-Type"].startswith("application/json")
        message = SHAPES[api](refused)
        assert len(message) > 5
        assert "node-3" not in message, "the sandbox reads this"
        assert ("Retry-After" in refused.headers) is (case.status == 429), "Codex exits on a 429 without it"
        if case.status == 429:
            assert refused.headers["Retry-After"] == ("7" if case.scripts else "1")


OVERFLOW_WORDS = {
    "anthropic": "prompt is too long: 5000 tokens > 4096 maximum",
    "chat": "maximum context length is 4096 tokens",
    "responses": "maximum context length is 4096 tokens",
    "gemini": "input token count (5000) exceeds the maximum number of tokens allowed (4096)",
}


@pytest.mark.parametrize("api", APIS)
async def test_an_overflow_is_in_the_words_that_make_clis_compact(api: str) -> None:
    async with ready(CASES["overflow"], api) as s:
        for stream in (True, False):
            assert OVERFLOW_WORDS[api] in SHAPES[api](await told(s, api, "far too long", stream=stream))


@pytest.mark.parametrize("api", APIS)
async def test_what_cannot_be_kept_is_refused_with_a_sentence_in_the_apis_shape(api: str) -> None:
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "anthropic": ("/v1/messages", {"messages": []}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
        "responses": ("/v1/responses", {"input": []}),
        "gemini": ("/v1beta/models/m:generateContent", {"contents": []}),
    }
    path, body = bodies[api]
    async with stage(PlayedEngine(), dialects=DIALECTS) as s, s.http.post(s.url(path), json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400
        assert len(error["message"]) > 20
        assert error.get("status") == "INVALID_ARGUMENT" or error["type"] == "invalid_request_error"


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("api", APIS)
async def test_a_number_that_json_has_not_is_a_400_and_nothing_is_sampled(api: str, word: str) -> None:
    """As the APIs themselves answer it. Taken for null it would change a tool's schema, or a result, in silence."""
    bodies = {
        "anthropic": ("/v1/messages", '{"messages": [{"role": "user", "content": "hi"}], "temperature": %s}'),
        "chat": ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "hi"}], "tools": [{"x": %s}]}'),
        "responses": ("/v1/responses", '{"input": "hi", "metadata": {"x": [%s]}}'),
        "gemini": ("/v1beta/models/m:generateContent", '{"contents": [{"parts": [{"text": "hi"}]}], "x": %s}'),
    }
    path, body = bodies[api]
    engine = PlayedEngine()
    async with stage(engine, dialects=DIALECTS) as s, s.http.post(s.url(path), data=body % word) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert f"{word} is not JSON" in error["message"]
    assert engine.requests == []


async def test_a_request_nested_without_end_is_the_agent_s_own_400_and_its_session_goes_on() -> None:
    """It has the key, so it can send anything. What Python can just read and not write again was taken for a failure
    of ours, which masks the rollout: a way out of every reward of 0."""
    engine = PlayedEngine()
    said = '{"messages": [{"role": "user", "content": "hi"}], "tools": [{"function": {"name": "x", "parameters": %s}}]}'
    async with stage(engine, dialects=DIALECTS) as s:
        for levels in (300, 900, *range(9_960, 10_000, 2), 100_000):
            deep = said % ('{"a":' * levels + "1" + "}" * levels)
            async with s.http.post(s.url("/v1/chat/completions"), data=deep) as response:
                assert (response.status, "nested deeper" in await response.text()) == (400, True)
        assert (engine.requests, s.session.outcome) == ([], None)
        async with s.http.post(s.url("/v1/chat/completions"), data=said % "{}") as response:
            assert response.status == 200


# --- honest usage -----------------------------------------------------------------------------------------------


def usage_of(api: str, answer: dict[str, Any]) -> Usage:
    """Prompt, completion and cached tokens as the API's documentation defines them."""
    if api == "gemini":
        count = answer["usageMetadata"]
        assert count["totalTokenCount"] == count["promptTokenCount"] + count["candidatesTokenCount"]
        return Usage(count["promptTokenCount"], count["candidatesTokenCount"], count.get("cachedContentTokenCount", 0))
    count = answer["usage"]
    if api == "anthropic":  # input_tokens are those that came from no cache
        cached, new = count["cache_read_input_tokens"], count["cache_creation_input_tokens"]
        return Usage(count["input_tokens"] + cached + new, count["output_tokens"], cached)
    prompt, sampled = ("prompt", "completion") if api == "chat" else ("input", "output")
    used = Usage(count[f"{prompt}_tokens"], count[f"{sampled}_tokens"])
    assert count["total_tokens"] == used.prompt_tokens + used.completion_tokens
    cached = count[f"{prompt}_tokens_details"]["cached_tokens"]
    return Usage(used.prompt_tokens, used.completion_tokens, cached)


READERS: dict[str, tuple[type[Dialect], Callable[[bytes], dict[str, Any]]]] = {
    "anthropic": (Anthropic, read_anthropic),
    "chat": (Chat, read_chat),
    "responses": (Responses, read_responses),
    "gemini": (Gemini, read_gemini),
}


async def answered(dialect: Dialect, turn: AssistantTurn, deltas: list[Delta]) -> tuple[CallRecord, bytes, Any]:
    """One call through a session: (its record, the streamed answer, the plain answer)."""
    base = say("x" * turn.usage.completion_tokens, prompt=turn.usage.prompt_tokens)
    reply = EngineReply(turn, base.prompt_ids, base.sampled_ids, base.log_probs, "policy-1")
    async with ProxyServer(PlayedEngine([*deltas, reply]), ProxyConfig()) as proxy:
        session, request = open_session(proxy, "s", Ledger("s")), ask(dialect)
        attempt = session.call(request, {}, {}, b"")
        streamed = b""
        with attempt.reading():
            async with aclosing(chunks(attempt, dialect.encoder(request, "c", attempt.prompt_tokens), 60.0)) as parts:
                async for part in parts:
                    streamed += part
            plain = json.loads(json.dumps(dialect.reply(request, await attempt.answer(), "c")))
        return (await session.close()).records[0], streamed, plain


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("cached", "told"), [(0, 0), (6, 6), (7, 7), (900, 7)])
async def test_what_was_cached_is_a_part_of_the_prompt_whatever_the_engine_says(
    api: str, cached: int, told: int
) -> None:
    kind, read = READERS[api]
    turn = AssistantTurn("hello", (), StopReason.STOP, Usage(7, 5, cached))
    _, streamed, plain = await answered(kind(), turn, [])
    assert usage_of(api, read(streamed)) == usage_of(api, plain) == Usage(7, 5, told)


async def test_a_client_that_adds_up_both_events_of_a_replay_counts_the_prompt_once() -> None:
    """Claude Code takes each count of the last event that is not 0, and else keeps the first event's."""
    turn = AssistantTurn("hello", (), StopReason.STOP, Usage(7, 5, 6))
    encoder = Anthropic().encoder(ask(Anthropic()), "c", prompt_tokens=7)
    wire = encoder.start() + b"".join(encoder.finish(turn))
    first, last = (event for kind, event in events(wire) if kind in ("message_start", "message_delta"))
    counts = {**first["message"]["usage"], **{name: count for name, count in last["usage"].items() if count}}
    assert counts["input_tokens"] + counts["cache_read_input_tokens"] == 7


async def test_tokens_are_counted_as_the_engine_would_be_shown_them() -> None:
    """The count is that of the prompt a call would get, its day and nonce in their steady form."""
    async with stage(PlayedEngine(), dialects=DIALECTS, volatile=(("user", "two words", "one"),)) as s:
        body = {"model": "m", "messages": [{"role": "user", "content": "say two words"}]}
        async with s.http.post(s.url("/v1/messages/count_tokens"), json=body) as response:
            assert await response.json() == {"input_tokens": 2}


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=60, deadline=None)
@given(split=split_turns())
def test_usage_is_the_records_own_count_streaming_or_not(api: str, split: tuple[AssistantTurn, list[Delta]]) -> None:
    kind, read = READERS[api]
    turn, deltas = split
    record, streamed, plain = asyncio.run(answered(kind(), turn, deltas))
    for answer in (read(streamed), plain):
        assert usage_of(api, answer) == record.turn.usage
        assert usage_of(api, answer).prompt_tokens == len(record.prompt_ids)
        assert usage_of(api, answer).completion_tokens == len(record.sampled_ids)

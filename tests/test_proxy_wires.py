"""The proxy with its real wire APIs: what each harness's client sees of the rules."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from polar_env.errors import EngineBusy, EngineError, EngineOverflow
from polar_env.proxy import DIALECTS
from polar_env.proxy.sse import Event, Parser
from polar_env.types import AssistantTurn, EngineReply, StopReason, ToolCall, Usage
from proxy_helpers import PlayedEngine, Reply, Stage, bit, say, stage


@dataclass(frozen=True)
class Wire:
    """A wire API from the client's side."""

    name: str
    path: str
    key: Callable[[str], dict[str, str]]
    body: Callable[[str], dict[str, Any]]
    error: Callable[[dict[str, Any]], str]
    last: str
    """Data or type of the event after which a client takes the answer for complete."""
    streamed: str = ""
    """The path of a streaming request, where it is not the body that asks for one."""

    def url(self, *, stream: bool) -> str:
        return self.streamed if stream and self.streamed else self.path


def _messages(text: str) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 32000, "messages": [{"role": "user", "content": text}]}


WIRES = [
    Wire(
        "anthropic",
        "/v1/messages?beta=true",
        lambda key: {"x-api-key": key},
        _messages,
        lambda body: body["error"]["message"],
        "message_stop",
    ),
    Wire(
        "chat",
        "/v1/chat/completions",
        lambda key: {"Authorization": f"Bearer {key}"},
        _messages,
        lambda body: body["error"]["message"],
        "[DONE]",
    ),
    Wire(
        "responses",
        "/v1/responses",
        lambda key: {"Authorization": f"Bearer {key}"},
        lambda text: {
            "model": "policy",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}],
        },
        lambda body: body["error"]["message"],
        "response.completed",
    ),
    Wire(
        "gemini",
        "/v1beta/models/any-name:generateContent",
        lambda key: {"x-goog-api-key": key},
        lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
        lambda body: body["error"]["message"] if body["error"]["status"] else "",
        "STOP",
        "/v1beta/models/any-name:streamGenerateContent?alt=sse",
    ),
]


@pytest.fixture(params=WIRES, ids=lambda wire: wire.name)
def wire(request: pytest.FixtureRequest) -> Wire:
    return request.param


async def post(s: Stage, wire: Wire, text: str, *, key: str | None = None, **more: Any) -> Reply:
    url = f"http://127.0.0.1:{s.port}{wire.url(stream=more.get('stream', False))}"
    headers = wire.key(key or s.session.key)
    async with s.http.post(url, json={**wire.body(text), **more}, headers=headers) as response:
        return Reply(response.status, response.headers, await response.text())


async def connect(s: Stage, wire: Wire, text: str, **more: Any) -> asyncio.StreamWriter:
    """A streaming request on a bare connection, whose head and first event have arrived."""
    data = json.dumps({**wire.body(text), "stream": True, **more}).encode()
    client = await s.send(f"/s/{s.session.key}{wire.url(stream=True)}", data)
    await client.until(b"\n\n")
    return client.writer


def events(reply: Reply) -> list[Event]:
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    return Parser().feed(reply.text.encode())


def named(event: Event) -> str:
    if event.data == "[DONE]":
        return event.data
    candidates = event.json().get("candidates") or [{}]
    return event.json().get("type") or candidates[0].get("finishReason", "")


def edit() -> EngineReply:
    """A turn with two parallel calls, one of them with arguments that are no JSON."""
    base = say("I will edit.")
    calls = (ToolCall("call_a", "edit", '{"path": "a.py"}'), ToolCall("call_b", "edit", '{"path": tru'))
    turn = AssistantTurn("I will edit.", calls, StopReason.TOOL_CALLS, base.turn.usage, "First, think.")
    return EngineReply(turn, base.prompt_ids, base.sampled_ids, base.log_probs, "policy-1", finish="tool_calls")


async def test_a_stream_ends_with_the_apis_own_last_event(wire: Wire) -> None:
    async with stage(PlayedEngine([bit("hel"), bit("lo"), say("hello")]), dialects=DIALECTS) as s:
        got = events(await post(s, wire, "hi", stream=True))
        assert named(got[-1]) == wire.last
        assert [named(event) for event in got].count(wire.last) == 1
        assert (await s.session.close()).delivered == {"s-0000"}


async def test_a_replayed_tool_call_keeps_its_ids_streaming_or_not(wire: Wire) -> None:
    go = asyncio.Event()
    engine = PlayedEngine([bit("I will"), go, edit()])
    async with stage(engine, dialects=DIALECTS, retry_grace=30.0) as s:
        vanished = await connect(s, wire, "edit a.py")
        vanished.transport.abort()
        go.set()
        await s.ledger.committed.wait()
        replay = await post(s, wire, "edit a.py", stream=True)
        assert (len(engine.requests), s.session.usage.replayed) == (1, 1)
        for text in ("s-0000", "call_a", "call_b"):
            assert text in replay.text
        assert named(events(replay)[-1]) == wire.last


async def test_the_plain_answer_has_the_streams_ids(wire: Wire) -> None:
    go = asyncio.Event()
    engine = PlayedEngine([go, edit()])
    async with stage(engine, dialects=DIALECTS) as s, asyncio.TaskGroup() as group:
        both = [group.create_task(post(s, wire, "edit", stream=stream)) for stream in (True, False)]
        await s.arrivals.until(2)
        go.set()
        streamed, plain = [(await task).text for task in both]
        assert len(engine.requests) == 1
        for text in ("s-0000", "call_a", "call_b"):
            assert text in streamed
            assert text in plain


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (EngineError("node-9 down"), 503),
        (EngineBusy("full"), 429),
        (EngineOverflow("maximum context length is 8"), 400),
    ],
)
async def test_engine_failures_are_errors_in_the_apis_own_shape(wire: Wire, failure: Exception, status: int) -> None:
    async with stage(PlayedEngine([failure], [failure]), dialects=DIALECTS) as s:
        for stream in (False, True):
            reply = await post(s, wire, f"stream {stream}", stream=stream)
            assert reply.status == status
            assert wire.error(reply.json)
            assert "node-9" not in reply.text
            assert ("Retry-After" in reply.headers) == (status == 429)


async def test_unknown_and_closed_keys_are_errors_in_the_apis_own_shape(wire: Wire) -> None:
    async with stage(PlayedEngine(), dialects=DIALECTS) as s:
        guessed = await post(s, wire, "hi", key="guessed")
        assert (guessed.status, bool(wire.error(guessed.json))) == (401, True)
        await s.session.close()
        closed = await post(s, wire, "hi")
        assert (closed.status, bool(wire.error(closed.json))) == (410, True)


async def test_keep_alives_are_events_of_the_api_itself(wire: Wire) -> None:
    slow = asyncio.Event()
    async with stage(PlayedEngine([slow, say("done")]), dialects=DIALECTS, keep_alive=0.01) as s:
        data = json.dumps({**wire.body("hi"), "stream": True}).encode()
        client = await s.send(f"/s/{s.session.key}{wire.url(stream=True)}", data)
        head = await client.until(b"\r\n\r\n")
        assert b"200" in head
        for _ in range(6):
            assert b"data: " in await client.until(b"\n\n"), "a comment would not reset Codex's idle timer"
        slow.set()
        assert wire.last.encode() in await client.until(b"0\r\n\r\n")


async def test_a_cut_answer_is_never_called_complete(wire: Wire) -> None:
    cut = say("half a sen", stop=StopReason.LENGTH)
    async with stage(PlayedEngine([cut], [cut]), dialects=DIALECTS) as s:
        plain = await post(s, wire, "plain")
        streamed = await post(s, wire, "streamed", stream=True)
        words = {
            "anthropic": '"max_tokens"',
            "chat": '"length"',
            "responses": '"incomplete"',
            "gemini": '"MAX_TOKENS"',
        }
        for reply in (plain, streamed):
            assert words[wire.name] in reply.text.replace(" ", "")
        assert [record.turn.stop for record in (await s.session.close()).records] == [StopReason.LENGTH] * 2


async def test_codex_retries_with_other_metadata_and_joins() -> None:
    responses = WIRES[2]
    go = asyncio.Event()
    engine = PlayedEngine([go, say("once")])
    async with stage(engine, dialects=DIALECTS) as s, asyncio.TaskGroup() as group:
        tries = [
            group.create_task(post(s, responses, "hi", stream=True, client_metadata=metadata))
            for metadata in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
        ]
        await s.arrivals.until(2)
        go.set()
        assert len({(await one).text for one in tries}) == 1
        assert len(engine.requests) == 1


async def test_claudes_other_routes() -> None:
    async with stage(PlayedEngine(), dialects=DIALECTS) as s:
        base = f"http://127.0.0.1:{s.port}/s/{s.session.key}"
        async with s.http.head(f"{base}/api/hello") as response:
            assert response.status == 200
        async with s.http.post(f"{base}/v1/messages/count_tokens", json=_messages("three short words")) as response:
            assert await response.json() == {"input_tokens": 3}
        async with s.http.get(f"{base}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]


async def test_codexs_websocket_attempt_is_told_to_use_http() -> None:
    async with stage(PlayedEngine(), dialects=DIALECTS) as s:
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        url = f"http://127.0.0.1:{s.port}/s/{s.session.key}/v1/responses"
        async with s.http.get(url, headers={**upgrade, "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}) as response:
            assert response.status == 426


async def test_usage_is_the_engines_own_count(wire: Wire) -> None:
    reply = say("hello", prompt=11)
    assert reply.turn.usage == Usage(11, 5)
    async with stage(PlayedEngine([reply]), dialects=DIALECTS) as s:
        answer = (await post(s, wire, "hi")).json
        usage = answer.get("usage") or answer["usageMetadata"]
        read = {name.lower().replace("_", ""): count for name, count in usage.items()}
        prompt, sampled = {"inputtokens", "prompttokens", "prompttokencount"}, {"outputtokens", "completiontokens"}
        assert [count for name, count in read.items() if name in prompt] == [11]
        assert [count for name, count in read.items() if name in {*sampled, "candidatestokencount"}] == [5]


async def test_googles_other_routes_and_ways_to_give_the_key() -> None:
    async with stage(PlayedEngine(otherwise=[bit("hel"), say("hello")]), dialects=DIALECTS) as s:
        base, key, body = f"http://127.0.0.1:{s.port}", s.session.key, WIRES[3].body("three short words")
        async with s.http.post(f"{base}/v1beta/models/m:countTokens?key={key}", json=body) as response:
            assert await response.json() == {"totalTokens": 3}
        async with s.http.get(f"{base}/v1beta/models?key={key}") as response:
            assert [model["name"] for model in (await response.json())["models"]] == ["models/policy"]
        async with s.http.post(f"{base}/s/{key}/models/m:streamGenerateContent", json=body) as response:
            assert response.content_type == "application/json"
            chunks = await response.json()
        said = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
        assert ("".join(said), chunks[-1]["candidates"][0]["finishReason"]) == ("hello", "STOP")
        async with s.http.post(f"{base}/v1beta/models/m:generateContent?key=guessed", json=body) as response:
            assert (response.status, (await response.json())["error"]["status"]) == (401, "UNAUTHENTICATED")


async def test_an_array_keeps_its_client_awake_with_elements_of_its_own() -> None:
    slow = asyncio.Event()
    async with stage(PlayedEngine([slow, say("done")]), dialects=DIALECTS, keep_alive=0.01) as s:
        data = json.dumps(WIRES[3].body("hi")).encode()
        client = await s.send(f"/s/{s.session.key}/v1beta/models/m:streamGenerateContent", data)
        await client.until(b',\r\n{"candidates":[]')
        slow.set()
        assert b'"finishReason":"STOP"' in await client.until(b"]\r\n0\r\n\r\n")

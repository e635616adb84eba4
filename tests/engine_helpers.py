"""A small server that speaks vLLM's wire, written from its measured shapes, and a git repository to play scripts in."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from hypothesis import HealthCheck, settings

from polar_env.config import EngineConfig
from polar_env.engine import Engine, Session
from polar_env.engine.scripts import Scene, Turn
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling, WireApi
from served_helpers import hang

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Property tests on a shared machine: an example may wait for the processor."""

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tests"
"""Where the tests keep what they download (ignored by git)."""

BASH: ToolSpec = {
    "name": "bash",
    "description": "Run a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def ask(*messages: ChatMessage, tools: tuple[ToolSpec, ...] = (BASH,), **fields: Any) -> ModelRequest:
    return ModelRequest(WireApi.CHAT, "any-name", messages or (user("Fix the bug."),), tools, **fields)


@contextlib.asynccontextmanager
async def opened(make: Callable[[EngineConfig], Engine], *urls: str, **settings: Any) -> AsyncGenerator[Any, None]:
    """An engine of ``make`` at these servers, closed at the end."""
    engine = make(EngineConfig(base_urls=urls, **settings))
    try:
        yield engine
    finally:
        await engine.aclose()


async def play(
    engine: Engine, request: ModelRequest, session: Session | None = None, sampling: Sampling | None = None
) -> tuple[list[Delta], EngineReply]:
    """One generation, held to the protocol: deltas, then exactly one reply, last."""
    parts = [part async for part in engine.generate(request, sampling or Sampling(), session or Session("s"))]
    reply = parts[-1]
    assert isinstance(reply, EngineReply)
    deltas = [part for part in parts[:-1] if isinstance(part, Delta)]
    assert len(deltas) == len(parts) - 1
    return deltas, reply


# --- what a server says -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One engine step of a stream: tokens with their log-probs, and what the parsers made of them (often nothing)."""

    ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    delta: dict[str, Any] = field(default_factory=dict)


TOOL_ANSWER = (
    Step((40,), (-0.5,), {"content": "I will"}),
    Step((1401,), (-0.25,), {"content": " look."}),
    Step((151657, 198), (-0.1, -0.2)),
    Step(
        (4913,), (-0.3,), {"tool_calls": [{"id": "t1", "type": "function", "index": 0, "function": {"name": "bash"}}]}
    ),
    Step((5631,), (-0.4,), {"tool_calls": [{"index": 0, "function": {"arguments": '{"command"'}}]}),
    Step((4730,), (0.0,), {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": ': "ls"}'}}]}),
    Step((151658,), (-0.6,)),
    Step((151645,), (-0.7,)),
)
"""Text, then a tool call; the ids of the markup and of the end come with an empty delta, as vLLM sends them."""


@dataclass(frozen=True)
class Answer:
    """A generation as vLLM would report it, streamed or whole."""

    steps: tuple[Step, ...] = TOOL_ANSWER
    prompt_ids: tuple[int, ...] = (151644, 872, 198, 151645)
    finish: str = "tool_calls"
    choices: int = 1
    with_ids: bool = True
    versions: tuple[str, ...] = ()
    fingerprint: str | None = "vllm-0.32.0-abc"

    @property
    def usage(self) -> dict[str, Any]:
        done = sum(len(step.ids) for step in self.steps)
        total = len(self.prompt_ids) + done
        return {"prompt_tokens": len(self.prompt_ids), "completion_tokens": done, "total_tokens": total}

    def chunks(self) -> list[dict[str, Any]]:
        """The data of the stream's events, without ``[DONE]``."""
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "tiny"}
        opening = [_choice(i, {"role": "assistant", "content": ""}, None, None) for i in range(self.choices)]
        ids = {"prompt_token_ids": list(self.prompt_ids), "prompt_text": None} if self.with_ids else {}
        out: list[dict[str, Any]] = [{**head, "choices": opening, **ids}]
        for at, step in enumerate(self.steps):
            last = at == len(self.steps) - 1
            choices = [self._step(i, step, self.finish if last else None) for i in range(self.choices)]
            mark = {"system_fingerprint": self.fingerprint} if last and self.fingerprint else {}
            out.append({**head, "choices": choices, **mark})
        return [*out, {**head, "choices": [], "usage": self.usage}]

    def _step(self, index: int, step: Step, finish: str | None) -> dict[str, Any]:
        choice = _choice(index, step.delta, _logprobs(step), finish)
        if self.with_ids:
            choice["token_ids"] = list(step.ids)
        if finish and self.versions:
            choice["weight_versions"] = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(self.versions)]
        return choice

    def stream(self) -> bytes:
        return b"".join(event(chunk) for chunk in self.chunks()) + b"data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        """The non-streamed body."""
        everything = Step(
            tuple(token for step in self.steps for token in step.ids),
            tuple(value for step in self.steps for value in step.log_probs),
        )
        choices = [self._step(i, everything, self.finish) for i in range(self.choices)]
        for choice in choices:
            del choice["delta"]
            choice["message"] = self._message()
        ids = {"prompt_token_ids": list(self.prompt_ids)} if self.with_ids else {}
        return {
            "id": "chatcmpl-1",
            "choices": choices,
            "usage": self.usage,
            "system_fingerprint": self.fingerprint,
            **ids,
        }

    def _message(self) -> dict[str, Any]:
        deltas = [step.delta for step in self.steps]
        calls: dict[int, dict[str, Any]] = {}
        for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
            call = calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = piece.get("id", call.get("id"))
            call["function"]["name"] += piece["function"].get("name", "")
            call["function"]["arguments"] += piece["function"].get("arguments", "")
        return {
            "role": "assistant",
            "content": "".join(delta.get("content") or "" for delta in deltas) or None,
            "reasoning": "".join(delta.get("reasoning") or "" for delta in deltas) or None,
            "tool_calls": [calls[index] for index in sorted(calls)],
        }


def _choice(index: int, delta: dict[str, Any], logprobs: object, finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(step: Step) -> dict[str, Any]:
    return {
        "content": [{"token": "?", "logprob": value, "bytes": None, "top_logprobs": []} for value in step.log_probs]
    }


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


# --- the server -------------------------------------------------------------------------------------------------

OVERFLOW_WORDS = (
    "This model's maximum context length is 64 tokens. However, your prompt contains 65 input tokens, which exceeds "
    "this limit even without any output tokens. Please reduce the length of the input prompt."
)


@dataclass
class VllmServer:
    """A replica on a free port. ``fault`` is what goes wrong with the next generations; ``""`` is nothing."""

    answer: Answer = field(default_factory=Answer)
    fault: str = ""
    model: str = "tiny"
    window: int = 64
    weight_versions: list[str] = field(default_factory=list)
    """Answers of /weight_info in order, the last one for ever; empty: the route does not exist."""
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator["VllmServer", None]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": self.window}]})

    async def _weight_info(self, _: web.Request) -> web.Response:
        if not self.weight_versions:
            raise web.HTTPNotFound
        found = self.weight_versions.pop(0) if len(self.weight_versions) > 1 else self.weight_versions[0]
        return web.json_response({"weight_version": found})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if self.fault == "no_count":
            return web.json_response({"tokens": []})
        return web.json_response({"count": len(self.answer.prompt_ids), "max_model_len": self.window, "tokens": []})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if refusal := self._refusal(body):
            return refusal
        if self.fault == "reset":
            request.transport.abort()
            return web.Response()
        if self.fault == "list":
            return web.json_response([1, 2])
        if not body["stream"]:
            return await self._whole()
        return await self._stream(request)

    def _refusal(self, body: dict[str, Any]) -> web.Response | None:
        match self.fault:
            case "overflow":
                return _error(400, OVERFLOW_WORDS)
            case "no_room_for_cap" if "max_tokens" in body:
                return _error(400, OVERFLOW_WORDS)
            case "bad_request":
                return _error(400, "tools: bad schema")
            case "busy":
                return _error(503, "overloaded", {"Retry-After": "7"})
            case "throttled":
                return _error(429, "slow down", {"Retry-After": "Mon, 30 Nov 2026 00:00:00 GMT"})
            case "unauthorised":
                return _error(401, "Unauthorized")
            case "gateway":
                return web.Response(status=502, text="<html>Bad gateway</html>")
        return None

    async def _whole(self) -> web.Response:
        if self.fault == "hang":
            await hang(self.started, self.aborted)
        if self.fault == "garbage":
            return web.Response(text='{"choices": [', content_type="application/json")
        return web.Response(text=json.dumps(self.answer.whole()), content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        chunks = self.answer.chunks()
        for chunk in chunks[:4] if self.fault in ("die", "garbage", "hang", "eof", "error_event") else chunks:
            await response.write(event(chunk))
        self.started.set()
        match self.fault:
            case "die":
                request.transport.abort()
                return response
            case "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.aborted.set()
            case "garbage":
                await response.write(b'data: {"choices": [{"index"\n\n')
            case "error_event":
                await response.write(event({"error": {"message": "EngineCore died", "code": 500}}))
            case "eof":
                return response
        await response.write(b"data: [DONE]\n\n")
        return response


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    return web.json_response(body, status=status, headers=headers)


# --- policies of one's own, named by dotted path -----------------------------------------------------------------


def own_policy(scene: Scene) -> Turn:
    return Turn(f"my own policy, step {scene.step}")


def broken_policy(scene: Scene) -> Turn:
    raise ValueError("no idea")

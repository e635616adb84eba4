"""Parts for proxy tests: an engine a test plays by hand, a minimal wire API, and clients on real sockets."""

import asyncio
import json
import socket
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from polar_env.capture import Ledger
from polar_env.config import EngineConfig, ProxyConfig
from polar_env.engine import EngineFacts
from polar_env.engine import Session as EngineSession
from polar_env.errors import BadRequest
from polar_env.proxy.server import ProxyServer
from polar_env.proxy.session import Classify, Session
from polar_env.segment_log import SegmentLog
from polar_env.types import (
    AssistantTurn,
    CallKind,
    CallRecord,
    Delta,
    EngineReply,
    ModelRequest,
    Sampling,
    StopReason,
    Usage,
    WireApi,
)

PLAIN = ("proxy_helpers:Plain",)

# --- replies ----------------------------------------------------------------------------------------------------


def say(text: str, *, prompt: int = 7, stop: StopReason = StopReason.STOP) -> EngineReply:
    """A valid reply whose ids are the text's bytes."""
    ids = array("i", list(text.encode()))
    turn = AssistantTurn(text=text, tool_calls=(), stop=stop, usage=Usage(prompt, len(ids)))
    log_probs = array("f", [-0.25] * len(ids))
    return EngineReply(turn, array("i", range(1, prompt + 1)), ids, log_probs, "policy-1", finish=stop.value)


def bit(text: str) -> Delta:
    return Delta("text", text)


# --- an engine --------------------------------------------------------------------------------------------------

Step = Delta | EngineReply | Exception | asyncio.Event
"""What a generation does next: yield, raise, or wait."""


class PlayedEngine:
    """Plays one script of steps per generation, in order of arrival; ``otherwise`` when the scripts are used up."""

    def __init__(self, *scripts: Iterable[Step], otherwise: Iterable[Step] | None = None) -> None:
        self.scripts = deque(tuple(script) for script in scripts)
        self.otherwise = otherwise
        self.requests: list[ModelRequest] = []
        self.sessions: list[str] = []
        self.samplings: list[Sampling] = []
        self.live = 0
        self.peak = 0
        self.aborted = asyncio.Event()
        self._changed = asyncio.Condition()

    async def check(self) -> EngineFacts:
        return EngineFacts("played", 4096, "policy-1", real_tensors=False)

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        self.requests.append(request)
        self.sessions.append(session.session_id)
        self.samplings.append(sampling)
        script = self.scripts.popleft() if self.scripts else self.otherwise
        self.live += 1
        self.peak = max(self.peak, self.live)
        replied = False
        try:
            await self._tell()
            for step in script if script is not None else (say(f"answer {len(self.requests)}"),):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    replied = isinstance(step, EngineReply)
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            if not replied:
                self.aborted.set()
            raise
        finally:
            self.live -= 1

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, generations: int) -> None:
        """Wait until that many generations have begun, ever."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= generations)

    async def count_tokens(self, request: ModelRequest) -> int:
        return sum(len(str(message.get("content", "")).split()) for message in request.messages)

    async def aclose(self) -> None: ...


class GatedLog(SegmentLog):
    """A real log on a disk that answers only once ``gate`` is set."""

    gate: asyncio.Event
    reached: asyncio.Event

    async def write(self, record: CallRecord, request: ModelRequest | None = None, **shared: Any) -> None:
        self.reached.set()
        await self.gate.wait()
        await super().write(record, request, **shared)


# --- a wire API -------------------------------------------------------------------------------------------------


@dataclass
class PlainEncoder:
    call_id: str
    sent: str = ""

    def start(self) -> bytes:
        return b"event: start\n\n"

    def delta(self, delta: Delta) -> bytes:
        self.sent += delta.text
        return f"data: {delta.text}\n\n".encode()

    def keep_alive(self) -> bytes:
        return b"event: ping\n\n"

    def finish(self, turn: AssistantTurn) -> tuple[bytes, bytes]:
        rest = turn.text.removeprefix(self.sent)
        return (f"data: {rest}\n\n".encode() if rest else b""), f"event: end {self.call_id}\n\n".encode()


class Plain:
    """POST /plain, POST /count, GET /names: the least a wire API can be."""

    wire = WireApi.CHAT

    def matches(self, method: str, path: str) -> str | None:
        operations = {
            ("POST", "/plain"): "generate",
            ("POST", "/count"): "count_tokens",
            ("GET", "/names"): "models",
            ("HEAD", "/"): "health",
            ("GET", "/plain"): "websocket",
        }
        return operations.get((method, path))

    def decode(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
        if body.get("n", 1) != 1:
            raise BadRequest("n must be 1")
        return ModelRequest(
            wire=self.wire,
            model="any",
            messages=tuple({"role": "user", "content": text} for text in body["messages"]),
            stream=body.get("stream", False),
            asked=Sampling(temperature=body.get("temperature"), max_tokens=body.get("max_tokens")),
            ignored=tuple(sorted(body.keys() - {"messages", "stream", "temperature", "max_tokens", "n"})),
        )

    def reply(self, request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
        return {"id": call_id, "text": turn.text, "stop": turn.stop}

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> PlainEncoder:
        return PlainEncoder(call_id)

    def error(self, status: int, message: str) -> dict[str, Any]:
        return {"plain_error": status, "message": message}

    def overflow(self, message: str) -> dict[str, Any]:
        return {"plain_overflow": message}

    def models(self, names: Iterable[str]) -> dict[str, Any]:
        return {"names": list(names)}

    def token_count(self, count: int) -> dict[str, Any]:
        return {"tokens": count}


class Mute(Plain):
    """A dialect with a bug: it can read and not write."""

    def reply(self, request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
        raise KeyError("choices")

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> PlainEncoder:
        raise KeyError("choices")


def classify(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
    kind = CallKind.SIDE if headers.get("x-kind") == "side" else CallKind.AGENT
    return kind, headers.get("x-thread", "")


class WatchedLedger(Ledger):
    """A real ledger that tells when calls are committed."""

    def __init__(self, session_id: str, log: SegmentLog | None = None) -> None:
        super().__init__(session_id, log)
        self.committed = asyncio.Event()

    async def append(self, record: CallRecord, request: ModelRequest | None = None) -> None:
        await super().append(record, request)
        self.committed.set()


class Arrivals:
    """Counts the model calls that reached a session; joined and replayed ones too."""

    def __init__(self, rule: "Classify | None" = None) -> None:
        self.count = 0
        self._rule = rule or classify
        self._pulse = asyncio.Event()

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        self.count += 1
        self._pulse.set()
        return self._rule(headers, body)

    async def until(self, count: int) -> None:
        while self.count < count:
            self._pulse.clear()
            await self._pulse.wait()


# --- a proxy on a real socket -----------------------------------------------------------------------------------


def loopback() -> socket.socket:
    """A listening socket whose connections have the smallest send buffer the kernel gives."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(512)
    return sock


@dataclass
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Stage:
    """A running proxy, a client, and one open session."""

    proxy: ProxyServer
    session: Session
    ledger: WatchedLedger
    arrivals: Arrivals
    port: int
    http: aiohttp.ClientSession
    clients: list["RawClient"] = field(default_factory=list)

    def url(self, path: str = "/plain", key: str | None = None) -> str:
        return f"http://127.0.0.1:{self.port}/s/{key or self.session.key}{path}"

    async def ask(
        self, *messages: str, key: str | None = None, headers: Mapping[str, str] | None = None, **body: Any
    ) -> Reply:
        """One request of the plain wire API, read to its end."""
        payload = {"messages": list(messages), **body}
        async with self.http.post(self.url(key=key), json=payload, headers=headers) as response:
            return Reply(response.status, response.headers, await response.text())

    async def raw(self, *messages: str, **body: Any) -> "RawClient":
        """The same request on a bare connection that the test reads, leaves or breaks by hand."""
        data = json.dumps({"messages": list(messages), **body}).encode()
        return await self.send(f"/s/{self.session.key}/plain", data)

    async def send(self, path: str, data: bytes) -> "RawClient":
        """A POST on a bare connection with the smallest receive buffer the kernel gives."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: proxy\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        self.clients.append(RawClient(reader, writer))
        return self.clients[-1]

    def open(self, session_id: str, **options: Any) -> Session:
        ledger = options.pop("ledger", None) or Ledger(session_id)
        return open_session(self.proxy, session_id, ledger, **options)


@dataclass
class RawClient:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def until(self, text: bytes) -> bytes:
        """What arrives up to and including ``text``, however long."""
        got = b""
        while not got.endswith(text):
            piece = await self.reader.read(1 if len(got) < 10_000 else 1 << 20)
            assert piece, f"the connection ended before {text!r}: {got!r}"
            got += piece
        return got

    async def rest(self) -> bytes:
        """Everything up to the end of the connection. Raises ConnectionResetError when it was reset."""
        return await self.reader.read(-1)

    async def leave(self) -> None:
        self.writer.transport.abort()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


def open_session(
    proxy: ProxyServer,
    session_id: str,
    ledger: Ledger,
    sampling: Sampling | None = None,
    classify: Classify = classify,
    **more: Any,
) -> Session:
    return proxy.open(
        session_id=session_id,
        ledger=ledger,
        engine_session=EngineSession(session_id=session_id),
        classify=classify,
        sampling=sampling,
        **more,
    )


@asynccontextmanager
async def stage(
    engine: PlayedEngine,
    *,
    log: SegmentLog | None = None,
    dialects: tuple[str, ...] = PLAIN,
    sampling: Sampling | None = None,
    max_turns: int | None = None,
    volatile: Iterable[tuple[str, str, str]] = (),
    updates: EngineConfig | None = None,
    **config: Any,
) -> AsyncGenerator[Stage]:
    """A proxy with one session ``s`` and a client, all on loopback. ``config`` sets ProxyConfig fields; ``updates`` is
    what its fence does about weights that change."""
    sock = loopback()
    port = sock.getsockname()[1]
    ledger, arrivals = WatchedLedger("s", log), Arrivals()
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        ProxyServer(engine, ProxyConfig(**config), dialects=dialects, updates=updates) as proxy,
        proxy.listen(sock),
        aiohttp.ClientSession(connector=connector) as http,
    ):
        limits = {"max_turns": max_turns, "volatile": volatile}
        session = open_session(proxy, "s", ledger, sampling, arrivals.classify, **limits)
        here = Stage(proxy, session, ledger, arrivals, port, http)
        try:
            yield here
        finally:
            await session.close()
            for client in here.clients:
                await client.leave()

"""Moves bytes between harnesses and sessions over HTTP, and decides nothing.

Two things never share a listener: what a sandbox can reach serves model routes only; control is in-process (``open``,
``close``) or on a listener of its own, with a secret of its own (``listen_control``). A session's key is found in the
path (``/s/<key>/…``), ``Authorization: Bearer``, ``x-api-key``, ``x-goog-api-key`` or ``?key=``.

How a reply leaves:

- Streaming: headers and the first native event as soon as the engine shows a sign of life, at the latest after
  ``HOLD`` (an engine that refuses at once is then still answered with a proper HTTP status). After the headers a
  failure resets the connection, because some clients take a clean end for a complete answer (measured: opencode); the
  harness then retries, and a full context window that showed too late is told to the retry at once.
- The terminal event leaves after the record is durable; a reply counts as delivered once its last byte went to the
  kernel of a client that was still connected.
"""

import asyncio
import math
import pkgutil
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, cast

from aiohttp import web

from polar_env import capacity, fast_json
from polar_env.capture import Ledger
from polar_env.config import EngineConfig, ProxyConfig
from polar_env.engine import Engine
from polar_env.engine import Session as EngineSession
from polar_env.engine.fence import Fence
from polar_env.errors import BadRequest, EngineError, PolarError, boundary
from polar_env.proxy import DIALECTS, Dialect, control
from polar_env.proxy.attempts import Attempt, Refusal, chunks, refusal
from polar_env.proxy.session import Classify, Session, policy
from polar_env.types import ModelRequest, Sampling

HOLD = 1.0
"""Seconds a stream's headers wait for the engine's first sign of life (less when keep_alive is shorter)."""

BACKLOG = 1024
"""Connections the kernel may queue: a group of sandboxes starts at once."""

CONNECTIONS = 64
"""Connections one sandbox may hold at a time (sub-agents use some 20): each is an open file of this process, on which
all its rollouts live."""

SHUTDOWN = 2.0
"""Seconds a closing listener waits for its handlers; their sessions are closed by then."""

REMEMBERED = 100_000
"""Keys of closed sessions answered 410 rather than 401."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
RequestFactory = Callable[[Any, Any, Any, Any, Any], web.BaseRequest]

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
ARRAY_HEADERS = {**STREAM_HEADERS, "Content-Type": "application/json; charset=utf-8"}


class ProxyServer:
    """The proxy of one process: all sessions, any number of listeners, one engine behind a ``fence``.

    ``async with ProxyServer(engine, config) as proxy``. Generations live in its task group; leaving closes every
    session. ``model`` is the one name that GET /v1/models lists: the name harnesses are told, which is not the engine's
    own (often a path of this machine). ``dialects`` are dotted paths, first match wins; ``updates`` is what ``fence``
    does about weights that change.
    """

    def __init__(
        self,
        engine: Engine,
        config: ProxyConfig,
        *,
        model: str = "policy",
        dialects: tuple[str, ...] = DIALECTS,
        updates: EngineConfig | None = None,
    ) -> None:
        self.fence = Fence(engine, updates)
        self._config = config
        self._model = model
        self._dialects = tuple(cast("Dialect", pkgutil.resolve_name(path)()) for path in dialects)
        self._sessions: dict[str, Session] = {}
        self._closed: dict[str, None] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        capacity.open_files()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._tasks.__aexit__, None, None, None)  # the body's own error is not a task's
            for session in tuple(self._sessions.values()):
                stack.push_async_callback(session.close)

    def open(
        self,
        *,
        session_id: str,
        ledger: Ledger,
        engine_session: EngineSession,
        classify: Classify,
        sampling: Sampling | None = None,
        max_turns: int | None = None,
        volatile: Iterable[tuple[str, str, str]] = (),
    ) -> Session:
        """A new session with its own key.

        ``sampling`` overrides the configured policy, below its token cap. ``max_turns`` is for harnesses that have no
        such limit (``limits``); ``volatile`` are the harness's parts of a prompt to show in a fixed form (``steady``).
        """
        session = Session(
            session_id=session_id,
            ledger=ledger,
            engine=self.fence,
            engine_session=engine_session,
            classify=classify,
            sampling=policy(self._config, sampling),
            config=self._config,
            spawn=self._tasks.create_task,
            on_close=self._retire,
            max_turns=max_turns,
            volatile=volatile,
            hold=self.fence.hold(session_id),
        )
        self._sessions[session.key] = session
        self.fence.watch(session_id, session.stop)
        return session

    @asynccontextmanager
    async def listen(self, sock: socket.socket, most: int | None = None) -> AsyncGenerator[None]:
        """Serve the model routes on a bound (or listening) socket, which is closed at the end with its connections.

        The socket may live in another network namespace: what is accepted on it stays in that namespace. Connections
        beyond ``most`` at a time are reset.
        """
        async with _served(self._answer, sock, self._request, most):
            yield

    @asynccontextmanager
    async def listen_control(self, sock: socket.socket, secret: str) -> AsyncGenerator[None]:
        """Serve a trainer's orders to the fence (``control``), and nothing else, on a socket no sandbox can reach."""

        async def obey(request: web.BaseRequest) -> web.StreamResponse:
            refused = control.refusal(secret, request.headers.get("Authorization", ""))
            status, body = refused or await control.answer(
                self.fence, request.method, request.path, await request.read()
            )
            return web.json_response(body, status=status)

        async with _served(obey, sock, self._request):
            yield

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        """aiohttp's request factory, with our body limit."""
        loop, limit = asyncio.get_running_loop(), self._config.max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)

    def _retire(self, session: Session) -> None:
        """Let go of a closed session's records; its key stays known."""
        self.fence.forget(session.session_id)
        if self._sessions.pop(session.key, None) is not None:
            self._closed[session.key] = None
            if len(self._closed) > REMEMBERED:
                del self._closed[next(iter(self._closed))]

    # --- routes ---

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        keys, path = credentials(request)
        for dialect in self._dialects:
            operation = dialect.matches(request.method, path)
            if operation is not None:
                return await self._operate(request, dialect, operation, keys, path)
        return web.json_response({"error": {"type": "not_found_error", "message": f"no route {path}"}}, status=404)

    async def _operate(
        self, request: web.BaseRequest, dialect: Dialect, operation: str, keys: tuple[str, ...], path: str
    ) -> web.StreamResponse:
        """What a route does. ``health`` and ``websocket`` need no key: they give nothing away."""
        if operation == "health":
            return web.json_response({"status": "ok"})
        session: Session | None = None
        try:
            if operation == "websocket":
                raise Refusal(426, "this API is served over HTTP, not over a WebSocket")
            session = self._session(keys)
            if operation == "models":
                return web.json_response(dialect.models((self._model,)))
            return await self._model_call(request, dialect, operation, session, path)
        except PolarError as error:
            refused = refusal(error)
            if session is not None:
                session.usage.rejected[refused.status] += 1
            return error_response(dialect, refused)

    def _session(self, keys: tuple[str, ...]) -> Session:
        """Raises Refusal: 401 for a key nobody gave out, 410 for a session that is over."""
        for key in keys:
            session = self._sessions.get(key)
            if session is not None and not session.closed:
                session.first_call.set()
                return session
        if any(key in self._closed or key in self._sessions for key in keys):
            raise Refusal(410, "this session is closed")
        raise Refusal(401, "unknown key: use the one this session was given")

    async def _model_call(
        self, request: web.BaseRequest, dialect: Dialect, operation: str, session: Session, path: str
    ) -> web.StreamResponse:
        raw = await read_body(request, self._config.max_body_bytes)
        headers = {name.lower(): value for name, value in request.headers.items()}
        decoded, body = decode(dialect, f"{path}?{request.query_string}", headers, raw)
        if operation == "count_tokens":
            return web.json_response(dialect.token_count(await session.count_tokens(decoded)))
        send_in_full(request)
        try:
            with boundary(EngineError, "answering the harness"):
                attempt = session.call(decoded, headers, body, raw)
                with attempt.reading():
                    serve = self._stream if decoded.stream else self._whole
                    response, complete = await serve(request, dialect, decoded, attempt)
                    if complete and connected(request):
                        session.delivered(attempt)
        except EngineError as error:
            session.broken(error)
            raise
        return response

    async def _whole(
        self, request: web.BaseRequest, dialect: Dialect, decoded: ModelRequest, attempt: Attempt
    ) -> tuple[web.StreamResponse, bool]:
        """The answer as one JSON body. Raises Refusal when the attempt failed."""
        turn = await attempt.answer()
        response = web.json_response(dialect.reply(decoded, turn, attempt.call_id))
        try:
            await response.prepare(request)
            await response.write_eof()
        except ConnectionError:
            return response, False
        return response, True

    async def _stream(
        self, request: web.BaseRequest, dialect: Dialect, decoded: ModelRequest, attempt: Attempt
    ) -> tuple[web.StreamResponse, bool]:
        """The answer as a stream of events. Raises Refusal only before the headers left."""
        keep_alive = self._config.keep_alive
        await attempt.opening(min(HOLD, keep_alive))
        response = web.StreamResponse(headers=STREAM_HEADERS if decoded.sse else ARRAY_HEADERS)
        encoder = dialect.encoder(decoded, attempt.call_id, attempt.prompt_tokens)
        complete = False
        try:
            await response.prepare(request)
            async with aclosing(chunks(attempt, encoder, keep_alive)) as parts:
                async for part in parts:
                    await response.write(part)
            await response.write_eof()
            complete = True
        except (PolarError, ConnectionError):
            pass  # told by the reset; the attempt keeps its own reason
        finally:
            if not complete:
                reset(request)
        return response, complete


class _Server(web.Server):
    most: int | None = None

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self.most is not None and len(self.connections) > self.most:
            transport.abort()


@asynccontextmanager
async def _served(
    answer: Handler, sock: socket.socket, make_request: RequestFactory, most: int | None = None
) -> AsyncGenerator[None]:
    server = _Server(answer, request_factory=make_request, handler_cancellation=True, access_log=None)
    server.most = most
    runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=most or BACKLOG).start()
        yield
    finally:
        await runner.cleanup()


def credentials(request: web.BaseRequest) -> tuple[tuple[str, ...], str]:
    """(every key the request offers, the path without the session's prefix)."""
    path, headers = request.path, request.headers
    offered = [
        headers.get("Authorization", "").removeprefix("Bearer ").strip(),
        headers.get("x-api-key", ""),
        headers.get("x-goog-api-key", ""),
        request.query.get("key", ""),
    ]
    if path.startswith("/s/"):
        key, _, rest = path.removeprefix("/s/").partition("/")
        offered.insert(0, key)
        path = f"/{rest}"
    return tuple(filter(None, offered)), path


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """The whole body. Raises Refusal (413) when it is longer than ``limit`` bytes, unread if it says so itself."""
    if (request.content_length or 0) <= limit:
        with suppress(web.HTTPRequestEntityTooLarge):
            return await request.read()
    raise Refusal(413, f"the request is larger than {limit} bytes")


def decode(
    dialect: Dialect, path: str, headers: Mapping[str, str], raw: bytes
) -> tuple[ModelRequest, Mapping[str, Any]]:
    """Raises BadRequest for what is not a JSON object or cannot be understood without changing its meaning."""
    with boundary(BadRequest, "reading the request"):
        body = fast_json.strict(raw)
        if b"\\ud" in raw or b"\\uD" in raw:
            body = well_formed(body)
        if not isinstance(body, dict):
            raise BadRequest("the request body must be a JSON object")
        body = cast("dict[str, Any]", body)
        return dialect.decode(path, headers, body), body


def well_formed(value: Any) -> Any:
    """JSON with half characters replaced by U+FFFD: a JavaScript harness that cuts an emoji in two sends a lone
    surrogate, which no tokenizer takes."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [well_formed(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def error_response(dialect: Dialect, refused: Refusal) -> web.Response:
    """The refusal in the dialect's own shape."""
    headers = {} if refused.retry_after is None else {"Retry-After": str(max(1, math.ceil(refused.retry_after)))}
    message = str(refused)
    body = dialect.overflow(message) if refused.overflow else dialect.error(refused.status, message)
    return web.json_response(body, status=refused.status, headers=headers)


def connected(request: web.BaseRequest) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def send_in_full(request: web.BaseRequest) -> None:
    """Make every drain wait until the kernel has taken all bytes, so that "written" means what it says."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)


def reset(request: web.BaseRequest) -> None:
    """End the connection with a TCP reset (SO_LINGER 0): a broken answer must not look like a finished one."""
    if request.transport is None:
        return
    sock = request.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()

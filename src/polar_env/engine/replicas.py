"""Servers of one model, reached over HTTP: one replica per session, and failures as typed errors. For every engine
that is a server; what is asked and how an answer is read is the engine's own.
"""

import contextlib
import functools
import hashlib
import json
import math
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import aiohttp

from polar_env import fast_json
from polar_env.config import EngineConfig
from polar_env.engine import EngineFacts, Session
from polar_env.engine.vllm_wire import OVERFLOW, error_text
from polar_env.errors import EngineBusy, EngineError, EngineOverflow, EngineRefused
from polar_env.messages import ChatMessage
from polar_env.proxy.sse import Parser
from polar_env.types import ModelRequest, WireApi

PROBE = ModelRequest(WireApi.CHAT, "", (ChatMessage(role="user", content="Say hello."),))
"""What every engine's start-up proof asks."""

_LOOK = "look at the engine's log"

_DOWN_FOR = 30.0
"""Seconds a replica that refused a connection is tried last; its sessions return when it is back."""


CAPS = ("max_tokens", "max_completion_tokens")
"""Names of the most tokens that may be sampled; an API knows one of them, or both."""


class ServerFailed(EngineError):  # noqa: N818 - what it did
    """The server answered with a 5xx: it broke on this request, or for good."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that a replica took, and what was asked of that replica before (``""``: nothing, or no answer)."""

    base: str
    response: aiohttp.ClientResponse
    before: str = ""


class Replicas:
    """One HTTP client over replicas of one served model. Hundreds of requests may run at once."""

    def __init__(self, config: EngineConfig, bases: tuple[str, ...]) -> None:
        self.bases = bases
        self._config = config
        self.model = config.model
        """The served model as far as it is known: configured, or told (``served_model``)."""
        self._client: aiohttp.ClientSession | None = None
        self._down: dict[str, float] = {}

    def http(self) -> aiohttp.ClientSession:
        """The one client, made in the running loop. No cookies, no limit on connections, no total timeout.

        Connections are not reused: a request on one that the server is just dropping (uvicorn does after 5 s, a dying
        replica at once) is lost without a word, and a new connection costs nothing beside a generation.
        """
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_read=self._config.idle_timeout)
            connect = functools.partial(dialling, self._config.connect_timeout)
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=connect),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Authorization": f"Bearer {self._config.api_key}"},
                json_serialize=fast_json.text,
                timeout=timeout,
            )
        return self._client

    async def aclose(self) -> None:
        """Close every connection; generations still open end with EngineError."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def order(self, session: Session) -> tuple[str, ...]:
        """Replicas for this session, best first: rendezvous hash, so a lost replica moves only its own sessions."""
        now = time.monotonic()

        def rank(base: str) -> tuple[bool, bytes]:
            weight = hashlib.sha256(f"{session.session_id}\n{base}".encode()).digest()
            return self._down.get(base, 0.0) <= now, weight

        return tuple(sorted(self.bases, key=rank, reverse=True))

    @contextlib.asynccontextmanager
    async def open(
        self,
        order: tuple[str, ...],
        path: str,
        body: dict[str, Any],
        before: Callable[[str], Awaitable[str]] | None = None,
    ) -> AsyncGenerator[Accepted, None]:
        """The accepted POST on the first replica that can be connected, and closed whatever happens.

        Servers refuse a prompt that leaves less than ``max_tokens`` of their window. Asked again without the cap they
        sample up to the window's end, which is nearer; only a prompt that itself does not fit is an overflow.

        Args:
            before: asked of a replica (by its base) ahead of the request; its answer is kept beside the response.
        """
        at = await self._connect(order, path, body, before)
        try:
            try:
                await accept(at.base, at.response)
            except EngineOverflow:
                if not [body.pop(name) for name in CAPS if name in body]:
                    raise
                at.response.close()
                at = await self._connect((at.base,), path, body, before)
                await accept(at.base, at.response)
            yield at
        finally:
            at.response.close()

    async def _connect(
        self,
        order: tuple[str, ...],
        path: str,
        body: Mapping[str, Any],
        before: Callable[[str], Awaitable[str]] | None,
    ) -> Accepted:
        refused: list[str] = []
        for base in order:
            told = await before(base) if before is not None else ""
            try:
                return Accepted(base, await self.http().post(f"{base}{path}", json=body), told)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                self._down[base] = time.monotonic() + _DOWN_FOR
                refused.append(f"{base} ({error})")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise broken(base, error) from error
        raise EngineError(f"no engine can be reached: {'; '.join(refused)}; start it or correct engine.base_urls")

    async def ask(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A small JSON question. Raises EngineError, EngineBusy."""
        try:
            async with self.http().request(method, url, json=body) as response:
                await accept(url, response)
                answer = parsed(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise broken(url, error) from error
        if not isinstance(answer, dict):
            raise EngineError(f"{url} did not answer with an object; is it a model server?")
        return cast("dict[str, Any]", answer)

    async def tokenized(self, base: str, body: Mapping[str, Any], remedy: str = _LOOK) -> dict[str, Any]:
        """``POST /tokenize``, which renders messages and tools as a generation would. Raises EngineError: no count."""
        told = await self.ask("POST", f"{root(base)}/tokenize", body)
        if not isinstance(told.get("count"), int):
            raise EngineError(f"{base}: /tokenize answered without a count ({error_text(told)[:200]}); {remedy}")
        return told

    async def served_model(self) -> str:
        """The configured model, else the one the first replica serves; asked once."""
        if not self.model:
            self.model = str((await self.card(self.bases[0], ""))["id"])
        return self.model

    async def card(self, base: str, model: str) -> dict[str, Any]:
        """The model's entry in ``GET {base}/models``; for ``""`` the only or first one."""
        cards = cast("list[dict[str, Any]]", (await self.ask("GET", f"{base}/models")).get("data") or [])
        names = [card.get("id") for card in cards]
        wanted = next((card for card in cards if model in ("", card.get("id"))), None)
        if wanted is None:
            raise EngineError(f"{base} serves {names}, not {model!r}; correct engine.model")
        return wanted


def dialling(seconds: float, address: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """A socket that the kernel gives up to connect after ``seconds``, to the next 1, 3, 7, 15 (tcp(7), TCP_SYNCNT).

    Not a timer of ours: with a thousand sessions in one process a loop that is late by seconds would take live servers
    for dead ones, and make itself later by asking them again (measured).
    """
    sock = socket.socket(*address[:3])
    tries = max(1, math.ceil(math.log2(seconds + 1)) - 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, tries)
    return sock


def agreed(found: Sequence[EngineFacts]) -> EngineFacts:
    """What every replica proved, with all their notes. Raises EngineError: they serve different models."""
    if len({(facts.model, facts.max_model_len) for facts in found}) > 1:
        raise EngineError(f"the replicas serve different models: {[facts.model for facts in found]}")
    return replace(found[0], notes=tuple(dict.fromkeys(note for facts in found for note in facts.notes)))


def addresses(config: EngineConfig, wanted: str, base: Callable[[str], str] | None = None) -> tuple[str, ...]:
    """The bases of the configured servers, each with its ``/v1`` or as ``base`` has it.

    Raises EngineError when none is configured; ``wanted`` says what to give.
    """
    if not config.base_urls:
        raise EngineError(f"engine.base_urls is empty; give {wanted}")
    return tuple((base or with_v1)(url) for url in config.base_urls)


def with_v1(url: str) -> str:
    """A configured address as the base of the OpenAI routes, given with or without its ``/v1``."""
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") else f"{bare}/v1"


def root(base: str) -> str:
    """The server itself: /tokenize and the control routes are not under /v1."""
    return base.rstrip("/").removesuffix("/v1")


def broken(where: str, error: BaseException) -> EngineError:
    """A transport failure in words. An idle timeout and a lost connection need different remedies."""
    if isinstance(error, TimeoutError):
        return EngineError(f"{where} sent nothing within its timeout; it hangs or engine.idle_timeout is too short")
    return EngineError(
        f"the connection to {where} was lost ({type(error).__name__}: {error}); look at the engine's log"
    )


async def accept(where: str, response: aiohttp.ClientResponse) -> None:
    """Return for a 2xx answer.

    Raises, with the server's own words: EngineOverflow; EngineRefused for what is wrong with the request (it names no
    host: a sandbox reads it); EngineBusy; EngineError for the rest, a wrong key, model or address among it.
    """
    if response.status < 400:
        return
    try:
        raw = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise broken(where, error) from error
    try:
        told = error_text(json.loads(raw))
    except ValueError:
        told = raw.decode("utf-8", "replace")
    told = told[:600]
    if response.status in (400, 413, 422) and _OVERFLOW.search(told):
        raise EngineOverflow(told)
    if response.status in _REQUESTS_FAULT:
        raise EngineRefused(f"the engine answered {response.status}: {told}")
    if response.status in (429, 503, 529):
        raise EngineBusy(f"{where} is busy: {told}", _seconds(response.headers.get("Retry-After", "")))
    kind = ServerFailed if response.status >= 500 else EngineError
    raise kind(f"{where} answered {response.status}: {told}; {_REMEDIES.get(response.status, _LOOK)}")


_OVERFLOW = re.compile(
    f"{OVERFLOW.pattern}|longer than the model's context|context_length_exceeded|prompt is too long|context window",
    re.IGNORECASE,
)
"""vLLM's words, and those of SGLang and of hosted APIs."""

_REQUESTS_FAULT = (400, 413, 415, 422)
"""Statuses by which a server says that it is well and the request is not."""

_REMEDIES = {401: "set engine.api_key", 403: "set engine.api_key", 404: "check engine.model and engine.base_urls"}


def _seconds(retry_after: str) -> float:
    """Seconds of a Retry-After header; a date or nothing is 2."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 2.0


def parsed(raw: bytes | str) -> object:
    """JSON. Raises EngineError on anything else. In a thread it would hold the interpreter just as long."""
    try:
        return fast_json.read(raw)
    except ValueError as error:
        raise EngineError(f"the engine sent something that is not JSON ({error}); is a proxy in between?") from error


async def whole(at: Accepted) -> object:
    """The JSON body of an answer that is not streamed. Raises EngineError."""
    try:
        return parsed(await at.response.read())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise broken(at.base, error) from error


async def chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[object, None]:
    """The chunks of an answer: the events of a stream, or the one body of a whole answer."""
    where = str(response.url.origin())
    try:
        if response.content_type != "text/event-stream":
            yield parsed(await response.read())
            return
        parser = Parser()
        async for piece in response.content.iter_any():
            for event in parser.feed(piece):
                if event.data == "[DONE]":
                    return
                yield parsed(event.data)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise broken(where, error) from error

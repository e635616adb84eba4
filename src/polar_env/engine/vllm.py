"""The vLLM engine: a stock server's chat completions, with the exact ids and log-probs of what it sampled.

Serve with ``--enable-auto-tool-choice --tool-call-parser …``. Where the policy version comes from, best first: the
answer's own ``weight_versions`` (vLLM 0.33); ``GET /weight_info`` before and after the generation (0.32 in dev mode;
two versions are joined by ``+``: the weights changed in between); else the served model and the server's fingerprint,
which says which server it was and not which weights.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import EngineFacts, Session
from polar_env.engine.vllm_wire import OVERFLOW, Assembly, chat_body, error_text, prompt_body
from polar_env.errors import EngineBusy, EngineError, EngineOverflow
from polar_env.messages import ChatMessage
from polar_env.proxy.sse import Parser
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling, WireApi

_DOWN_FOR = 30.0
"""Seconds a replica that refused a connection is tried last; its sessions return when it is back."""

_LARGE = 1 << 18
"""Bytes of JSON from which parsing leaves the event loop (the prompt ids of a long session)."""

_PROBE = ModelRequest(WireApi.CHAT, "", (ChatMessage(role="user", content="Say hello."),))


class VllmEngine:
    """One or more replicas of one served model. Hundreds of generations may run at once."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineError when no server is configured."""
        if not config.base_urls:
            raise EngineError("engine.base_urls is empty; give the vLLM server, such as http://host:8000/v1")
        self._config = config
        self._bases = tuple(_with_v1(url) for url in config.base_urls)
        self._client: aiohttp.ClientSession | None = None
        self._model = config.model
        self._down: dict[str, float] = {}
        self._no_weight_info: set[str] = set()

    # --- the protocol ------------------------------------------------------------------------------------------

    async def check(self) -> EngineFacts:
        """Prove every replica with two tiny generations. Raises EngineError naming the replica and what to change."""
        found = [await self._check_replica(base) for base in self._bases]
        if len({(facts.model, facts.max_model_len) for facts in found}) > 1:
            raise EngineError(f"the replicas serve different models: {[facts.model for facts in found]}")
        return found[0]

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        """Deltas as they come, then the reply. Closing it closes the HTTP response, which aborts the generation."""
        async with contextlib.aclosing(self._sample(self._order(session), request, sampling, session)) as parts:
            async for part in parts:
                yield part

    async def count_tokens(self, request: ModelRequest) -> int:
        """Prompt length by ``POST /tokenize``, which renders messages and tools as a generation would."""
        body = prompt_body(request, await self._served_model()) | {"add_generation_prompt": True}
        answer = await self._ask("POST", _root(self._bases[0]) + "/tokenize", body)
        count = answer.get("count")
        if not isinstance(count, int):
            raise EngineError(f"/tokenize answered without a count: {error_text(answer)[:200]}")
        return count

    async def aclose(self) -> None:
        """Close every connection; generations still open end with EngineError."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    # --- one generation ----------------------------------------------------------------------------------------

    async def _sample(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        model = await self._served_model()
        body = chat_body(request, sampling, session.session_id, model, self._config.stream)
        answer = Assembly()
        async with self._open(order, body) as at, contextlib.aclosing(_chunks(at.response)) as chunks:
            async for chunk in chunks:
                for delta in answer.feed(chunk):
                    yield delta
        if not answer.finished:
            raise EngineError(f"{at.base} ended its answer without a finish reason; look at the engine's log")
        yield answer.reply(await self._policy_version(at, model, answer))

    async def _policy_version(self, at: "_Accepted", model: str, answer: Assembly) -> str:
        """See the module's docstring."""
        if answer.versions:
            return "+".join(answer.versions)
        if at.version:
            after = await self._weight_version(at.base)
            return at.version if after in ("", at.version) else f"{at.version}+{after}"
        return f"{model}@{answer.fingerprint or 'unversioned'}"

    async def _weight_version(self, base: str) -> str:
        """What ``GET /weight_info`` says; ``""`` where the server has no such route (asked once per replica)."""
        if base in self._no_weight_info:
            return ""
        try:
            async with self._http().get(_root(base) + "/weight_info") as response:
                found = await _json(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""  # the generation itself will say what is wrong with this replica
        except EngineError:
            found = None
        version = cast("dict[str, Any]", found).get("weight_version") if isinstance(found, dict) else None
        if version is None:
            self._no_weight_info.add(base)
        return str(version or "")

    # --- HTTP --------------------------------------------------------------------------------------------------

    def _http(self) -> aiohttp.ClientSession:
        """The one client, made in the running loop. No cookies, no limit on connections, no total timeout.

        Connections are not reused: a request on one that the server is just dropping (uvicorn does after 5 s, a dying
        replica at once) is lost without a word, and a new connection costs nothing beside a generation.
        """
        if self._client is None:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=self._config.connect_timeout, sock_read=self._config.idle_timeout
            )
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Authorization": f"Bearer {self._config.api_key}"},
                timeout=timeout,
            )
        return self._client

    def _order(self, session: Session) -> tuple[str, ...]:
        """Replicas for this session, best first: rendezvous hash, so a lost replica moves only its own sessions."""
        now = time.monotonic()

        def rank(base: str) -> tuple[bool, bytes]:
            weight = hashlib.sha256(f"{session.session_id}\n{base}".encode()).digest()
            return self._down.get(base, 0.0) <= now, weight

        return tuple(sorted(self._bases, key=rank, reverse=True))

    @contextlib.asynccontextmanager
    async def _open(self, order: tuple[str, ...], body: dict[str, Any]) -> AsyncGenerator["_Accepted", None]:
        """The accepted chat request on the first replica that can be connected, and closed whatever happens.

        vLLM refuses a prompt that leaves less than ``max_tokens`` of its window. Asked again without the cap it
        samples up to the window's end, which is nearer; only a prompt that itself does not fit is an overflow.
        """
        at = await self._connect(order, body)
        try:
            try:
                await _accept(at.base, at.response)
            except EngineOverflow:
                if body.pop("max_tokens", None) is None:
                    raise
                at.response.close()
                at = await self._connect((at.base,), body)
                await _accept(at.base, at.response)
            yield at
        finally:
            at.response.close()

    async def _connect(self, order: tuple[str, ...], body: Mapping[str, Any]) -> "_Accepted":
        refused: list[str] = []
        for base in order:
            version = await self._weight_version(base)
            try:
                return _Accepted(base, await self._http().post(f"{base}/chat/completions", json=body), version)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                self._down[base] = time.monotonic() + _DOWN_FOR
                refused.append(f"{base} ({error})")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _broken(base, error) from error
        raise EngineError(f"no engine can be reached: {'; '.join(refused)}; start it or correct engine.base_urls")

    async def _ask(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A small JSON question. Raises EngineError, EngineBusy."""
        try:
            async with self._http().request(method, url, json=body) as response:
                await _accept(url, response)
                answer = await _json(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _broken(url, error) from error
        if not isinstance(answer, dict):
            raise EngineError(f"{url} did not answer with an object; is it a vLLM server?")
        return cast("dict[str, Any]", answer)

    async def _served_model(self) -> str:
        if not self._model:
            self._model = str((await self._card(self._bases[0]))["id"])
        return self._model

    async def _card(self, base: str) -> dict[str, Any]:
        """The served model's entry in ``GET /v1/models``: the configured one, else the only or first one."""
        cards = cast("list[dict[str, Any]]", (await self._ask("GET", f"{base}/models")).get("data") or [])
        names = [card.get("id") for card in cards]
        wanted = next((card for card in cards if self._model in ("", card.get("id"))), None)
        if wanted is None:
            raise EngineError(f"{base} serves {names}, not {self._model!r}; correct engine.model")
        return wanted

    # --- the start-up proof ------------------------------------------------------------------------------------

    async def _check_replica(self, base: str) -> EngineFacts:
        card = await self._card(base)
        plain = await self._tiny(base, Sampling(temperature=1.0, top_p=1.0, max_tokens=8))
        if breaches := judge("check", plain):
            told = "; ".join(f"{hole.kind}: {hole.detail}" for hole in breaches)
            raise EngineError(
                f"{base} does not give what training needs ({told}); it must support return_token_ids and logprobs "
                "(vLLM 0.10.2 or newer), and --reasoning-parser needs include_reasoning left on"
            )
        greedy = await self._tiny(base, Sampling(temperature=1.0, top_k=1, max_tokens=8))
        certain = all(value == 0.0 for value in greedy.log_probs)
        note = (
            "log-probs are of the distribution sampled from (processed_logprobs)"
            if certain
            else "log-probs are the model's own, before temperature, top_p and top_k (raw_logprobs): "
            "sample with temperature 1 and top_p 1, or serve with --logprobs-mode processed_logprobs"
        )
        window = card.get("max_model_len") or self._config.max_model_len
        return EngineFacts(str(card["id"]), int(window), plain.policy_version, real_tensors=True, notes=(note,))

    async def _tiny(self, base: str, sampling: Sampling) -> EngineReply:
        reply: EngineReply | None = None
        async with contextlib.aclosing(self._sample((base,), _PROBE, sampling, Session("check"))) as parts:
            async for part in parts:
                if isinstance(part, EngineReply):
                    reply = part
        if reply is None:
            raise EngineError(f"{base} gave no reply")
        return reply


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A chat request that a replica took, and the weight version it had before (``""``: it does not tell)."""

    base: str
    response: aiohttp.ClientResponse
    version: str


def _with_v1(url: str) -> str:
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") else f"{bare}/v1"


def _root(base: str) -> str:
    """The server itself: /tokenize and /weight_info are not under /v1."""
    return base.removesuffix("/v1")


def _broken(where: str, error: BaseException) -> EngineError:
    """A transport failure in words. An idle timeout and a lost connection need different remedies."""
    if isinstance(error, TimeoutError):
        return EngineError(f"{where} sent nothing within its timeout; it hangs or engine.idle_timeout is too short")
    return EngineError(
        f"the connection to {where} was lost ({type(error).__name__}: {error}); look at the engine's log"
    )


async def _accept(where: str, response: aiohttp.ClientResponse) -> None:
    """Return for a 2xx answer. Raises EngineOverflow, EngineBusy or EngineError with the server's own words."""
    if response.status < 400:
        return
    try:
        raw = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _broken(where, error) from error
    try:
        told = error_text(json.loads(raw))
    except ValueError:
        told = raw.decode("utf-8", "replace")
    told = told[:600]
    if response.status in (400, 413, 422) and OVERFLOW.search(told):
        raise EngineOverflow(told)
    if response.status in (429, 503):
        raise EngineBusy(f"{where} is busy: {told}", _seconds(response.headers.get("Retry-After", "")))
    raise EngineError(f"{where} answered {response.status}: {told}; {_REMEDIES.get(response.status, _LOOK)}")


_LOOK = "look at the engine's log"
_REMEDIES = {401: "set engine.api_key", 403: "set engine.api_key", 404: "check engine.model and engine.base_urls"}


def _seconds(retry_after: str) -> float:
    """Seconds of a Retry-After header; a date or nothing is 2."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 2.0


async def _json(raw: bytes | str) -> object:
    """Parsed, off the loop when large. Raises EngineError on anything that is not JSON."""
    try:
        return await asyncio.to_thread(json.loads, raw) if len(raw) > _LARGE else json.loads(raw)
    except ValueError as error:
        raise EngineError(f"the engine sent something that is not JSON ({error}); is a proxy in between?") from error


async def _chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[object, None]:
    """The chunks of an answer: the events of a stream, or the one body of a whole answer."""
    where = str(response.url.origin())
    try:
        if response.content_type != "text/event-stream":
            yield await _json(await response.read())
            return
        parser = Parser()
        async for piece in response.content.iter_any():
            for event in parser.feed(piece):
                if event.data == "[DONE]":
                    return
                yield await _json(event.data)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _broken(where, error) from error

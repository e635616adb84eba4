"""One rollout's side of the proxy: which request is which call, what is sampled, recorded, limited, and how it ended.

No sockets: ``server`` hands in decoded requests and carries attempts back to clients.

What the harness is told, and why (statuses measured on the real CLIs):

- over ``max_concurrent``: 429, always with Retry-After.
- over a limit (calls, turns, tokens: ``limits``): 404, after which the CLIs stop by themselves: Claude Code 2.1.332
  after 2 requests, Codex 0.169.0 after 6 (7 s), Pi 1.6.0 and mini-swe-agent 2.4.6 after 1. A 403 or 400 makes
  mini-swe-agent retry for minutes, a 400 makes Claude Code rewrite its request, a 401 makes it retry 10 times.
  ``ended`` is set as well: a harness that carries on regardless can be killed. The outcome is turn_limit whichever
  limit it was: all are the agent's allowance of model use, and ``first_error`` names the one.
- over ``max_seconds``: the same, outcome agent_timeout, and what runs is aborted.
- a full context window: the dialect's own 400, so that it compacts. The same body overflows again, so a retry is told
  so without the engine: the first time may have come too late for an HTTP status.
- a request the engine refuses (a tool schema, an image): the dialect's 400 with the engine's words, and the same to the
  same body again without the engine. It uses up a call, and is never a dead engine. Where no turn of the agent was ever
  sampled the outcome is request_refused, which is masked: harness and engine do not fit, and the policy had no say.
  After a turn it is the world the agent lives in, like a full window, and the harness's own end counts: an agent that
  could mask a rollout by sending nonsense would learn to.
- engine failures: 503, which every harness retries. After ``MAX_FAILURES`` in a row the engine counts as dead:
  ``ended`` is set, the outcome is engine_error, and the engine is left alone.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from polar_env.capture import Ledger
from polar_env.config import ProxyConfig
from polar_env.continuation import History
from polar_env.engine import Engine
from polar_env.engine import Session as EngineSession
from polar_env.engine.hold import Hold
from polar_env.errors import (
    CaptureError,
    EngineBusy,
    EngineError,
    EngineOverflow,
    EngineRefused,
    PolarError,
    Stopped,
    boundary,
)
from polar_env.proxy.ask import Ask
from polar_env.proxy.attempts import Attempt, Refusal, TimeLimit, TurnLimit, retry_key
from polar_env.proxy.call_ids import CallIds
from polar_env.proxy.limits import Limits
from polar_env.proxy.steady import Steady
from polar_env.proxy.threads import Threads
from polar_env.types import (
    AssistantTurn,
    CallKind,
    Delta,
    EngineReply,
    Hole,
    HoleKind,
    ModelRequest,
    Outcome,
    Sampling,
    SealedLedger,
    StopReason,
)

MAX_FAILURES = 5
"""Engine failures in a row, each on a request that came after the one before: a dead engine, not a blip."""

COMMIT_WAIT = 30.0
"""Seconds ``close`` waits for records on their way to the disk: a rollout must end even when the disk does not."""

Classify = Callable[[Mapping[str, str], Mapping[str, Any]], tuple[CallKind, str]]
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(slots=True)
class Counts:
    """What happened in a session, for metrics. Nothing here decides anything."""

    joined: int = 0
    """Requests that waited for a generation already in flight."""
    replayed: int = 0
    """Requests answered from the record of a reply that had not arrived."""
    superseded: int = 0
    """Calls the harness sampled again after it had their reply in full."""
    undelivered: int = 0
    """Committed calls whose reply has not reached a client in full."""
    aborted: int = 0
    """Generations stopped because nobody waited for them any more."""
    failed: int = 0
    """Generations the engine failed, overflow and busy included."""
    refused: int = 0
    """Generations the engine would not begin: the request's fault (``failed`` counts them too)."""
    rejected: Counter[int] = field(default_factory=Counter[int])
    """HTTP error statuses answered before anything was sampled."""
    ignored: Counter[str] = field(default_factory=Counter[str])
    """Request fields nobody understood, by name."""


def policy(config: ProxyConfig, sampling: Sampling | None) -> Sampling:
    """What is sampled with, whatever the harness asks: the session's own policy, never above the proxy's cap."""
    if sampling is None:
        return Sampling(config.temperature, config.top_p, config.top_k, config.max_output_tokens)
    return replace(sampling, max_tokens=min(config.max_output_tokens, sampling.max_tokens or config.max_output_tokens))


def _over() -> Refusal:
    """What the harness of a session that was ended from outside is told: 404, after which it stops by itself."""
    return Refusal(404, "this session is over")


class Session:
    """One harness run as the proxy sees it. Made by ``ProxyServer.open``; ended by ``close``."""

    def __init__(
        self,
        session_id: str,
        ledger: Ledger,
        engine: Engine,
        engine_session: EngineSession,
        classify: Classify,
        sampling: Sampling,
        config: ProxyConfig,
        spawn: Spawn,
        on_close: "Callable[[Session], None]" = lambda _: None,
        max_turns: int | None = None,
        volatile: Iterable[tuple[str, str, str]] = (),
        hold: Hold | None = None,
    ) -> None:
        self.session_id = session_id
        self.key = secrets.token_urlsafe(24)
        self.engine = engine
        self.sampling = sampling
        self.calls = 0
        """Logical calls committed: retries and replays are not counted, failures neither."""
        self.usage = Counts()
        self.first_call = asyncio.Event()
        """Set by the first request that carries this session's key: the harness has started."""
        self.ended = asyncio.Event()
        """Set when the session is over for the harness, which may not know: kill it."""
        self.closed = False
        self.commit_wait = COMMIT_WAIT
        self.hold = hold or Hold()
        """Time this session lost at the fence: on top of every budget of time."""
        self.limits = Limits(config, max_turns)
        self.steady = Steady(volatile) if config.steady_prompts else None
        self._ledger = ledger
        self._engine_session = engine_session
        self._classify = classify
        self._config = config
        self._spawn = spawn
        self._on_close = on_close
        self._latest: dict[str, Attempt] = {}
        self._threads = Threads()
        self._call_ids = CallIds()
        self._history = History()
        self._running: set[Attempt] = set()
        self._clock: asyncio.TimerHandle | None = None
        self._arrivals = 0
        self._failures = 0
        self._failed_before = 0
        self._trouble: PolarError | None = None
        self._ending: PolarError | None = None
        self._lost: PolarError | None = None
        self.refused: EngineRefused | None = None
        """The first request the engine would not take."""
        self._turn_sampled = False

    # --- how it went ---

    @property
    def first_error(self) -> PolarError | None:
        """The failure behind ``outcome``. One the harness recovered from (a later call succeeded) is forgotten."""
        unfit = None if self._turn_sampled else self.refused
        return self._lost or unfit or self._ending or self._trouble

    @property
    def outcome(self) -> Outcome | None:
        """How the session ended or broke; ``None`` while it is fine. Meant to be read after the harness has exited."""
        error = self.first_error
        return error.outcome if error is not None else None

    # --- requests ---

    def call(self, request: ModelRequest, headers: Mapping[str, str], body: Mapping[str, Any], raw: bytes) -> Attempt:
        """The attempt that answers this request: one in flight, one whose reply got lost, or a new one.

        Raises Refusal: closed (410), over (404, 503), too many at once (429).
        """
        kind, thread = self._classify(headers, body)
        if kind is CallKind.SUB_AGENT:
            thread = self._threads.place(
                thread, request.messages, lambda name: retry_key(request.wire, name, body), self._latest
            )
        key = retry_key(request.wire, thread, body)
        earlier = self._latest.get(key)
        if self.closed:
            raise Refusal(410, "this session is closed")
        if earlier is not None and earlier.running:
            self.usage.joined += 1
            return earlier
        if earlier is not None and earlier.committed and not earlier.delivered:
            self.usage.replayed += 1
            return earlier
        shown = self._shown(request)
        digest = hashlib.sha256(raw).hexdigest()
        ask = Ask(shown, kind, thread, digest, time.time(), self._history.place(shown, thread))
        self._admit(ask, earlier)
        if earlier is not None and isinstance(earlier.error, EngineOverflow | EngineRefused):
            self.limits.repeated()
            return earlier
        attempt = self._latest[key] = self._start(ask, earlier)
        return attempt

    def _shown(self, request: ModelRequest) -> ModelRequest:
        """The request as the engine is to see it."""
        return self.steady(request) if self.steady is not None else request

    async def count_tokens(self, request: ModelRequest) -> int:
        """Tokens of the prompt that the request would get; nothing is generated."""
        return await self.engine.count_tokens(self._call_ids.engines(self._shown(request)))

    def delivered(self, attempt: Attempt) -> None:
        """The whole reply, terminal event included, was written to a connected client."""
        if attempt.delivered:
            return
        attempt.delivered = True
        if attempt.recorded:
            self.usage.undelivered -= 1
            self._ledger.mark_delivered(attempt.call_id)

    def broken(self, error: PolarError) -> None:
        """We could not carry an answer to the harness: our failure, which a retry would only repeat."""
        self._end(error)

    def stop(self, error: PolarError) -> None:
        """End the session from outside, for a reason of ours: what runs is aborted, what comes is refused, and
        ``ended`` tells whoever holds the harness to kill it. Nothing happens to one that is closed."""
        if not self.closed:
            self._end(error)
            for attempt in tuple(self._running):
                attempt.abort(_over())

    async def close(self) -> SealedLedger:
        """Refuse what comes, abort what runs, let commits finish, seal. Idempotent; safe to repeat after a cancel."""
        self.closed = True
        if self._clock is not None:
            self._clock.cancel()
        for attempt in tuple(self._running):
            attempt.abort(Refusal(410, "this session is closed"))
        await self._commits()
        self._latest.clear()
        self._on_close(self)
        return self._ledger.seal()

    async def _commits(self) -> None:
        """Wait for what is being recorded; what a hanging disk still holds after ``COMMIT_WAIT`` counts as lost."""
        tasks = {attempt.task: attempt for attempt in self._running if attempt.task is not None}
        if not tasks:
            return
        _, hanging = await asyncio.wait(tasks, timeout=self.commit_wait)
        for task in hanging:
            task.cancel()
            self._lose(tasks[task], CaptureError(f"the log did not answer within {self.commit_wait:g} s"))

    def _lose(self, attempt: Attempt, error: CaptureError) -> None:
        self._lost = self._lost or error
        self._ledger.mark_incomplete(Hole(HoleKind.LOST_RECORD, attempt.call_id, str(error)))

    def _admit(self, ask: Ask, earlier: Attempt | None) -> None:
        """Raises Refusal when this call may not start."""
        if isinstance(self._ending, TurnLimit | TimeLimit):
            raise Refusal(404, str(self._ending))
        if isinstance(self._ending, Stopped):
            raise _over()
        if isinstance(self._ending, EngineError):
            raise Refusal(503, "the model engine is down; this session is over")
        try:
            self.limits.check(turn=ask.turn, again=earlier)
        except TurnLimit as limit:
            self._end(limit)
            raise
        if len(self._running) >= self._config.max_concurrent:
            raise Refusal(429, "too many model calls at once in this session")
        if self._clock is None and self._config.max_seconds is not None:
            self._clock = asyncio.get_running_loop().call_later(self._config.max_seconds, self._time_is_up)

    def _time_is_up(self, granted: float = 0.0) -> None:
        if more := self.hold.owed(granted):
            self._clock = asyncio.get_running_loop().call_later(more, self._time_is_up, granted + more)
            return
        limit = TimeLimit(404, f"this session has used its {self._config.max_seconds:g} seconds; stop here")
        self._end(limit)
        for attempt in tuple(self._running):
            attempt.abort(limit)

    def _end(self, error: PolarError) -> None:
        self._ending = self._ending or error
        self.ended.set()

    # --- generations ---

    def _start(self, ask: Ask, earlier: Attempt | None) -> Attempt:
        index = self._arrivals
        self._arrivals += 1
        self.usage.ignored.update(ask.request.ignored)
        attempt = Attempt(f"{self.session_id}-{index:04d}", index, self._config.retry_grace)
        self._running.add(attempt)
        self.limits.started(attempt, turn=ask.turn, again=earlier)
        attempt.task = self._spawn(self._run(attempt, ask, earlier))
        attempt.task.add_done_callback(lambda _: self._finished(attempt))
        return attempt

    def _finished(self, attempt: Attempt) -> None:
        self._running.discard(attempt)
        attempt.task = None  # the attempt is kept, to be replayed
        attempt.fail(Refusal(503, "the proxy is shutting down"))  # cancelled from outside, perhaps before it ever ran

    async def _run(self, attempt: Attempt, ask: Ask, earlier: Attempt | None) -> None:
        try:
            reply, turn = await self._sample(attempt, ask.place.carried(ask.request, self._ledger.ids), ask.kind)
            attempt.reply(turn)
            self._threads.answered(ask.thread, turn)
            self.limits.sampled(reply.turn.usage)
            await self._commit(attempt, ask, reply, turn)
            self._replace(earlier, attempt)
            self._turn_sampled |= ask.turn
        except asyncio.CancelledError:
            self.usage.aborted += 1
            raise
        except PolarError as error:
            self._failed(attempt, error)
        except Exception as error:  # noqa: BLE001 - one call's bug must not end the other sessions of the task group
            self._failed(attempt, EngineError(f"sampling {attempt.call_id}: {type(error).__name__}: {error}"))

    async def _sample(
        self, attempt: Attempt, request: ModelRequest, kind: CallKind
    ) -> tuple[EngineReply, AssistantTurn]:
        """(the reply, its turn as the harness is to see it). Raises EngineError and its kin. Leaving early closes the
        engine's iterator, which aborts upstream."""
        who = replace(self._engine_session, side=True) if kind is CallKind.SIDE else self._engine_session
        generation = self.engine.generate(self._call_ids.engines(request), self.sampling, who)
        ids = self._call_ids.answer()
        async with aclosing(cast("AsyncGenerator[Delta | EngineReply]", generation)) as items:
            async for item in items:
                if isinstance(item, Delta):
                    attempt.add(ids.delta(item))
                elif item.turn.stop is StopReason.ABORT:
                    raise EngineError("the engine aborted the generation")
                else:
                    return item, ids.turn(item.turn)
        raise EngineError("the engine ended its stream without a reply")

    async def _commit(self, attempt: Attempt, ask: Ask, reply: EngineReply, turn: AssistantTurn) -> None:
        """Record first, with the engine's own ids of calls, then let the reply go. A lost record is a hole of the
        session, never a lost answer."""
        try:
            with boundary(CaptureError, f"recording {attempt.call_id}"):
                record = ask.record(self.session_id, attempt.call_id, attempt.index, self.sampling, reply)
                await self._ledger.append(record, self._call_ids.engines(ask.request))
        except CaptureError as error:
            self._lose(attempt, error)
            attempt.commit(recorded=False)
        else:
            self.calls += 1
            self.usage.undelivered += 1
            if not record.holes:
                self._history.add(ask.place, attempt.call_id, attempt.index, turn, ask.thread)
            attempt.commit(recorded=True)
        if attempt.index >= self._failed_before:
            self._failures, self._trouble = 0, None

    def _replace(self, earlier: Attempt | None, attempt: Attempt) -> None:
        """The harness had ``earlier`` in full and asked again: it threw that answer away."""
        if earlier is not None and earlier.recorded and attempt.recorded:
            self.usage.superseded += 1
            self._ledger.mark_superseded(earlier.call_id)

    def _failed(self, attempt: Attempt, error: PolarError) -> None:
        self.usage.failed += 1
        if isinstance(error, EngineRefused):
            self.usage.refused += 1
            self.refused = self.refused or error
            attempt.fail(error)
            return
        self._trouble = self._trouble or error
        if not isinstance(error, EngineOverflow):
            self.limits.returned()  # only what was sampled, or could not be for the harness's own fault, uses up a call
        new = attempt.index >= self._failed_before  # calls that were in flight together fail of one cause
        self._failed_before = self._arrivals
        if new and not isinstance(error, EngineOverflow | EngineBusy):
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                self._end(self._trouble)
        attempt.fail(error)

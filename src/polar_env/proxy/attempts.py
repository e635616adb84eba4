"""One generation and the requests waiting for it: what is joined, replayed, and held back. No sockets.

A harness's model call can reach us several times: SDK retries, Claude Code's non-streaming fallback, a client that
vanished. All of them are one ``Attempt`` at the engine. ``chunks`` is its reply as bytes of a wire API.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from polar_env import fast_json
from polar_env.errors import BadRequest, EngineBusy, EngineError, EngineOverflow, EngineRefused, PolarError
from polar_env.proxy import Encoder
from polar_env.types import AssistantTurn, Delta, Outcome, WireApi

NOT_IDENTITY = frozenset(
    {
        "client_metadata",  # Codex: a HashMap, written in another order on every retry (measured)
        "stream",  # Claude Code re-sends a broken stream as a non-streaming request ...
        "stream_options",
        "max_tokens",  # ... with another max_tokens. The session's policy sets it anyway, so it changes nothing
        "max_completion_tokens",
        "max_output_tokens",
    }
)
"""Top-level body fields that may differ between two requests that mean the same model call, in any wire API.

They are here and not in the dialects because only retries care, and none of them means something else elsewhere.
"""


BUSY_RETRY_AFTER = 1.0
"""Seconds a harness is asked to wait when nothing better is known."""


class Refusal(PolarError):  # noqa: N818 - it refuses; what went wrong is its cause
    """An HTTP error the harness gets in its dialect's own shape. Nothing was sampled for it.

    ``retry_after`` is in seconds; a 429 always has one (``BUSY_RETRY_AFTER``): a bare 429 makes Codex exit at once.
    ``overflow`` picks the dialect's own words for a full context window, which make harnesses compact.
    """

    outcome = Outcome.AGENT_ERROR

    def __init__(self, status: int, message: str, *, retry_after: float | None = None, overflow: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = BUSY_RETRY_AFTER if retry_after is None and status == 429 else retry_after
        self.overflow = overflow


class TurnLimit(Refusal):
    """The session has used up its calls, turns or tokens."""

    outcome = Outcome.TURN_LIMIT


class TimeLimit(Refusal):
    """The session's own wall clock ran out."""

    outcome = Outcome.AGENT_TIMEOUT


def refusal(error: PolarError) -> Refusal:
    """What a harness is told of ``error``. Engine details stay with us: they name hosts, and a sandbox reads this."""
    match error:
        case Refusal():
            return error
        case EngineOverflow():
            return Refusal(400, str(error), overflow=True)
        case EngineBusy():
            return Refusal(429, "the model engine is busy; try again later", retry_after=error.retry_after)
        case BadRequest() | EngineRefused():
            return Refusal(400, str(error))
        case _:
            return Refusal(503, "the model engine failed; try again")


def retry_key(wire: WireApi, thread: str, body: Mapping[str, Any]) -> str:
    """Equal for requests that are the same model call: SHA-256 over wire, thread and what gives the body its meaning.

    The thread counts because two sub-agents given the same task send the same body and must be sampled twice.
    """
    kept = {name: value for name, value in body.items() if name not in NOT_IDENTITY}
    return hashlib.sha256(fast_json.canonical([wire, thread, kept])).hexdigest()


class Attempt:
    """One generation: filled by the session's task, read by any number of requests at once.

    It ends in exactly one of two ways: ``committed`` (``turn`` is set and safe to hand over) or failed (``error``).
    Slotted, because a session keeps one for every call.
    """

    __slots__ = (
        *("call_id", "index", "deltas", "turn", "error", "committed", "recorded", "delivered", "task"),
        *("_grace", "_left", "_pulse", "_readers", "_timer"),
    )

    def __init__(self, call_id: str, index: int, grace: float) -> None:
        self.call_id = call_id
        self.index = index
        self.deltas: list[Delta] = []
        self.turn: AssistantTurn | None = None
        self.error: PolarError | None = None
        self.committed = False
        self.recorded = False
        """False for a committed call whose record was lost: the client gets its answer, the session has a hole."""
        self.delivered = False
        self.task: asyncio.Task[None] | None = None
        self._grace = grace
        self._readers = 0
        self._left = False
        self._timer: asyncio.TimerHandle | None = None
        self._pulse: asyncio.Event | None = None
        """Made when somebody waits: an attempt is kept as long as its session, and an event is most of its memory."""

    @property
    def running(self) -> bool:
        return not self.committed and self.error is None

    @property
    def waited_for(self) -> bool:
        """Whether a client that has not left is waiting for the answer, or still reading it."""
        return self._readers > 0

    @property
    def counts(self) -> bool:
        """Whether the harness has this answer, or somebody still waits for it: a turn that is taken."""
        return self.error is None and (self.delivered or self._readers > 0 or not self._left)

    @property
    def prompt_tokens(self) -> int:
        """Known once the engine has answered; 0 before. Wire APIs that open with it repeat the truth at the end."""
        return self.turn.usage.prompt_tokens if self.turn else 0

    # --- the writing side ---

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self._tell()

    def reply(self, turn: AssistantTurn) -> None:
        """The engine is done: from here on the attempt is committed, never aborted."""
        self.turn = turn
        self._tell()

    def commit(self, *, recorded: bool) -> None:
        self.committed, self.recorded = True, recorded
        self.deltas = []  # readers hold the old list; a replay is written from the turn
        self._tell()

    def fail(self, error: PolarError) -> None:
        if self.running:
            self.error = error
            self._tell()

    def abort(self, why: PolarError) -> None:
        """Stop the engine, unless it has answered already: then the commit is under way and must finish."""
        if self.running and self.turn is None:
            self.fail(why)
            if self.task is not None:
                self.task.cancel()

    def _tell(self) -> None:
        if self._pulse is not None:
            self._pulse.set()
            self._pulse = None

    # --- the reading side ---

    @contextmanager
    def reading(self) -> Generator[None]:
        """A request waits here. When the last one leaves early, a retry has the grace period to take over."""
        self._readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            yield
        finally:
            self._readers -= 1
            self._left = not self._readers
            if not self._readers and self.running and self.turn is None:
                abandoned = EngineError("the client went away and did not come back")
                self._timer = asyncio.get_running_loop().call_later(self._grace, self.abort, abandoned)

    async def news(self, seconds: float | None) -> bool:
        """Wait for anything to change; False after ``seconds`` without. Raises Refusal when the attempt failed."""
        if self.error is not None:
            raise refusal(self.error)
        pulse = self._pulse = self._pulse or asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await pulse.wait()
        except TimeoutError:
            return False
        if self.error is not None:
            raise refusal(self.error)
        return True

    async def opening(self, hold: float) -> None:
        """Wait until there is something to show, or ``hold`` seconds: an early failure is then still an HTTP status.

        Raises Refusal when the attempt failed.
        """
        if not self.deltas and self.turn is None:
            await self.news(hold)

    async def answer(self) -> AssistantTurn:
        """The committed turn. Raises Refusal when the attempt failed."""
        while not self.committed:
            await self.news(None)
        assert self.turn is not None
        return self.turn


async def chunks(attempt: Attempt, encoder: Encoder, keep_alive: float) -> AsyncGenerator[bytes]:
    """The attempt as one stream of the wire API: each part as soon as it may leave, the end after the commit.

    Raises Refusal when the attempt fails: the stream has no proper end then, and must not get one.
    """
    deltas, seen = attempt.deltas, 0
    yield encoder.start()
    due = time.monotonic() + keep_alive
    while True:
        fresh = deltas[seen:]
        seen += len(fresh)
        data = b"".join(map(encoder.delta, fresh))
        if data:
            yield data
            due = time.monotonic() + keep_alive
        elif not fresh and attempt.turn is not None:
            break
        elif time.monotonic() >= due:  # deltas that write nothing (later parallel calls) do not keep a client alive
            yield encoder.keep_alive()
            due = time.monotonic() + keep_alive
        elif not fresh:
            await attempt.news(due - time.monotonic())
    before, terminal = encoder.finish(attempt.turn)
    yield before
    await attempt.answer()
    yield terminal

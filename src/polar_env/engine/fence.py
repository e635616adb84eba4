"""The fence between sessions and an engine whose weights change: held, aborted and dated generations.

One fence stands before the engine of a process; every session samples through it. The trainer closes it (``pause``),
swaps weights, says their name (``declare``) and opens it (``resume``). What a harness notices is a slow answer: a held
call's stream is kept alive by the proxy like any other, and an aborted generation of which nothing was shown is sampled
again. One that had streamed a part cannot be: it ends as a busy engine, which breaks the stream, and the harness asks
again.

The time a session waits at the fence, and the time of generations thrown away, is nobody's budget: ``Hold`` counts it.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

from polar_env.engine import Engine, EngineFacts, Session
from polar_env.errors import BadRequest, EngineBusy, EngineError
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling, StopReason

VERSION = re.compile(r"[^\s+]{1,200}")
"""A declared version: no space, and no ``+``, which joins the versions of one generation."""


class Pause(StrEnum):
    """What a pause does with generations that run. New ones are held in each."""

    WAIT = "wait"
    """Let them finish."""
    ABORT = "abort"
    """Stop them; what nobody has seen is sampled again after the pause."""
    KEEP = "keep"
    """Leave them alone: they go on over the change, and name both versions."""


@dataclass(frozen=True, slots=True)
class FenceState:
    """How things stand, for the trainer."""

    paused: bool
    running: int
    """Generations at the engine."""
    held: int
    """Calls waiting for ``resume``."""
    version: str
    """The version declared last; empty when none was."""
    resampled: int
    """Aborted generations sampled again without the harness knowing, so far."""
    broken: int
    """Aborted generations that had shown a part: their streams broke."""


class Hold:
    """The wall-clock time one session lost at the fence, in seconds: the union over its concurrent calls."""

    def __init__(self) -> None:
        self._total = 0.0
        self._until = 0.0
        """End of what is in ``_total``."""
        self._since = 0.0
        self._calls = 0

    @property
    def calls(self) -> int:
        """Calls held now."""
        return self._calls

    @property
    def seconds(self) -> float:
        """Up to now, a hold under way included."""
        return self._total + (time.monotonic() - self._since if self._calls else 0.0)

    def owed(self, granted: float) -> float:
        """Seconds to add to a deadline that has come and was moved by ``granted`` before; 0.0: it stands.

        At least a second while a call is held, so that the holder of the deadline does not ask all the time.
        """
        owed = max(0.0, self.seconds - granted)
        return max(1.0, owed) if self._calls else owed

    @contextmanager
    def held(self) -> Generator[None]:
        """One call waits in this block."""
        if not self._calls:
            self._since = time.monotonic()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._until = time.monotonic()
                self._total += self._until - self._since

    def lost(self, began: float) -> None:
        """A generation that ran from ``began`` (monotonic) until now was thrown away."""
        end = self._since if self._calls else time.monotonic()
        self._total += max(0.0, end - max(began, self._until))
        self._until = max(self._until, end)


@dataclass(eq=False, slots=True)
class _Run:
    """One generation at the engine."""

    versions: list[str]
    """Declared versions it saw, in order; an empty one first when none was declared."""
    aborted: bool = False
    scope: asyncio.Timeout | None = None
    began: float = field(default_factory=time.monotonic)

    async def next(self, items: AsyncIterator[Delta | EngineReply]) -> Delta | EngineReply | None:
        """The engine's next word; ``None`` when it has no more, or the run was aborted."""
        if self.aborted:
            return None
        try:
            async with asyncio.timeout(None) as self.scope:
                return await anext(items, None)
        except (TimeoutError, EngineError):  # a run being stopped may end in any way
            if not self.aborted:
                raise
            return None
        finally:
            self.scope = None

    def abort(self) -> None:
        if self.scope is not None and not self.aborted:
            self.scope.reschedule(0.0)
        self.aborted = True


class Fence:
    """An engine (``engine.Engine``) with a gate before it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._version = ""
        self._open = asyncio.Event()
        self._open.set()
        self._runs: set[_Run] = set()
        self._holds: dict[str, Hold] = {}
        self._changed = asyncio.Event()
        self._resampled = 0
        self._broken = 0

    # --- the engine's protocol ---------------------------------------------------------------------------------

    async def check(self) -> EngineFacts:
        """As the engine's; held while the fence is closed, because it samples."""
        await self._open.wait()
        return await self._engine.check()

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        """As the engine's, held while the fence is closed. Raises EngineBusy for an abort after a part was shown.

        A request that does not stream gets no deltas: nothing of it is shown before the reply, so it can always be
        sampled again. A generation that the engine itself aborted in a pause (the trainer told it, not us) is one of
        ours.
        """
        hold, shown = self.hold(session.session_id), False
        while True:
            await self._pass(hold)
            with self._running() as run:
                generation = self._engine.generate(request, sampling, session)
                async with aclosing(cast("AsyncGenerator[Delta | EngineReply]", generation)) as items:
                    while (item := await run.next(items)) is not None:
                        if isinstance(item, EngineReply):
                            if item.turn.stop is StopReason.ABORT and self.closed:
                                run.aborted = True
                                break
                            yield _dated(item, run.versions)
                            return
                        if request.stream:
                            shown = True
                            yield item
            if not run.aborted:
                return
            hold.lost(run.began)
            if shown:
                self._broken += 1
                raise EngineBusy("the generation was stopped for a change of weights", retry_after=1.0)
            self._resampled += 1

    async def count_tokens(self, request: ModelRequest) -> int:
        """As the engine's: it does not sample, so it is never held."""
        return await self._engine.count_tokens(request)

    async def aclose(self) -> None:
        await self._engine.aclose()

    # --- the sessions' side ------------------------------------------------------------------------------------

    def hold(self, session_id: str) -> Hold:
        """What a session lost at the fence; the same object until ``forget``."""
        return self._holds.setdefault(session_id, Hold())

    def forget(self, session_id: str) -> None:
        """The session is over."""
        self._holds.pop(session_id, None)

    # --- the trainer's side ------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Between ``pause`` and ``resume``."""
        return not self._open.is_set()

    @property
    def state(self) -> FenceState:
        held = sum(hold.calls for hold in self._holds.values())
        return FenceState(self.closed, len(self._runs), held, self._version, self._resampled, self._broken)

    async def pause(self, mode: Pause = Pause.WAIT) -> FenceState:
        """Hold every generation that has not begun. Returns when none runs (``keep``: at once), or at a ``resume``.

        A pause that is given up by its caller stays in force until ``resume``.
        """
        self._open.clear()
        if mode is Pause.ABORT:
            self._stop()
        while mode is not Pause.KEEP and self._runs and self.closed:
            await self._changed.wait()
        return self.state

    def resume(self, version: str | None = None) -> FenceState:
        """Open the fence, on weights named ``version``. Raises BadRequest for a name that cannot be one."""
        if version is not None:
            self.declare(version)
        self._open.set()
        self._tell()
        return self.state

    async def abort(self) -> FenceState:
        """Stop what runs; returns when the engine was told. What nobody has seen is sampled again, now or after the
        pause."""
        stopped = self._stop()
        while stopped & self._runs:
            await self._changed.wait()
        return self.state

    def declare(self, version: str) -> FenceState:
        """From now on the engine samples with weights of this name. Used where the engine itself does not tell.

        Raises:
            BadRequest: empty, over 200 characters, with a space or a ``+``.
        """
        if not VERSION.fullmatch(version):
            raise BadRequest("a version is 1 to 200 characters without spaces and without '+', such as step-12")
        self._version = version
        for run in self._runs:
            if run.versions[-1] != version:
                run.versions.append(version)
        return self.state

    # --- inside ------------------------------------------------------------------------------------------------

    async def _pass(self, hold: Hold) -> None:
        if self.closed:
            with hold.held():
                while self.closed:  # closed again before we woke
                    await self._open.wait()

    @contextmanager
    def _running(self) -> Generator[_Run]:
        run = _Run([self._version])
        self._runs.add(run)
        try:
            yield run
        finally:
            self._runs.discard(run)
            self._tell()

    def _stop(self) -> set[_Run]:
        stopped = set(self._runs)
        for run in stopped:
            run.abort()
        return stopped

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _dated(reply: EngineReply, declared: list[str]) -> EngineReply:
    """The reply with the declared versions it was sampled under, unless the engine itself told or none was declared."""
    if reply.versioned or declared == [""]:
        return reply
    names = dict.fromkeys(version or reply.policy_version for version in declared)
    return replace(reply, policy_version="+".join(names), versioned=True)

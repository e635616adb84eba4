"""The fence between sessions and an engine whose weights change: held, aborted and dated generations.

One fence stands before the engine of a process; every session samples through it. The trainer closes it (``pause``),
swaps weights, says their name (``declare``) and opens it (``resume``). What a harness notices is a slow answer: a held
call's stream is kept alive by the proxy like any other, and an aborted generation of which nothing was shown is sampled
again. One that had streamed a part cannot be: it ends as a busy engine, which breaks the stream, and the harness asks
again.

The time a session waits at the fence, and the time of generations thrown away, is nobody's budget: ``Hold`` counts it.

Two things end sessions here. Age: a session whose oldest tokens are more than ``engine.max_policy_age`` updates old
can no longer train. And a trainer that died: a pause is a lease (``engine.pause_lease``), renewed by pausing again, and
when it lapses nobody knows what the weights are. Then calls that are held, that run, or that come are failures of the
engine, until a trainer pauses or resumes: sampling on would train on weights without a name, and waiting on would keep
sandboxes for a day that nobody collects from.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

from polar_env.config import EngineConfig
from polar_env.engine import Engine, EngineFacts, Session
from polar_env.engine.ages import Versions
from polar_env.engine.hold import Hold
from polar_env.errors import BadRequest, EngineBusy, EngineError, PolarError, StalePolicy
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling, StopReason

log = logging.getLogger(__name__)

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
    lease: float | None = None
    """Seconds until the pause lapses unless it is renewed; ``None``: it is open, or a pause without end."""
    lapsed: bool = False
    """The trainer that paused did not come back in time: every call fails until one pauses or resumes."""


@dataclass(eq=False, slots=True)
class _Run:
    """One generation at the engine."""

    versions: list[str]
    """Declared versions it saw, in order; an empty one first when none was declared."""
    session: Session
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


@dataclass(slots=True)
class _Tenant:
    """What the fence knows of a session."""

    hold: Hold = field(default_factory=Hold)
    sampled: dict[str, None] = field(default_factory=dict[str, None])
    """Versions behind its calls that may train, in order."""
    stop: Callable[[PolarError], None] = lambda _: None


class Fence:
    """An engine (``engine.Engine``) with a gate before it. ``config``: how old tokens and how long pauses may get."""

    def __init__(self, engine: Engine, config: EngineConfig | None = None) -> None:
        self._engine = engine
        self._config = config or EngineConfig()
        self.versions = Versions()
        self._version = ""
        self._open = asyncio.Event()
        self._open.set()
        self._runs: set[_Run] = set()
        self._tenants: dict[str, _Tenant] = {}
        self._changed = asyncio.Event()
        self._moved = asyncio.Event()
        self._lease: asyncio.TimerHandle | None = None
        self._lapsed = ""
        self._pausing = 0
        """Trainers that wait for a pause."""
        self._resampled = 0
        self._broken = 0

    # --- the engine's protocol ---------------------------------------------------------------------------------

    async def check(self) -> EngineFacts:
        """As the engine's; held while the fence is closed, because it samples."""
        await self._pass("", Hold())
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
            await self._pass(session.session_id, hold)
            with self._running(session) as run:
                generation = self._engine.generate(request, sampling, session)
                async with aclosing(cast("AsyncGenerator[Delta | EngineReply]", generation)) as items:
                    while (item := await run.next(items)) is not None:
                        if isinstance(item, EngineReply):
                            if item.turn.stop is StopReason.ABORT and self.closed:
                                run.aborted = True
                                break
                            yield self._sampled(item, run)
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
        return self._tenant(session_id).hold

    def watch(self, session_id: str, stop: Callable[[PolarError], None]) -> None:
        """``stop`` ends the session with the reason it is given: it cannot train any more, or its trainer is gone."""
        self._tenant(session_id).stop = stop

    def forget(self, session_id: str) -> None:
        """The session is over."""
        self._tenants.pop(session_id, None)

    def usable(self) -> None:
        """Raises EngineError while a lapsed pause stands: what is begun now could not sample."""
        if self._lapsed:
            raise EngineError(self._lapsed)

    def stale(self, versions: Iterable[str]) -> StalePolicy | None:
        """Why tokens of these versions are too old to train by ``engine.max_policy_age``; ``None``: they are not."""
        limit, names = self._config.max_policy_age, tuple(versions)
        oldest = max(names, key=self.versions.age, default="")
        age = self.versions.age(oldest)
        if limit is None or not names or age <= limit:
            return None
        span = " to ".join(name or "the first weights" for name in dict.fromkeys((names[0], names[-1])))
        return StalePolicy(
            f"sampled by {span}, and {oldest or 'what came first'} is {age} updates behind "
            f"{self.versions.newest(oldest)}: engine.max_policy_age is {limit}"
        )

    # --- the trainer's side ------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Between ``pause`` and ``resume``."""
        return not self._open.is_set()

    @property
    def state(self) -> FenceState:
        held = sum(tenant.hold.calls for tenant in self._tenants.values())
        left = None if self._lease is None else round(max(0.0, self._lease.when() - self._now()), 1)
        return FenceState(
            self.closed,
            len(self._runs),
            held,
            self._version,
            self._resampled,
            self._broken,
            lease=left,
            lapsed=bool(self._lapsed),
        )

    async def pause(self, mode: Pause = Pause.WAIT) -> FenceState:
        """Hold every generation that has not begun. Returns when none runs (``keep``: at once), or at a ``resume``.

        A pause that is given up by its caller stays in force until ``resume``, or until its lease is over: that begins
        when this returns, and anew with every pause.
        """
        self._open.clear()
        self._renew(None)  # whoever waits here is alive
        self._pausing += 1
        try:
            if mode is Pause.ABORT:
                self._stop()
            while mode is not Pause.KEEP and self._runs and self.closed:
                await self._changed.wait()
        finally:
            self._pausing -= 1
            self._renew(self._config.pause_lease if self.closed and not self._pausing else None)
        return self.state

    def resume(self, version: str | None = None) -> FenceState:
        """Open the fence, on weights named ``version``. Raises BadRequest for a name that cannot be one."""
        if version is not None:
            self.declare(version)
        elif self._config.max_policy_age is not None and not self.versions.named:
            log.warning("engine.max_policy_age does nothing while nobody names the weights: resume with a version")
        self._open.set()
        self._renew(None)
        self._move()
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
        if self.versions.declare(version):
            self._end_stale(tuple(self._tenants))
        return self.state

    # --- inside ------------------------------------------------------------------------------------------------

    def _tenant(self, session_id: str) -> _Tenant:
        return self._tenants.setdefault(session_id, _Tenant())

    async def _pass(self, session_id: str, hold: Hold) -> None:
        """Raises EngineError when the pause lapses, or has."""
        if self.closed:
            with hold.held():
                while self.closed:  # closed again before we woke
                    if self._lapsed:
                        self._end(session_id, EngineError(self._lapsed))
                        raise EngineError(self._lapsed)
                    await self._moved.wait()

    @contextmanager
    def _running(self, session: Session) -> Generator[_Run]:
        run = _Run([self._version], session)
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

    def _sampled(self, reply: EngineReply, run: _Run) -> EngineReply:
        """The reply with its versions, which are noted. What is too old ends once the reply has been recorded."""
        news = reply.versioned and self.versions.told(reply.policy_version)
        dated, who = _dated(reply, run.versions), run.session.session_id
        if who in self._tenants and not run.session.side:
            self._tenants[who].sampled[dated.policy_version] = None
        asyncio.get_running_loop().call_soon(self._end_stale, tuple(self._tenants) if news else (who,))
        return dated

    def _end_stale(self, session_ids: Iterable[str]) -> None:
        """End the sessions that cannot train any more: by what they sampled, or by what is being sampled."""
        if self._config.max_policy_age is None or self._config.stale_rollouts != "end":
            return
        running: dict[str, list[str]] = {}
        for run in self._runs:
            if not run.aborted and not run.session.side:
                running.setdefault(run.session.session_id, []).append(run.versions[0])
        for session_id in session_ids:
            if (tenant := self._tenants.get(session_id)) is not None:
                error = self.stale((*tenant.sampled, *running.get(session_id, ())))
                if error is not None:
                    tenant.stop(error)

    def _end(self, session_id: str, error: PolarError) -> None:
        if (tenant := self._tenants.get(session_id)) is not None:
            tenant.stop(error)

    def _renew(self, seconds: float | None) -> None:
        """The pause, if there is one, lapses in ``seconds``; ``None``: never."""
        if self._lease is not None:
            self._lease.cancel()
        self._lapsed = ""
        later = asyncio.get_running_loop().call_later
        self._lease = None if seconds is None else later(seconds, self._lapse, seconds)

    def _lapse(self, seconds: float) -> None:
        self._lapsed = (
            f"the trainer paused the engine and neither resumed nor renewed the pause for {seconds:g} s "
            "(engine.pause_lease): nobody knows its weights; `polar control resume VERSION` opens the fence again"
        )
        log.warning("%s", self._lapsed)
        busy = {run.session.session_id for run in self._runs}
        busy |= {name for name, tenant in self._tenants.items() if tenant.hold.calls}
        for session_id in busy:
            self._end(session_id, EngineError(self._lapsed))
        self._move()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _move(self) -> None:
        """Wake what is held."""
        self._moved.set()
        self._moved = asyncio.Event()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _dated(reply: EngineReply, declared: list[str]) -> EngineReply:
    """The reply with the declared versions it was sampled under, unless the engine itself told or none was declared."""
    if reply.versioned or declared == [""]:
        return reply
    names = dict.fromkeys(version or reply.policy_version for version in declared)
    return replace(reply, policy_version="+".join(names), versioned=True)

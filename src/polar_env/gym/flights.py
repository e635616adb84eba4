"""Rollouts under way: one per row, however many connections wait for it; given up, cancelled or hurried one by one."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from polar_env.errors import PolarError, Stopped
from polar_env.gym.groups import Chosen, Place
from polar_env.proxy.session import Session


class ClosedError(Stopped):
    """The server ended while the rollout ran."""


@dataclass(slots=True, eq=False)
class Flight:
    """One rollout under way."""

    key: str
    place: Place
    task: "asyncio.Task[dict[str, Any]] | None" = None
    waiters: int = 0
    """Connections that wait for its row."""
    expiry: asyncio.TimerHandle | None = None
    """When it is given up because none does."""
    reason: PolarError | None = None
    """Why it is being cancelled: what its row will say."""
    session: Session | None = None
    hurried: bool = False
    began: float = field(default_factory=time.monotonic)
    has_session: asyncio.Event = field(default_factory=asyncio.Event)

    def opened(self, session: Session) -> None:
        """The rollout has its session."""
        self.session = session
        self.has_session.set()

    @property
    def session_id(self) -> str:
        return self.session.session_id if self.session is not None else ""

    def cancel(self, reason: PolarError) -> bool:
        """Tear the rollout down, once; whether it is still to end. Its task then answers with ``reason``."""
        assert self.task is not None
        if self.reason is None and self.task.cancel():
            self.reason = reason
        return not self.task.done()

    def told(self) -> dict[str, Any]:
        """What a trainer is told of it. ``stage``: waiting (for a slot, or for its sandbox), playing, or grading."""
        session, place = self.session, self.place
        stage = "playing" if session and session.first_call.is_set() else "waiting"
        return {
            "key": self.key,
            "task": place.task,
            "harness": place.harness,
            "group": place.group,
            "index": place.index,
            "session": self.session_id,
            "stage": "grading" if session and session.closed else stage,
            "seconds": round(time.monotonic() - self.began, 1),
        }

    async def hurry(self, seconds: float, error: PolarError) -> None:
        """End its session with ``error`` after so many more seconds of play: counted from its first model call if that
        is still to come, and without the time its calls are held for a change of weights."""
        await self.has_session.wait()
        assert self.session is not None
        await self.session.first_call.wait()
        granted = self.session.hold.seconds
        await asyncio.sleep(seconds)
        while more := self.session.hold.owed(granted):
            granted += more
            await asyncio.sleep(more)
        self.session.stop(error)


Play = Callable[[Flight], Coroutine[Any, Any, dict[str, Any]]]
"""Plays a rollout to its row. When its flight is cancelled for a ``reason`` it tears down and answers with that. Called
when the row is posted; the coroutine runs a moment later, and not at all when it is cancelled before."""

Ended = Callable[[Flight, dict[str, Any]], None]
"""Told of every rollout that is over, however: its row, empty when there is none."""


class Flights:
    """All rollouts of a server. Use as ``async with Flights(grace).opened() as flights``."""

    def __init__(self, grace: float, ended: Ended = lambda _, __: None) -> None:
        """``grace``: seconds a rollout outlives the last connection that waited for it."""
        self._grace = grace
        self._ended = ended
        self._flights: dict[str, Flight] = {}
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator["Flights"]:
        """Take rows until the block ends; then every rollout is cancelled, and its row says that the server closed."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield self
            finally:
                self._group = None
                for flight in tuple(self._flights.values()):
                    self._give_up(flight, ClosedError("the server was closed while the rollout ran"))

    async def join(self, key: str, place: Place, play: Play) -> dict[str, Any]:
        """The row of the rollout of ``key``: of the one under way, else of a new one.

        Raises PolarError: there is no server to play it, or it was cancelled before it began.
        """
        flight = self._flights.get(key) or self._launch(Flight(key, place), play)
        assert flight.task is not None
        flight.waiters += 1
        if flight.expiry is not None:
            flight.expiry.cancel()
        try:
            answer = await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            flight.waiters -= 1
            if flight.task.cancelled() and not _is_cancelled():
                self._forget(flight)
                raise flight.reason or ClosedError("the server was closed while the rollout ran") from None
            if not flight.waiters:
                nobody = Stopped("nobody waits for its row any more: the connection was lost and did not come back")
                flight.expiry = asyncio.get_running_loop().call_later(self._grace, self._give_up, flight, nobody)
            raise
        self._forget(flight)
        return answer

    async def cancel(self, wanted: Chosen, reason: str, but: Collection[str] = ()) -> list[dict[str, Any]]:
        """Cancel the rollouts that are ``wanted``, but for keys that are not; returns what they were when nothing of
        them runs any more. Their rows say ``reason``."""
        ended: list[Flight] = []
        for flight in tuple(self._flights.values()):
            if flight.key not in but and wanted.has(flight.key, flight.place, flight.session_id):
                log = f"; its log: {flight.session_id}" if flight.session_id else ""
                if flight.cancel(Stopped(reason + log)):
                    ended.append(flight)
        told = [flight.told() for flight in ended]
        tasks = [flight.task for flight in ended if flight.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        return told

    def told(self) -> list[dict[str, Any]]:
        """All that is under way (``Flight.told``)."""
        return [flight.told() for flight in self._flights.values() if flight.task and not flight.task.done()]

    def hurry(self, wanted: Chosen, seconds: float, error: PolarError) -> list[dict[str, Any]]:
        """Give the rollouts that are ``wanted`` so many more seconds of play; returns them. One that was told before
        keeps the time it was given."""
        told: list[dict[str, Any]] = []
        for flight in tuple(self._flights.values()):
            task = flight.task
            if self._group is None or task is None or task.done() or flight.hurried:
                continue
            if wanted.has(flight.key, flight.place, flight.session_id):
                flight.hurried = True
                hurrying = self._group.create_task(flight.hurry(seconds, error))
                task.add_done_callback(lambda _, hurrying=hurrying: hurrying.cancel())
                told.append(flight.told())
        return told

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the rollouts, to its end."""
        if self._group is None:
            work.close()
        else:
            self._group.create_task(work)

    def _launch(self, flight: Flight, play: Play) -> Flight:
        if self._group is None:
            raise ClosedError("the server is not open: it is starting or ending")
        flight.task = self._group.create_task(play(flight))
        flight.task.add_done_callback(lambda task: self._ended(flight, _row_of(task)))
        self._flights[flight.key] = flight
        return flight

    def _give_up(self, flight: Flight, reason: PolarError) -> None:
        """Nobody wants this rollout: stop it, and forget its result. Posted again, its row is a new one."""
        self._forget(flight)
        flight.cancel(reason)
        if flight.expiry is not None:
            flight.expiry.cancel()

    def _forget(self, flight: Flight) -> None:
        """A row posted after its answer was delivered is a new rollout."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]


def _row_of(task: "asyncio.Task[dict[str, Any]]") -> dict[str, Any]:
    return {} if task.cancelled() or task.exception() is not None else task.result()


def _is_cancelled() -> bool:
    """Whether it is the caller who was cancelled, not what it waits for."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0

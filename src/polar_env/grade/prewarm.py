"""What a task's first grading would measure, measured while agents work.

A rollout is neither delayed nor ended by it: what is not done when the rollout is over is given up, and what fails is
met again by the grading, which names it.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from weakref import WeakKeyDictionary, WeakValueDictionary

from polar_env.config import SandboxConfig
from polar_env.grade import grading
from polar_env.tasks import Prepared

_Task = tuple[str, ...]


@dataclass(slots=True)
class _Shared:
    """What the rollouts of one event loop share."""

    slots: dict[int, asyncio.Semaphore] = field(default_factory=dict[int, asyncio.Semaphore])
    locks: WeakValueDictionary[_Task, asyncio.Lock] = field(default_factory=WeakValueDictionary[_Task, asyncio.Lock])
    done: set[_Task] = field(default_factory=set[_Task])


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


class Prewarm:
    """One rollout's share: ``begin`` while its agent starts, and leaving the block ends what still runs of it.

    A task is measured once in a process, and at most ``sandbox.prewarm`` tasks at the same time. When the rollout that
    measures ends first, the next one that waits goes on.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._group = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Prewarm":
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await self._group.__aexit__(None, None, None)  # a failure of the block is passed on as it is, in no group

    def begin(self, prepared: Prepared) -> None:
        """Have it measured. Returns at once."""
        if self._config.prewarm:
            self._running.append(self._group.create_task(self._measure(prepared)))

    async def _measure(self, prepared: Prepared) -> None:
        shared = _SHARED.setdefault(asyncio.get_running_loop(), _Shared())
        slots = shared.slots.setdefault(self._config.prewarm, asyncio.Semaphore(self._config.prewarm))
        task = prepared.task
        what = (task.task_id, task.grader, str(prepared.repo), prepared.image, self._config.provider)
        async with shared.locks.setdefault(what, asyncio.Lock()):
            if what in shared.done:
                return
            async with slots:
                with suppress(Exception):  # whatever it is, the grading meets it again and names it
                    await grading.prewarm(prepared, sandbox=self._config)
            shared.done.add(what)

"""A grader that tells when it measures, for the tests of measuring while agents work."""

import asyncio
from typing import ClassVar

from polar_env.config import SandboxConfig
from polar_env.tasks import Prepared


class Told:
    """`prewarm_helpers:Told`: a grader whose measuring takes as long as the test says, and that tells what happens."""

    events: ClassVar[list[str]]
    begun: ClassVar[asyncio.Event]
    """Set while something is measured."""
    gates: ClassVar[dict[str, asyncio.Event]]
    """Task -> what its measuring waits for; nothing for one that is not named."""

    async def grade(self, prepared: Prepared, patch: bytes, *, sandbox: SandboxConfig, timeout: float) -> float:  # noqa: ASYNC109
        self.events.append("graded")
        return 1.0

    async def prewarm(self, prepared: Prepared, *, sandbox: SandboxConfig) -> None:
        name = prepared.task.task_id
        self.events.append(f"{name} begins")
        self.begun.set()
        try:
            if name in self.gates:
                await self.gates[name].wait()
        except asyncio.CancelledError:
            self.events.append(f"{name} given up")
            raise
        if name == "broken":
            raise ZeroDivisionError(name)
        self.events.append(f"{name} ends")

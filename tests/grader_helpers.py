"""Graders as users write them, for the tests of the seam."""

from typing import Any, ClassVar

from polar_env.config import SandboxConfig
from polar_env.grade.grading import box_of
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import Prepared


class Answers:
    """A grader that answers what the test wants."""

    answer: ClassVar[Any] = 1.0

    async def grade(self, prepared: Prepared, patch: bytes, *, sandbox: SandboxConfig, timeout: float) -> Any:  # noqa: ASYNC109
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class CountsLines:
    """A grader as a user writes one: it opens a fresh sandbox, applies the patch, and counts."""

    warmed: ClassVar[list[str]] = []

    async def grade(self, prepared: Prepared, patch: bytes, *, sandbox: SandboxConfig, timeout: float) -> float:  # noqa: ASYNC109
        async with open_sandbox(box_of(prepared, sandbox), sandbox) as fresh:
            done = await fresh.exec(["git", "apply", "-"], stdin=patch, timeout=timeout)
            if done.code != 0:
                return 0.0
            words = await fresh.read("/testbed/poem.txt")
        return min(len(words.splitlines()), 4) / 4

    async def prewarm(self, prepared: Prepared, *, sandbox: SandboxConfig) -> None:
        self.warmed.append(prepared.task.task_id)


class WantsMore:
    def __init__(self, more: int) -> None: ...

"""Who grades a task: one of ours by its name (``grade.GRADERS``), or the row's own (``module:Class``).

Everything that grades goes through ``grade``: the rollout, and a row that is graded again.
"""

import pkgutil
from typing import Any, Protocol, cast

from polar_env.config import SandboxConfig
from polar_env.errors import ConfigError, GradeError, PolarError, SandboxError
from polar_env.grade import GRADERS
from polar_env.grade.trial import box_of
from polar_env.sandbox.sandbox import Sandbox
from polar_env.tasks import Prepared
from polar_env.verdict import Verdict, VerdictStatus

__all__ = ["Grader", "box_of", "grade", "grader_of", "grades_left", "prewarm"]


class Grader(Protocol):
    """A grader of your own: a class that is made without arguments, once per grading, and named on the row as
    ``polar_grader: "module:Class"``. It may also have ``prewarm(self, prepared, *, sandbox)``, and ``grade_left(self,
    prepared, patch, left, *, sandbox, timeout)``, which is then asked instead and given the agent's sandbox.

    The agent's sandbox is gone when it is asked. ``open_sandbox(box_of(prepared, sandbox), sandbox)`` opens a fresh one
    with the untouched repository (``polar_env.sandbox.sandbox``, ``polar_env.grade.grading``);
    ``polar_env.grade.trial`` and ``polar_env.grade.review`` hold what our own graders are made of.
    """

    async def grade(
        self,
        prepared: Prepared,
        patch: bytes,
        *,
        sandbox: SandboxConfig,
        timeout: float,  # noqa: ASYNC109 - a budget, kept by whoever calls
    ) -> Verdict | float:
        """What a patch is worth.

        Args:
            prepared: the task (``prepared.task.row`` is the whole row) and the repository it was made into.
            patch: a git patch against ``prepared.base_commit``, bytes; empty when the agent changed nothing.
            timeout: seconds of ``budget.grade``.

        Returns:
            a verdict, or a reward in [0, 1]; 1 is resolved. Whatever it raises masks the rollout.
        """
        ...


def grades_left(prepared: Prepared) -> bool:
    """Whether the task's grader looks at what the agent left, and not at the patch alone (``grade.harbor``)."""
    return hasattr(grader_of(prepared.task.grader), "grade_left")


async def grade(
    prepared: Prepared,
    patch: bytes,
    left: Sandbox | None = None,
    *,
    sandbox: SandboxConfig,
    timeout: float,  # noqa: ASYNC109 - the budget of the test run, which ends in a verdict
) -> Verdict:
    """Grade a patch as its task's grader does; with ``left``, the agent's sandbox and its processes dead, by what is
    there (``grades_left``).

    Raises:
        GradeError: the grader failed, which says nothing about the patch, or gave what is no reward.
        ConfigError: the task names no grader that is there.
    """
    name = prepared.task.grader
    grader = grader_of(name)
    try:
        if left is None:
            found = await grader.grade(prepared, patch, sandbox=sandbox, timeout=timeout)
        else:
            found = await cast("Any", grader).grade_left(prepared, patch, left, sandbox=sandbox, timeout=timeout)
    except PolarError as error:
        if name in GRADERS:
            raise
        raise GradeError(f"grader {name}: {error}") from error
    except Exception as error:  # a bug in somebody's grader is no reward, and not the end of a batch
        raise GradeError(f"grader {name} failed: {type(error).__name__}: {error}") from error
    return _verdict(found, name)


async def prewarm(prepared: Prepared, *, sandbox: SandboxConfig) -> None:
    """Measure now what a grading would measure first, where the grader has such a thing. Raises as ``grade`` does."""
    warm: Any = getattr(grader_of(prepared.task.grader), "prewarm", None)
    if warm is not None:
        try:
            await warm(prepared, sandbox=sandbox)
        except SandboxError as error:
            raise GradeError(f"the grading sandbox failed: {error}") from error


def grader_of(name: str) -> Grader:
    """The grader behind a name. Raises ConfigError with the known names."""
    path = GRADERS.get(name, name)
    if ":" not in path and name not in GRADERS:
        raise ConfigError(f"unknown grader {name!r}; known: {', '.join(GRADERS)}, or module:Class")
    try:
        found = pkgutil.resolve_name(path)
        return cast("Grader", found if name in GRADERS else found())
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"grader {name!r} cannot be had: {type(error).__name__}: {error}") from error


def _verdict(found: object, name: str) -> Verdict:
    """A grader's answer as a verdict. Raises GradeError when it is none."""
    reward = found.score if isinstance(found, Verdict) else found
    if isinstance(found, Verdict) and reward is None:
        return found
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0.0 <= reward <= 1.0:
        raise GradeError(f"grader {name} gave {reward!r}; a reward is a number in [0, 1]")
    if isinstance(found, Verdict):
        return found
    return Verdict(VerdictStatus.RESOLVED if reward == 1.0 else VerdictStatus.UNRESOLVED, score=float(reward))

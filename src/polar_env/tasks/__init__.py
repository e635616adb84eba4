"""The tasks room: a dataset row becomes a repository, an environment and an instruction.

``rows`` loads rows (parquet, JSONL, hub, embedded) · ``sources`` makes a repository tree (sdist, git mirror, image) ·
``prepare`` builds tree and environment once per task and caches them · ``embedded`` holds tasks of our own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKDIR = "/testbed"
"""Where the repository sits in a sandbox (SWE-bench's own path, so official eval scripts hold), but for tasks that say
where themselves (``Prepared.workdir``)."""

ENV_PREFIX = "/opt/testbed-env"
"""Where the task's Python environment sits in every sandbox."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. ``row`` is the dataset row as its grader reads it: SWE-bench's v5 schema for most (``tasks.rows``)."""

    task_id: str
    instruction: str
    row: Mapping[str, Any]
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How to make the repository and environment: ``{"kind": "sdist"|"git"|"files"|"image"|..., ...}``."""
    grader: str = "swebench"
    """Who grades it: a name of ``grade.GRADERS``, or ``module:Class``."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task ready to run: made once, cached, shared by its group. Host paths are read-only from here on."""

    task: Task
    base_commit: str
    """HEAD of the prepared repository; replaces the row's base commit in the eval script."""
    repo: Path | None
    """Host directory shown at WORKDIR (copy-on-write); ``None`` when ``image`` holds it."""
    env: Path | None
    """Host directory shown at ENV_PREFIX (copy-on-write)."""
    git_dir: Path | None
    """Pristine git directory kept outside the sandbox: patch extraction never trusts the agent's own."""
    mounts: tuple[tuple[Path, str], ...] = ()
    """Further read-only host paths the environment needs (the base interpreter), host -> sandbox."""
    image: str = ""
    eval_rewrites: tuple[tuple[str, str], ...] = ()
    """Textual replacements of the eval script, in order (docker paths -> this environment)."""
    env_vars: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment of the agent and of the tests (PATH with the task's interpreter first, ...)."""
    workdir: str = WORKDIR
    """Where ``repo`` is shown, and the agent and the tests work."""
    overlays: tuple[tuple[Path, str], ...] = ()
    """Further host directories shown copy-on-write, host -> sandbox."""
    patience: float = math.inf
    """Seconds that the task itself gives its agent; ``budget.agent`` when that is less."""
    memory_mib: int | None = None
    """MiB that the task itself asks for, of an image's sandbox; ``sandbox.memory_mib`` when that is less."""
    cpus: float | None = None
    """As ``memory_mib``."""
    whole: bool = False
    """What counts is not the change of the work tree but all that the agent left (``grade.harbor``)."""

    @property
    def by_snapshot(self) -> bool:
        """The change is read in an image's work tree, which is noted before the agent starts."""
        return self.repo is None and not self.whole

    @property
    def hide(self) -> tuple[str, ...]:
        """Paths of an image that an agent may not see (tests, expected results): removed before it starts."""
        return tuple(self.task.source.get("hide", ()))

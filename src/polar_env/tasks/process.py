"""Build steps of tasks: ``steps.run`` with their error and their patience."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_env import steps
from polar_env.errors import SandboxError


async def run(
    argv: Sequence[str],
    doing: str,
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    limit: float = 1800.0,
) -> bytes:
    """As ``steps.run``. Raises SandboxError."""
    return await steps.run(argv, doing, SandboxError, env=env, cwd=cwd, limit=limit)

"""Build steps as child processes: run to the end, off the event loop, and never left behind."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_env.errors import SandboxError

TAIL = 2000
"""Characters of a failed step's output that its error carries: enough for pip's own last words."""


async def run(
    argv: Sequence[str],
    doing: str,
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    limit: float = 1800.0,
) -> bytes:
    """Run ``argv`` and return its standard output.

    Args:
        doing: the step in words, present participle; it opens every error message.
        env: the whole environment of the child.
        limit: seconds until the process group is killed.

    Raises:
        SandboxError: not startable, non-zero exit or timeout, with the end of what it printed.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,  # a pipe: uvloop raises RuntimeError when the child ends first
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{doing}: cannot start {argv[0]}: {error}") from error
    try:
        async with asyncio.timeout(limit):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise SandboxError(f"{doing}: no end after {limit:g} s, killed: {' '.join(argv[-6:])}") from error
    finally:
        await _end(process)
    if process.returncode:
        tail = (out + err).decode("utf-8", "replace")[-TAIL:].strip()
        raise SandboxError(f"{doing}: exit code {process.returncode}: {tail}")
    return out


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the group; the wait is shielded so that a cancellation leaves no zombie."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        await asyncio.shield(process.wait())

"""Build steps: child processes that run to their end off the event loop, and locks between processes."""

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from polar_env.errors import PolarError, boundary

TAIL = 2000
"""Characters of a failed step's output that its error carries: enough for pip's own last words."""

LOCK_POLL = 0.2
"""Seconds between tries of another process's lock: flock has no event, and a blocked thread cannot be cancelled."""


async def run(
    argv: Iterable[str],
    doing: str,
    error: type[PolarError],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    limit: float,
) -> bytes:
    """Run ``argv`` and return its standard output. Its process group, whatever it has started, dies with the call.

    Args:
        doing: the step in words, present participle; it opens every error message.
        env: the whole environment of the child.
        limit: seconds until the process group is killed.

    Raises:
        error: not startable, non-zero exit or timeout, with the end of what it printed.
    """
    words = tuple(argv)
    with boundary(error, f"{doing}: cannot start {words[0]}"):
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=cwd,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,  # a pipe: uvloop raises RuntimeError when the child ends first
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(limit):
            out, err = await process.communicate()
    except TimeoutError as spent:
        raise error(f"{doing}: no end after {limit:g} s, killed: {' '.join(words[-6:])}") from spent
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())  # a cancellation leaves no zombie
    if process.returncode:
        tail = (out + err).decode("utf-8", "replace")[-TAIL:].strip()
        raise error(f"{doing}: exit code {process.returncode}: {tail}")
    return out


@asynccontextmanager
async def locked(path: Path, error: type[PolarError]) -> AsyncGenerator[None]:
    """Hold ``path`` exclusively between all processes; the kernel lets go when its holder dies. Raises ``error``."""
    with boundary(error, f"locking {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(handle):  # noqa: ASYNC110 - see LOCK_POLL
            await asyncio.sleep(LOCK_POLL)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

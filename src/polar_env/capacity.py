"""What one process can hold: open files as many as the machine allows, threads, and what no collection looks at."""

import asyncio
import gc
import resource
from concurrent.futures import ThreadPoolExecutor

from polar_env.errors import ConfigError

FILES_EACH = 30
"""Descriptors of a rollout at its busiest, the start of its sandbox: 26 measured (bubblewrap), and its connections."""

FILES_BESIDE = 300
"""Descriptors of the process itself: libraries, listeners, connections that wait for a rollout to begin."""

THREADS = (32, 256)
"""Fewest and most threads that wait for files, processes and names (``asyncio.to_thread``)."""

_settled = False


def open_files(rollouts: int = 0) -> int:
    """Raise the soft limit of open files to the hard one, and return it. The usual soft limit, 1024, is 24 rollouts.

    Raises ConfigError: ``rollouts`` at a time need more than the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _most(hard)
    if _most(soft) < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if most < (needed := FILES_BESIDE + FILES_EACH * rollouts):
        raise ConfigError(
            f"{rollouts} rollouts at a time need about {needed} open files, and this process may have {most}: lower "
            f"concurrency to {max(1, (most - FILES_BESIDE) // FILES_EACH)} or less, or raise the hard limit where this "
            f"is started (ulimit -Hn {needed}; docker run --ulimit nofile={needed}; LimitNOFILE={needed} of a service)"
        )
    return most


def _most(limit: int) -> int:
    """A limit as a number: infinity is more than anybody opens."""
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


def settle() -> None:
    """Take what is loaded by now out of the reach of every later collection; once in a process.

    A full collection walks every object, and nothing else runs meanwhile. The libraries of a Gym server alone are a
    quarter of a million objects, 0.18 s each time, for nothing: they stay until the process ends.
    """
    global _settled  # noqa: PLW0603 - a process is settled once
    if not _settled:
        _settled = True
        gc.collect()
        gc.freeze()


def threads(rollouts: int) -> None:
    """Give the running loop a thread for each of so many rollouts' waits.

    Python's own pool has four more than there are processors. A few rollouts that copy an environment or wait for a
    killed sandbox then hold up the model calls of all: to look up the engine's name takes a thread of the same pool.
    """
    fewest, most = THREADS
    pool = ThreadPoolExecutor(min(most, max(fewest, rollouts)), thread_name_prefix="polar")
    asyncio.get_running_loop().set_default_executor(pool)

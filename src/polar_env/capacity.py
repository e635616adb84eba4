"""What one process can hold: open files up to what the machine allows, and what is loaded kept out of collections."""

import gc
import resource

from polar_env.errors import ConfigError

FILES_EACH = 30
"""Descriptors of a rollout at its busiest, the start of its sandbox: 26 measured (bubblewrap), and its connections."""

FILES_BESIDE = 300
"""Descriptors of the process itself: libraries, listeners, connections that wait for a rollout to begin."""

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

"""A server ends when the process that started it does, however that died.

Gym starts its servers through a shell and stops them itself; shot, it leaves them behind, and with them rollouts and
sandboxes. So each of ours watches the nearest of its ancestors that is no shell: Gym, or whoever started Gym.
"""

import os
import select
import signal
import threading
import time
from pathlib import Path

GRACE = 3.0
"""Seconds a server may take to end its rollouts before it is ended; what it leaves then the kernel takes with it."""
_SHELLS = ("bash", "sh", "dash", "tee")


def owner() -> int:
    """Pid of the nearest ancestor that is no shell."""
    pid = os.getppid()
    while pid > 1 and _stat(pid)[0] in _SHELLS:
        pid = _stat(pid)[1]
    return pid


def follow(pid: int | None = None) -> threading.Thread:
    """From now on this process ends within ``GRACE`` seconds of ``pid`` (its ``owner``): SIGINT first, as Gym does it,
    then for good. Returns the thread that watches."""
    thread = threading.Thread(target=_wait, args=(owner() if pid is None else pid,), name="polar-lifeline", daemon=True)
    thread.start()
    return thread


def _wait(pid: int) -> None:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _stat(pid: int) -> tuple[str, int]:
    """(name, parent) of a process; nothing and 0 of one that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    return text[text.index("(") + 1 : text.rindex(")")], int(text[text.rindex(")") + 2 :].split()[1])

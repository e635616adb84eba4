"""A listening socket inside a sandbox's network namespace, served from our own process.

The sandbox has a loopback interface and nothing else; a socket keeps the namespace it was made in, so the proxy can
accept what the agent connects to 127.0.0.1, and no relay, veth pair or firewall is needed (1.4 ms).
"""

import ctypes
import os
import socket
import threading

from polar_env.errors import SandboxError

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _make(namespace: int, port: int, made: list[socket.socket | OSError]) -> None:
    """Runs in a thread of its own: only this thread changes its network namespace, and it ends right after."""
    try:
        if _libc.setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        made.append(socket.create_server(("127.0.0.1", port), backlog=128))
    except OSError as error:
        made.append(error)


def listen_at(namespace: int, port: int) -> socket.socket:
    """A TCP socket listening on 127.0.0.1:``port`` of the network namespace (descriptor ``namespace``).

    Raises:
        PermissionError: without CAP_SYS_ADMIN over it; a helper process can still join through the user namespace.
        OSError: the port is taken, or the descriptor names no network namespace.
    """
    made: list[socket.socket | OSError] = []
    thread = threading.Thread(target=_make, args=(namespace, port, made), name="polar-netns")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def listen_in(pid: int, port: int) -> socket.socket:
    """``listen_at`` for the network namespace of process ``pid`` (a container's first process).

    Raises:
        SandboxError: when the namespace cannot be entered, with what to do.
    """
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return listen_at(namespace, port)
        finally:
            os.close(namespace)
    except OSError as error:
        raise SandboxError(
            f"cannot listen on port {port} inside the sandbox: {error.strerror or error}. Entering a container's "
            "network namespace needs root on the container's host; the bubblewrap provider needs no privilege."
        ) from error

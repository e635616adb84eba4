"""Sockets inside a sandbox's network namespace, held by our own process.

The sandbox has a loopback interface and nothing else; a socket keeps the namespace it was made in, so the proxy can
accept what the agent connects to 127.0.0.1, and no relay, veth pair or firewall is needed (1.4 ms).
"""

import ctypes
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from polar_env.errors import SandboxError
from polar_env.sandbox import egress, enter

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def listening(port: int) -> dict[str, Any]:
    """The spec of a TCP socket listening on 127.0.0.1:``port``."""
    return {"do": "listen", "port": port, "doing": f"listen on port {port}"}


def watching() -> dict[str, Any]:
    """The spec of a packet socket that holds what is sent to anyone but the loopback, and lookups of names there."""
    return {"do": "watch", "filter": egress.program().hex(), "doing": "watch the network"}


def _make(namespace: int, spec: Mapping[str, Any], made: list[socket.socket | OSError]) -> None:
    """Runs in a thread of its own: only this thread changes its network namespace, and it ends right after."""
    try:
        if _libc.setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        made.append(enter.SOCKETS[spec["do"]](dict(spec)))
    except OSError as error:
        made.append(error)


def socket_at(namespace: int, spec: Mapping[str, Any]) -> socket.socket:
    """A socket of ``enter.SOCKETS``, made in the network namespace (descriptor ``namespace``).

    Raises:
        PermissionError: without CAP_SYS_ADMIN over it; a helper process can still join through the user namespace.
        OSError: the port is taken, or the descriptor names no network namespace.
    """
    made: list[socket.socket | OSError] = []
    thread = threading.Thread(target=_make, args=(namespace, spec, made), name="polar-netns")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def socket_in(pid: int, spec: Mapping[str, Any]) -> socket.socket:
    """``socket_at`` for the network namespace of process ``pid`` (a container's first process).

    Raises:
        SandboxError: when the namespace cannot be entered, with what to do.
    """
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return socket_at(namespace, spec)
        finally:
            os.close(namespace)
    except OSError as error:
        raise SandboxError(
            f"cannot {spec['doing']} inside the sandbox: {error.strerror or error}. Entering a container's network "
            "namespace needs root on the container's host; the bubblewrap provider needs no privilege."
        ) from error

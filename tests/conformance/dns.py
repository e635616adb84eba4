"""A name server inside a sandbox that knows no name and remembers who was asked for.

A sandbox's /etc/resolv.conf names no server, so every resolver (glibc's, c-ares, Go's) asks 127.0.0.1.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from socket import AF_UNIX, SOCK_STREAM, recv_fds, socket, socketpair
from typing import Any, cast

from polar_env.sandbox.bubble import Bubble
from polar_env.sandbox.sandbox import Sandbox

PORT = 53

_HELPER = f"""
import ctypes, fcntl, socket, sys
namespace, channel = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
owner = fcntl.ioctl(namespace, 0xB701)  # NS_GET_USERNS (linux/nsfs.h): its members may bind port {PORT}
for fd, kind in ((owner, 0x10000000), (namespace, 0x40000000)):
    if libc.setns(fd, kind):
        raise OSError(ctypes.get_errno(), "setns")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("127.0.0.1", {PORT}))
    socket.send_fds(socket.socket(fileno=channel), [b"s"], [server.fileno()])
"""


def socket_in(pid: int) -> socket:
    """A UDP socket at 127.0.0.1:53 of the network namespace of process ``pid``."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    ours, theirs = socketpair(AF_UNIX, SOCK_STREAM)
    with ours, theirs:
        try:
            command = [sys.executable, "-I", "-S", "-c", _HELPER, str(namespace), str(theirs.fileno())]
            subprocess.run(command, pass_fds=(namespace, theirs.fileno()), check=True)
        finally:
            os.close(namespace)
        _, fds, _, _ = recv_fds(ours, 16, 1)
    made = socket(fileno=fds[0])
    made.setblocking(False)
    return made


def name_of(query: bytes) -> tuple[str, int]:
    """The name a query asks for, and where its question ends."""
    at, labels = 12, list[str]()
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    return ".".join(labels).lower(), at + 5


class NameServer(asyncio.DatagramProtocol):
    """Answers NXDOMAIN."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        name, end = name_of(data)
        self.asked.append(name)
        header = data[:2] + b"\x81\x83" + b"\x00\x01" + bytes(6)
        self._transport.sendto(header + data[12:end], addr)


@asynccontextmanager
async def names_asked_in(sandbox: Sandbox) -> AsyncGenerator[NameServer]:
    """Serve, and remember, what the sandbox's processes look up."""
    made = await asyncio.to_thread(socket_in, cast("Bubble", sandbox).pid)
    server = NameServer()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, sock=made)
    try:
        yield server
    finally:
        transport.close()

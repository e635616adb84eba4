"""The namespaces of a sandbox, held by descriptors: they, and with them its files, outlive its processes.

So a sandbox is killed by killing its init: the kernel ends every process of the pid namespace at once, and no agent can
outrun, resist or be missed by that. Afterwards commands of ours run in a pid namespace of their own.
"""

import fcntl
import os
from dataclasses import dataclass

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
"""CLONE_ flags (linux/sched.h)."""
_NS_GET_USERNS = 0xB701  # linux/nsfs.h
_INNER = {"uts": NEWUTS, "ipc": NEWIPC, "cgroup": NEWCGROUP, "mnt": NEWNS, "pid": NEWPID}

Joined = list[tuple[int, int]]
"""(descriptor, CLONE_ flag) in the order of joining; descriptor -1 asks for new namespaces of these kinds."""


@dataclass(slots=True)
class Spaces:
    """``close`` lets go of them; what nothing else holds then ends."""

    owner: int
    """The user namespace that owns the others. bubblewrap makes a second one inside it, which may make no more."""
    user: int
    inner: dict[str, int]
    net: int | None
    """``None``: the sandbox is on the host's network."""

    @classmethod
    def of(cls, pid: int, network: bool) -> "Spaces":
        """Those of process ``pid``. Raises OSError when it is gone."""
        inner = {name: _open(pid, name) for name in _INNER}
        owner = fcntl.ioctl(inner["mnt"], _NS_GET_USERNS)
        return cls(owner, _open(pid, "user"), inner, None if network else _open(pid, "net"))

    def _network(self) -> Joined:
        return [] if self.net is None else [(self.net, NEWNET)]

    def alive(self) -> Joined:
        """A place among the agent's processes."""
        return [
            (self.owner, NEWUSER),
            *self._network(),
            *((self.inner[name], kind) for name, kind in _INNER.items()),
            (self.user, NEWUSER),
        ]

    def alone(self, scratch: bool) -> Joined:
        """The same files and network, and nobody else; with ``scratch`` a /tmp of our own instead of the agent's."""
        return [*self.alive()[:-2], (-1, NEWPID | NEWNS if scratch else NEWPID), (self.user, NEWUSER)]

    def mounts(self) -> Joined:
        """The mounts, with the power to change them."""
        return [(self.owner, NEWUSER), (self.inner["mnt"], NEWNS)]

    def routes(self) -> Joined:
        """The network, with the power to change it."""
        return [(self.owner, NEWUSER), *self._network()]

    def close(self) -> None:
        """Idempotent."""
        held, self.inner = (*self.inner.values(), self.owner, self.user, self.net), {}
        self.owner = self.user = -1
        self.net = None
        for space in held:
            if space is not None and space >= 0:
                os.close(space)


def _open(pid: int, name: str) -> int:
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)

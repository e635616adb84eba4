"""How much of the machine a sandbox may use. Control groups hold it; resource limits stand in where there are none."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from polar_env.sandbox import cgroups

MIB = 1024 * 1024
MOST_MEMORY = 16384
"""MiB a sandbox gets on a machine of any size, unless the configuration says otherwise: four times what the heaviest
test suite of SWE-bench Verified that we measured needs."""
_INODE = 4096
"""Bytes of quota per file: a tmpfs counts files apart from their bytes, and each costs the kernel about 1 KiB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``None`` limits nothing. Memory in MiB, of all processes and of the files they write to memory."""

    memory_mib: int | None = None
    cpus: float | None = None
    pids: int | None = None
    disk_mib: int | None = None
    """MiB of each writable file system (the overlays' upper layers together, /tmp, HOME), and of one file."""
    automatic: bool = False
    """The memory limit is our own choice: where it cannot be held for all processes it holds for each."""

    def groups(self) -> cgroups.Cgroups:
        """Control groups that hold them, named after this process: who finds one left knows whose it was. Raises
        SandboxError where a limit that was asked for cannot be held."""
        name = f"polar-{os.getpid()}-{uuid4().hex[:12]}"
        return cgroups.limit(name, self.memory_mib, self.cpus, pids=self.pids, automatic=self.automatic)

    def rlimits(self, groups: cgroups.Cgroups) -> list[tuple[int, int]]:
        """(RLIMIT_ number, value) of a command: no real-time scheduling and no better niceness than ours, whatever this
        process was allowed; the longest file, and what no control group holds."""
        held = groups.held
        found = [(resource.RLIMIT_RTPRIO, 0), (resource.RLIMIT_NICE, 0)]
        if self.disk_mib:
            found.append((resource.RLIMIT_FSIZE, self.disk_mib * MIB))
        if self.memory_mib and "memory" not in held:
            found.append((resource.RLIMIT_DATA, self.memory_mib * MIB))
        if self.pids and "pids" not in held:
            found.append((resource.RLIMIT_NPROC, self.pids))
        return found

    def quota(self) -> str:
        """As mount options of a tmpfs."""
        size = self.disk_mib * MIB if self.disk_mib else 0
        return f"size={size},nr_inodes={size // _INODE}"


def fair_memory(meminfo: str | None = None, own: int | None = None) -> int:
    """MiB a sandbox may use when nobody said: half of what this process may, at most ``MOST_MEMORY``.

    Half, because sandboxes rarely peak together, and one alone must not end the machine's other work.
    """
    text = Path("/proc/meminfo").read_text(encoding="ascii") if meminfo is None else meminfo
    total = int(text.split("MemTotal:")[1].split()[0]) // 1024
    allowed = cgroups.own_memory() if own is None else own
    return max(1, min(MOST_MEMORY, min(total, allowed or total) // 2))

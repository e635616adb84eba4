"""The sandbox's system-call filter as a classic BPF program, built without libseccomp.

What is refused (EPERM) needs privileges the agent does not have, or reaches other processes and kernel interfaces no
coding task needs. It is a second wall: namespaces and dropped capabilities are the first.
"""

import errno
import platform
from collections.abc import Iterable

from polar_env.sandbox import bpf

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # SECCOMP_RET_*
_X32_BIT = 0x40000000  # x86-64 numbers with this bit are the x32 ABI: a second name for every call

_REFUSED_X86_64 = {
    "ptrace": 101, "syslog": 103, "vhangup": 153, "pivot_root": 155, "acct": 163, "mount": 165, "umount2": 166,
    "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
    "quotactl": 179, "lookup_dcookie": 212, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "unshare": 272, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
_REFUSED_AARCH64 = {
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "vhangup": 58, "quotactl": 60, "acct": 89,
    "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116, "ptrace": 117,
    "reboot": 142, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225,
    "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280,
    "userfaultfd": 282, "kexec_file_load": 294, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
REFUSED = {"x86_64": _REFUSED_X86_64, "aarch64": _REFUSED_AARCH64}
"""Machine -> refused call -> its number."""
_TABLES = {"x86_64": (0xC000003E, 41, 302), "aarch64": (0xC00000B7, 198, 261)}
"""Machine -> AUDIT_ARCH_, and the numbers of socket and prlimit64."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: what a program that works on files and talks to its model needs. Every other family is a
way out of the network namespace (vsock reaches the hypervisor) or a rarely used part of the kernel (packet, alg)."""
_NETLINK, _NETLINK_ROUTE = 16, 0
"""getifaddrs and getaddrinfo list the interfaces through this protocol; of netlink it is all there is."""
_NUMBER, _ARCH, _FIRST, _THIRD = 0, 4, 16, 32
"""Offsets in struct seccomp_data: the call's number, its ABI, the low words of two arguments (little-endian)."""


def _listing(arch: int, refused: Iterable[int], socket: int, prlimit: int) -> bpf.Listing:
    """(label, operation) of the whole program."""
    load, equal = bpf.LOAD_WORD, bpf.JUMP_EQUAL
    return [
        ("", (load, _ARCH, "", "")),
        ("", (equal, arch, "", "kill")),
        ("", (load, _NUMBER, "", "")),
        ("", (bpf.JUMP_AT_LEAST, _X32_BIT, "refuse", "")),
        *(("", (equal, number, "refuse", "")) for number in sorted(refused)),
        ("", (equal, socket, "socket", "")),
        ("", (equal, prlimit, "prlimit", "allow")),
        ("prlimit", (load, _FIRST, "", "")),  # of another process: limits are how its init could be ended
        ("", (equal, 0, "allow", "refuse")),
        ("socket", (load, _FIRST, "", "")),
        *(("", (equal, family, "allow", "")) for family in _FAMILIES),
        ("", (equal, _NETLINK, "", "no family")),
        ("", (load, _THIRD, "", "")),
        ("", (equal, _NETLINK_ROUTE, "allow", "no family")),
        ("no family", (bpf.RETURN, _ERRNO | errno.EAFNOSUPPORT, "", "")),
        ("allow", (bpf.RETURN, _ALLOW, "", "")),
        ("refuse", (bpf.RETURN, _ERRNO | errno.EPERM, "", "")),
        ("kill", (bpf.RETURN, _KILL, "", "")),
    ]


def program(machine: str | None = None) -> bytes:
    """``struct sock_filter[]`` for this machine; empty where we have no system-call table (no filter is loaded).

    A foreign ABI kills the process; x32 numbers, refused calls and the limits of other processes give EPERM; sockets of
    families nobody needs do not exist; everything else is allowed.
    """
    table = _TABLES.get(machine or platform.machine())
    if table is None:
        return b""
    arch, socket, prlimit = table
    return bpf.assemble(_listing(arch, REFUSED[machine or platform.machine()].values(), socket, prlimit))

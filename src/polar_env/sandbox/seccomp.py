"""The sandbox's system-call filter as a classic BPF program, built without libseccomp.

What is refused (EPERM) needs privileges the agent does not have, or reaches other processes and kernel interfaces no
coding task needs. It is a second wall: namespaces and dropped capabilities are the first.
"""

import errno
import platform
import struct

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K (linux/bpf_common.h)."""
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # SECCOMP_RET_*
_X32_BIT = 0x40000000  # x86-64 numbers with this bit are the x32 ABI: a second name for every call

_REFUSED_X86_64 = {
    "ptrace": 101, "pivot_root": 155, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "init_module": 175, "delete_module": 176, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "unshare": 272, "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "mount_setattr": 442,
}  # fmt: skip
_REFUSED_AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "kexec_load": 104, "init_module": 105,
    "delete_module": 106, "ptrace": 117, "reboot": 142, "add_key": 217, "request_key": 218, "keyctl": 219,
    "swapon": 224, "swapoff": 225, "perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "bpf": 280,
    "userfaultfd": 282, "kexec_file_load": 294, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "mount_setattr": 442,
}  # fmt: skip
_TABLES = {"x86_64": (0xC000003E, _REFUSED_X86_64), "aarch64": (0xC00000B7, _REFUSED_AARCH64)}  # AUDIT_ARCH_*


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def program(machine: str | None = None) -> bytes:
    """``struct sock_filter[]`` for this machine; empty where we have no system-call table (no filter is loaded).

    Layout: a foreign ABI kills the process; x32 numbers and refused calls give EPERM; everything else is allowed.
    """
    table = _TABLES.get(machine or platform.machine())
    if table is None:
        return b""
    arch, calls = table
    refused = sorted(calls.values())
    ops = [_op(_LOAD_WORD, 4), _op(_JUMP_EQUAL, arch, 1), _op(_RETURN, _KILL), _op(_LOAD_WORD, 0)]
    ops.append(_op(_JUMP_AT_LEAST, _X32_BIT, len(refused) + 1))
    ops += [_op(_JUMP_EQUAL, number, len(refused) - at) for at, number in enumerate(refused)]
    return b"".join([*ops, _op(_RETURN, _ALLOW), _op(_RETURN, _ERRNO | errno.EPERM)])

"""Run as a script in a fresh interpreter: join a running sandbox's namespaces and do one thing there.

``python -I -S enter.py SPEC_FD STATUS_FD`` reads a JSON spec from SPEC_FD and writes one JSON line to STATUS_FD:
``{"code": n}`` when the thing was done, ``{"error": text}`` when the sandbox could not be entered. It is a process of
its own because joining a user namespace needs a single thread, and standard library only because it starts in 15 ms.

Until it becomes the command, this process is not dumpable: the agent may have our host uid, and /proc/PID/exe or
/proc/PID/fd of a process that walks in from the host would hand it host files (the runc break-out, CVE-2019-5736).
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable
from typing import Any, cast

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 38, 22, 24
_SECCOMP_MODE_FILTER = 2
_SEALED = ctypes.c_ulong(0x20 | 0x1000 | 0x1 | 0x2)
"""MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID (linux/mount.h)."""
_BIND, _OPENED, _CLOSED = (
    ctypes.c_ulong(0x1000),
    ctypes.c_ulong(0x20 | 0x1000 | 0xE),
    ctypes.c_ulong(0x20 | 0x1000 | 0xF),
)
"""MS_BIND; with MS_REMOUNT, nosuid, nodev and noexec to open /proc/sys, and with MS_RDONLY to close it again."""
_LAST_CAPABILITY = 63
_PRIVATE, _SCRATCH = ctypes.c_ulong(0x4000 | 0x40000), ctypes.c_ulong(0x2 | 0x4)
"""MS_REC | MS_PRIVATE, and MS_NOSUID | MS_NODEV (linux/mount.h)."""
_ROOT, _SIZED = ctypes.c_ulong(0x20 | 0x1000 | 0x1 | 0x2 | 0x4), ctypes.c_ulong(0x20 | 0x2 | 0x4)
"""A read-only bind of a mount without devices, and new options for a whole filesystem."""
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_SIOCADDRT, _RTF_UP = 0x890B, 1  # linux/sockios.h, linux/route.h
_RTM_NEWROUTE, _NLM_CREATE = 24, 0x1 | 0x4 | 0x200 | 0x400
"""NLM_F_REQUEST | NLM_F_ACK | NLM_F_EXCL | NLM_F_CREATE (linux/netlink.h)."""
_RT_TABLE_MAIN, _RTPROT_STATIC, _RT_SCOPE_HOST, _RTN_LOCAL, _RTA_OIF, _RTA_PREFSRC = 254, 4, 254, 2, 4, 7
_ETH_P_ALL, _SO_ATTACH_FILTER = 3, 26
_HELD = 1 << 20
"""Bytes of kernel memory for what was tried and not yet read: some 500 packets where the system allows 416 KiB."""
_OOM_SCORE = b"500"
"""When the machine runs out of memory the kernel takes an agent's process before a trainer's."""
MARK = 10
"""RLIMIT_LOCKS: Linux has ignored it since 2.4.25 and children inherit it, so its value names the exec a process came
from, however it re-parented itself."""

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *values: int | ctypes.c_void_p) -> None:
    if _libc.prctl(option, *[v if isinstance(v, ctypes.c_void_p) else ctypes.c_ulong(v) for v in values]):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def enter(spaces: list[list[int]]) -> None:
    """Join namespaces, each (descriptor, CLONE_ flag), in this order; descriptor -1 makes new ones of these kinds.

    A pid namespace holds for children only. Afterwards no module can be imported: what lies at our library's paths in
    there may be the agent's.
    """
    os.get_exec_path({"PATH": ""})  # imports what execvpe needs while our library is still in sight
    sys.path.clear()
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.geteuid() == 0:
        os.setgroups([])
    for space, kind in spaces:
        if _libc.setns(space, kind) if space >= 0 else _libc.unshare(kind):
            code = ctypes.get_errno()
            raise OSError(code, f"setns: {os.strerror(code)}")
        if space < 0 and kind & _CLONE_NEWNS:
            _own_scratch()


def _own_scratch() -> None:
    """A /tmp of our own: the sandbox's may be full, or hold what the agent left there for us."""
    _mount("none", "/", "", _PRIVATE, "")
    _mount("tmpfs", "/tmp", "tmpfs", _SCRATCH, "mode=1777,size=2g,nr_inodes=512k")  # noqa: S108 - the sandbox's, in a mount namespace of ours


def _mount(source: str, target: str, kind: str, flags: ctypes.c_ulong, options: str) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def restrict(filter_hex: str) -> None:
    """Give up capabilities, new privileges and the refused system calls, for good."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            break
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    code = bytes.fromhex(filter_hex)
    if code:
        held = ctypes.create_string_buffer(code, len(code))
        fprog = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(held)))
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.cast(fprog, ctypes.c_void_p), 0, 0)


def become(spec: dict[str, Any]) -> int:
    """Replace this process by the command; returns a shell's exit code when that cannot be done."""
    try:
        if stat.S_ISCHR(os.fstat(0).st_mode):  # the host's /dev/null: through it its mode could be changed
            os.dup2(os.open("/dev/null", os.O_RDWR), 0)
        os.chdir(spec["cwd"])
        # Our interpreter ignores SIGPIPE and SIGXFSZ, a shell that starts us in the background SIGINT and SIGQUIT,
        # nohup SIGHUP: exec would keep all that, and a harness must not inherit how we were started.
        for ignored in range(1, signal.SIGSYS + 1):
            if ignored not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(ignored, signal.SIG_DFL)
        restrict(spec["filter"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606
    except OSError as error:
        where = spec["cwd"] if isinstance(error.filename, str) and error.filename == spec["cwd"] else spec["argv"][0]
        os.write(2, f"{where}: {os.strerror(error.errno or 0)}\n".encode("utf-8", "surrogateescape"))
        return 127 if error.errno == errno.ENOENT else 126


def write(spec: dict[str, Any]) -> int:
    """Standard input becomes the file; parents are made."""
    path = spec["path"]
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)  # noqa: PTH103, PTH120 - pathlib doubles the start-up time
    with open(path, "wb") as out:  # noqa: PTH123
        while chunk := os.read(0, 1 << 20):
            out.write(chunk)
        os.fchmod(out.fileno(), spec["mode"])
    return 0


def read(spec: dict[str, Any]) -> int:
    """The file goes to standard output. Anything but a regular file is refused: a FIFO would
    hang the caller, and a link is not what was asked for."""
    fd = os.open(spec["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    with open(1, "wb", closefd=False) as out:
        while chunk := os.read(fd, 1 << 20):
            out.write(chunk)
    return 0


def _alive(pid: int, mark: int | None) -> bool:
    """Is ``pid`` a living process (of the marked exec, when ``mark`` is given)?"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            state = file.read().rpartition(b")")[2].split()[0]
        if state in (b"Z", b"X") or mark is None:
            return state not in (b"Z", b"X")
        return resource.prlimit(pid, MARK)[1] == mark
    except (OSError, IndexError):
        return False


def _targets(mark: int | None) -> list[int]:
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))  # noqa: PTH208
    return [pid for pid in pids if pid not in (1, os.getpid()) and _alive(pid, mark)]


def kill(spec: dict[str, Any]) -> int:
    """SIGKILL every process but init (of one exec only, when ``mark`` is set), and wait for their deaths."""
    mark = spec.get("mark")
    if mark is None:
        try:
            os.kill(-1, signal.SIGKILL)  # one sweep under the kernel's lock: a fork bomb cannot outrun it
        except ProcessLookupError:
            return 0
    while pids := _targets(mark):
        for pid in pids:
            _end(pid)
    return 0


def _end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(5000)
    os.close(fd)


def listener(spec: dict[str, Any]) -> socket.socket:
    """A TCP socket listening on 127.0.0.1 of this network namespace."""
    return socket.create_server(("127.0.0.1", spec["port"]), backlog=128)


def watch(spec: dict[str, Any]) -> socket.socket:
    """Let the kernel refuse every address but the loopback's own, at once and on the loopback interface, and hold there
    what is sent to one: a packet socket of what ``filter`` (a BPF program, hex) lets through.

    Without a route nothing is ever sent, so that nobody could tell what was tried.
    """
    _answer_for_all(socket.AF_INET, "127.0.0.1")
    try:  # noqa: SIM105 - contextlib is not imported yet, and this has to start quickly
        _answer_for_all(socket.AF_INET6, "::1")
    except OSError:
        pass  # without IPv6 there is nothing to refuse
    code = bytes.fromhex(spec["filter"])
    held = ctypes.create_string_buffer(code, len(code))
    fprog = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    made = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _HELD)
    made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
    made.bind(("lo", _ETH_P_ALL))
    return made


def _answer_for_all(family: int, source: str) -> None:
    """Make every address of a family this namespace's own, where no more special route says otherwise: ``ip route add
    local default dev lo src SOURCE table main``. With another source the refusals would look like attempts."""
    near = _RT_SCOPE_HOST if family == socket.AF_INET else 0
    body = struct.pack("=BBBBBBBBL", family, 0, 0, 0, _RT_TABLE_MAIN, _RTPROT_STATIC, near, _RTN_LOCAL, 0)
    address = socket.inet_pton(family, source)
    body += struct.pack("=HHL", 8, _RTA_OIF, socket.if_nametoindex("lo"))
    body += struct.pack("=HH", 4 + len(address), _RTA_PREFSRC) + address
    head = struct.pack("=LHHLL", 16 + len(body), _RTM_NEWROUTE, _NLM_CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(head + body)
        code = struct.unpack_from("=i", kernel.recv(4096), 16)[0]
    if code:
        raise OSError(-code, f"routing to lo: {os.strerror(-code)}")


def hand_over(spec: dict[str, Any]) -> int:
    """Make a socket in the network namespace and send it over the socket on ``channel``."""
    with SOCKETS[spec["do"]](spec) as made:
        socket.send_fds(socket.socket(fileno=os.dup(spec["channel"])), [b"socket"], [made.fileno()])
    return 0


def seal(spec: dict[str, Any]) -> int:
    """Bound what the sandbox may write and make single mounts read-only, keeping devices usable (bubblewrap's own
    --remount-ro would add nodev). Its root and the upper layers of its overlays are one tmpfs, sized here.

    The device nodes are sealed because root owns the host's /dev/null, and its agent could change the mode.
    """
    for path in spec["writable"]:
        _mount("none", path, "", _SIZED, spec["quota"])
    _mount("none", "/", "", _ROOT, "")
    _mount("/proc/1", "/proc/1", "", _BIND, "")  # the agent's uid: as root's it may else have its init killed first
    for path in (*spec["paths"], "/proc/1"):
        _mount("none", path, "", _SEALED, "")
    try:  # noqa: SIM105 - this starts without contextlib
        _share_watches()
    except OSError:
        pass  # a kernel that does not count them, or not for each namespace
    return 0


def _share_watches() -> None:
    """The host's user has a number of inotify instances (128) and watches for all its processes, the agent's among
    them: one sandbox gets half."""
    _mount("none", "/proc/sys", "", _OPENED, "")
    try:
        for name in ("instances", "watches"):
            with open(f"/proc/sys/fs/inotify/max_user_{name}", "rb") as file:  # noqa: PTH123
                most = int(file.read())
            with open(f"/proc/sys/user/max_inotify_{name}", "wb", buffering=0) as file:  # noqa: PTH123
                file.write(b"%d" % (most // 2))
    finally:
        _mount("none", "/proc/sys", "", _CLOSED, "")


def blackhole(spec: dict[str, Any]) -> int:
    """Route IPv4 networks to the loopback interface, where nobody answers. The namespace's owner may do that."""
    device = ctypes.create_string_buffer(b"lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for network, mask in spec["networks"]:
            address = [struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text)) for text in (network, mask)]
            entry = struct.pack("@L16s16s16sHhLBB4hPLLH", 0, address[0], bytes(16), address[1], _RTF_UP, 0, 0, 0, 0,
                                0, 0, 0, 0, ctypes.addressof(device), 0, 0, 0)  # fmt: skip
            fcntl.ioctl(control, _SIOCADDRT, entry)
    return 0


_THINGS = {"exec": become, "write": write, "read": read, "kill": kill}
SOCKETS = {"listen": listener, "watch": watch}
"""What makes a socket: also called by a thread of ours that may enter the network namespace itself (``netns``)."""
_WITHOUT_FORK = {**dict.fromkeys(SOCKETS, hand_over), "seal": seal, "blackhole": blackhole}
"""What needs no place in the pid namespace."""


def _child(spec: dict[str, Any], groups: list[int]) -> int:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for group in groups:
        os.write(group, b"0")
    os.setsid()
    if spec["do"] == "exec":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file in the repository would be part of the patch
        for kind, value in [*spec["limits"], *([[MARK, spec["mark"]]] if spec["mark"] else [])]:
            resource.setrlimit(kind, (value, value))
    try:
        return _THINGS[spec["do"]](spec)
    except OSError as error:
        os.write(2, f"{error}\n".encode("utf-8", "surrogateescape"))
        return 1


def _first(spec: dict[str, Any], groups: list[int]) -> int:
    """Process 1 of a pid namespace of our own, which ends with it. Never the command itself: that could take the
    signal of our death off (PR_SET_PDEATHSIG), and would outlive its timeout and the sandbox."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 is hit only by signals it handles
    child = _forked(spec, groups, _child)
    while True:
        pid, status = os.wait()
        if pid == child:
            return _code(status)


def _forked(spec: dict[str, Any], groups: list[int], then: Callable[[dict[str, Any], list[int]], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 126
        try:
            code = then(spec, groups)
        finally:
            os._exit(code)
    return child


def _code(status: int) -> int:
    """A shell's exit code: 128 + signal."""
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _inside(spec: dict[str, Any]) -> int:
    """Fork into the pid namespace, wait, and give a shell's exit code (128 + signal)."""
    groups = [os.open(path, os.O_WRONLY) for path in spec["cgroups"]]
    if spec["do"] == "exec":
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as score:  # noqa: PTH123
            score.write(_OOM_SCORE)
    enter(spec["spaces"])
    if spec["do"] in _WITHOUT_FORK:
        return _WITHOUT_FORK[spec["do"]](spec)
    own = any(space < 0 and kind & _CLONE_NEWPID for space, kind in spec["spaces"])
    _, status = os.waitpid(_forked(spec, groups, _first if own else _child), 0)
    return _code(status)


def main(spec_fd: int, status_fd: int) -> None:
    with open(spec_fd, encoding="utf-8") as file:
        spec = cast("dict[str, Any]", json.load(file))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_inheritable(status_fd, False)
    for space in (space for space, _ in spec["spaces"] if space >= 0):
        os.set_inheritable(space, False)
    try:
        answer: dict[str, Any] = {"code": _inside(spec)}
    except OSError as error:
        answer = {"error": str(error)}
    os.write(status_fd, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The sandbox's root filesystem as bubblewrap arguments: the host's /usr, an /etc of our own, no data."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

UID = 1000
"""The agent's user and group id inside; outside it is whoever runs us, so copy-on-write files stay writable."""

HOME = "/home/agent"
HOSTNAME = "polar"

_ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost {HOSTNAME}\n",
    "hostname": f"{HOSTNAME}\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    "resolv.conf": "",
    "gitconfig": "[user]\n\tname = agent\n\temail = agent@polar\n[init]\n\tdefaultBranch = main\n",
}
_FROM_HOST = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf",
              "ca-certificates", "ca-certificates.conf", "pki/tls/certs", "pki/ca-trust/extracted", "protocols",
              "services", "mime.types")  # fmt: skip
_PACKAGES = ("lib*/python*/dist-packages", "lib*/python*/site-packages", "lib*/pypy*/dist-packages",
             "share/python-wheels", "src", "lib/google-cloud-sdk", "share/google-cloud-sdk")  # fmt: skip
# In a user namespace our own uid stays the owner of the kernel's files: what root could write or read is covered.
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "mtrr")
_PROC_HIDDEN = ("kcore", "keys", "key-users", "kmsg", "timer_list", "sched_debug", "config.gz", "kallsyms", "iomem",
                "slabinfo", "kpagecount", "kpageflags", "kpagecgroup", "pagetypeinfo", "cmdline",
                "vmallocinfo", "partitions", "diskstats", "swaps", "modules", "interrupts", "softirqs", "buddyinfo",
                "zoneinfo", "schedstat", "latency_stats", "mdstat", "fb", "kpageidle")  # fmt: skip
_PROC_EMPTY = ("acpi", "scsi", "asound", "dynamic_debug")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
"""The host's device nodes that a sandbox shows."""

WRITABLE = ("/tmp", HOME, "/run", "/dev/shm")  # noqa: S108
"""File systems of a sandbox's own, beside the upper layers of its overlays."""

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": HOME,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
}
"""What every command starts from: fixed, nothing of the host's environment."""


@dataclass(frozen=True, slots=True)
class MemFile:
    """A file whose content bubblewrap copies from a memory descriptor."""

    fd: int
    target: str


def etc_files(network: bool) -> tuple[MemFile, ...]:
    """Memory descriptors of our /etc; the caller closes them. With ``network`` the host resolves names."""
    files: list[MemFile] = []
    for name, text in _ETC.items():
        if network and name in ("resolv.conf", "hosts"):
            continue
        fd = os.memfd_create(f"etc-{name}")
        os.write(fd, text.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        files.append(MemFile(fd, f"/etc/{name}"))
    return tuple(files)


def namespaces(network: bool) -> list[str]:
    shared = [] if network else ["--unshare-net"]
    return ["--unshare-user", "--uid", str(UID), "--gid", str(UID), "--disable-userns", "--unshare-pid",
            "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", *shared, "--hostname", HOSTNAME,
            "--die-with-parent", "--new-session", "--as-pid-1"]  # fmt: skip


def _hidden() -> list[str]:
    """Directories of /usr that are the host's own business: what was installed there by hand, and Python packages (a
    library an agent is to fix may lie among them, fixed; pip carries a copy of requests). The interpreter stays."""
    packages = [path for pattern in _PACKAGES for path in sorted(Path("/usr").glob(pattern)) if not path.is_symlink()]
    return ["/usr/local", *(os.fspath(path) for path in packages if path.is_dir())]


def _top() -> list[str]:
    """/usr and the top-level links into it, laid out as the host's; /usr/local is the host's own business."""
    args = ["--ro-bind", "/usr", "/usr"]
    for hidden in _hidden():
        args += ["--tmpfs", hidden, "--remount-ro", hidden]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", os.fspath(path.readlink()), os.fspath(path)]
        elif path.is_dir():
            args += ["--ro-bind", os.fspath(path), os.fspath(path)]
    return args


def _kernel() -> list[str]:
    args = ["--proc", "/proc", "--dev", "/dev"]
    for name in _PROC_READ_ONLY:
        args += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in _PROC_HIDDEN:
        if Path("/proc", name).exists():
            args += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _PROC_EMPTY:
        if Path("/proc", name).is_dir():
            args += ["--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"]
    return args


def root_args(etc: tuple[MemFile, ...], network: bool, disk_mib: int | None) -> list[str]:
    """Everything but the box's own mounts. Of it /tmp, HOME, /run and /dev/shm can be written (``Bubble.seal`` closes
    the rest once the box's mount points are made), each up to ``disk_mib``."""
    size = ["--size", str(disk_mib * 1024 * 1024)] if disk_mib else []
    args = [*_top(), *_kernel(), "--remount-ro", "/dev", "--perms", "1777", *size, "--tmpfs", "/dev/shm"]  # noqa: S108
    args += ["--perms", "1777", *size, "--tmpfs", "/tmp", *size, "--tmpfs", HOME, *size, "--tmpfs", "/run"]  # noqa: S108 - the sandbox's own
    args += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp", "--dir", "/etc"]  # noqa: S108
    for file in etc:
        args += ["--perms", "0644", "--file", str(file.fd), file.target]
    names = (*_FROM_HOST, "resolv.conf", "hosts") if network else _FROM_HOST
    for name in names:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return args


def own_workdir(workdir: str, mounted: Iterable[str]) -> bool:
    """Whether none of the box's mounts holds the working directory: it is an empty one that can be written."""
    own = (*mounted, *WRITABLE)
    return workdir != "/" and not any(f"{workdir}/".startswith(f"{at.rstrip('/')}/") for at in own)

"""Memory and processor limits through control groups, version 1 or 2, where ours may be written.

Limits are asked for explicitly; a machine that cannot hold them raises SandboxError instead of running without.
"""

import errno
import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from polar_env.errors import SandboxError
from polar_env.sandbox import trees

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000
"""Microseconds of one scheduling period (the kernel's default for cpu.cfs_period_us)."""
PATIENCE = 10.0
"""Seconds a group may take to be empty once its processes are killed: one that dies of gigabytes takes one or two."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The groups of one sandbox: processes are put in by writing to each of ``procs``."""

    folders: tuple[Path, ...] = ()
    held: frozenset[str] = frozenset()
    """Controllers that hold a limit: memory, cpu, pids."""

    @property
    def procs(self) -> tuple[str, ...]:
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def oom_kills(self) -> int:
        """How many of their processes the kernel killed because the memory limit was reached."""
        texts = [_text(folder / name) for folder in self.folders for name in ("memory.oom_control", "memory.events")]
        words = [line.split() for text in texts for line in text.splitlines()]
        return sum(int(count) for name, count in words if name == "oom_kill")

    def remove(self) -> None:
        """Remove the groups. What still runs in them (the last of a command that was cancelled a moment ago) is killed.
        Blocks, for ``PATIENCE`` at most; then raises OSError."""
        for folder in self.folders:
            if folder.is_dir():
                _remove(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            if not _end(folder):
                time.sleep(0.01)  # the kernel tells nobody when a group has become free
        else:
            return


def _end(folder: Path) -> bool:
    """Kill a group's processes and wait for their deaths; whether there were any."""
    pids, held = _members(folder), list[int]()
    with ExitStack() as stack:
        for pid in pids:
            with suppress(ProcessLookupError):
                held.append(os.pidfd_open(pid))
                stack.callback(os.close, held[-1])
                if pid in _members(folder):  # the number was not another's when it was opened
                    signal.pidfd_send_signal(held[-1], signal.SIGKILL)
        for pidfd in held:
            trees.wait_pidfd(pidfd, 1.0)
    return bool(pids)


def _members(folder: Path) -> list[int]:
    """0 stands for processes of a pid namespace that is not ours."""
    return [int(word) for word in _text(folder / "cgroup.procs").split() if word != "0"]


def _own(root: Path, controller: str, membership: str) -> tuple[Path, bool] | None:
    """(our own group's folder for ``controller``, is it version 2), from the text of /proc/self/cgroup."""
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return root / controllers / path.lstrip("/"), False
        if number == "0" and controller in _text(root / path.lstrip("/") / "cgroup.controllers").split():
            return root / path.lstrip("/"), True
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def own_memory(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """MiB that our own control group allows us; ``None`` where there is no such limit."""
    text = _text(Path("/proc/self/cgroup")) if membership is None else membership
    found = _own(root, "memory", text)
    folder = found[0] if found else Path()
    limits = [_text(folder / name).strip() for name in ("memory.max", "memory.limit_in_bytes")] if found else []
    return min((int(limit) // (1024 * 1024) for limit in limits if limit.isdigit()), default=None)


def _settings(controller: str, unified: bool, value: float) -> dict[str, str]:
    if controller == "memory":
        size = str(int(value) * 1024 * 1024)
        if unified:
            return {"memory.max": size, "memory.swap.max": "0"}
        return {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
    if controller == "pids":
        return {"pids.max": str(int(value))}
    quota = str(int(value * _PERIOD))
    if unified:
        return {"cpu.max": f"{quota} {_PERIOD}"}
    return {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": quota}


_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Kernels without swap accounting have no such files."""


def _make(folder: Path, settings: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in settings.items():
        if name not in _OPTIONAL or (folder / name).exists():
            (folder / name).write_text(value, encoding="utf-8")


def _hold(root: Path, membership: str, name: str, controller: str, value: float) -> Path:
    """Our group ``name`` with this limit. Raises OSError where it cannot be made."""
    found = _own(root, controller, membership)
    if found is None:
        raise FileNotFoundError(f"no {controller} controller is delegated to this process")
    folder, unified = found[0] / name, found[1]
    try:
        _make(folder, _settings(controller, unified, value))
    except OSError:
        Cgroups((folder,)).remove()
        raise
    return folder


def limit(
    name: str,
    memory_mib: int | None,
    cpus: float | None,
    root: Path = _ROOT,
    membership: str | None = None,
    *,
    pids: int | None = None,
    automatic: bool = False,
) -> Cgroups:
    """Make groups called ``name`` under our own. ``None`` limits nothing and makes nothing. The number of processes,
    and with ``automatic`` the memory, are limited where that is possible: resource limits stand in elsewhere.

    Raises:
        SandboxError: when a limit was asked for and its control group cannot be made here.
    """
    text = _text(Path("/proc/self/cgroup")) if membership is None else membership
    made: dict[str, Path] = {}
    wanted = {"memory": (memory_mib, not automatic), "cpu": (cpus, True), "pids": (pids, False)}
    for controller, (value, must) in wanted.items():
        if value is None:
            continue
        try:
            made[controller] = _hold(root, text, name, controller, value)
        except OSError as error:
            if not must:
                continue
            Cgroups(tuple(made.values())).remove()
            raise SandboxError(
                f"cannot limit {controller} of a sandbox: {os.fspath(root)}: {error.strerror or error}. Leave "
                "sandbox.memory_mib and sandbox.cpus unset, or run where control groups may be written."
            ) from error
    return Cgroups(tuple(dict.fromkeys(made.values())), frozenset(made))

"""Memory and processor limits through control groups, version 1 or 2, where ours may be written.

Limits are asked for explicitly; a machine that cannot hold them raises SandboxError instead of running without.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from polar_env.errors import SandboxError

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000
"""Microseconds of one scheduling period (the kernel's default for cpu.cfs_period_us)."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The groups of one sandbox: processes are put in by writing to each of ``procs``."""

    folders: tuple[Path, ...] = ()

    @property
    def procs(self) -> tuple[str, ...]:
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def remove(self) -> None:
        """Remove the groups; their processes must be dead."""
        for folder in self.folders:
            if folder.is_dir():
                folder.rmdir()


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


def _settings(controller: str, unified: bool, memory_mib: int | None, cpus: float | None) -> dict[str, str]:
    if controller == "memory":
        size = str((memory_mib or 0) * 1024 * 1024)
        return {"memory.max": size, "memory.swap.max": "0"} if unified else {"memory.limit_in_bytes": size}
    quota = str(int((cpus or 0) * _PERIOD))
    if unified:
        return {"cpu.max": f"{quota} {_PERIOD}"}
    return {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": quota}


def _make(folder: Path, settings: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in settings.items():
        if name != "memory.swap.max" or (folder / name).exists():  # kernels without swap accounting have no such file
            (folder / name).write_text(value, encoding="utf-8")


def limit(
    name: str, memory_mib: int | None, cpus: float | None, root: Path = _ROOT, membership: str | None = None
) -> Cgroups:
    """Make groups called ``name`` under our own. ``None`` limits nothing and makes nothing.

    Raises:
        SandboxError: when a limit was asked for and its control group cannot be made here.
    """
    text = _text(Path("/proc/self/cgroup")) if membership is None else membership
    made: list[Path] = []
    for controller, wanted in (("memory", memory_mib), ("cpu", cpus)):
        if wanted is None:
            continue
        try:
            found = _own(root, controller, text)
            if found is None:
                raise FileNotFoundError(f"no {controller} controller is delegated to this process")
            folder, unified = found[0] / name, found[1]
            if folder not in made:
                made.append(folder)
            _make(folder, _settings(controller, unified, memory_mib, cpus))
        except OSError as error:
            Cgroups(tuple(made)).remove()
            raise SandboxError(
                f"cannot limit {controller} of a sandbox: {os.fspath(root)}: {error.strerror or error}. Leave "
                "sandbox.memory_mib and sandbox.cpus unset, or run where control groups may be written."
            ) from error
    return Cgroups(tuple(made))

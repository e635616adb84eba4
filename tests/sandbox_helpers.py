"""Shared by the tests of the sandbox and grade rooms."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import SandboxExecResult, SandboxHandle, SandboxSpec, SandboxStatus

from polar_env.config import SandboxConfig, environment
from polar_env.sandbox import Box, Overlay
from polar_env.sandbox.bubblewrap import BubblewrapProvider
from polar_env.tasks import Prepared, Task

WORKDIR = "/testbed"


def config(**options: Any) -> SandboxConfig:
    return SandboxConfig(provider_options=options)


def box_of(repo: Path, **more: Any) -> Box:
    """A box whose workdir is ``repo``, copy-on-write."""
    return Box(workdir=WORKDIR, overlays=(Overlay(repo, WORKDIR),), **more)


def host_processes(marker: str) -> list[int]:
    """Pids on this machine whose command line holds ``marker`` as an argument of its own."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in arguments:
            found.append(int(folder.name))
    return found


async def until(holds: Callable[[], bool], seconds: float) -> bool:
    """The kernel tells of a process's start and end only to its parent, so we look again and again."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def until_gone(marker: str, seconds: float = 5.0) -> bool:
    """True as soon as no process carries ``marker``; False after ``seconds``."""
    return await until(lambda: not host_processes(marker), seconds)


async def until_running(marker: str, count: int = 1) -> None:
    """Waits for ``count`` processes that carry ``marker``."""
    assert await until(lambda: len(host_processes(marker)) >= count, 10.0)


class PlainProvider:
    """A real sandbox behind nothing but the Gym protocol: what any third party's provider looks like to us."""

    name = "plain"

    def __init__(self, **options: Any) -> None:
        self._inner = BubblewrapProvider(**options)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        return await self._inner.create(spec)

    async def exec(
        self, handle: SandboxHandle, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None,
        timeout_s: float | None = None, user: str | int | None = None,
    ) -> SandboxExecResult:  # fmt: skip
        return await self._inner.exec(handle, command, cwd=cwd, env=dict(env or {}), timeout_s=timeout_s, user=user)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        await self._inner.upload_file(handle, source_path, target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        await self._inner.download_file(handle, source_path, target_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        return await self._inner.status(handle)

    async def close(self, handle: SandboxHandle) -> None:
        await self._inner.close(handle)

    async def aclose(self) -> None:
        await self._inner.aclose()


def data_folder() -> Path | None:
    """The SWE-bench corpora: POLAR_SWEBENCH_DATA, or the shared folder beside this checkout."""
    named = environment("POLAR_SWEBENCH_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data" / "swebench"
    return folder if folder.is_dir() else None


def git_repo(folder: Path, files: Mapping[str, bytes], ignored: Mapping[str, bytes]) -> Path:
    """A repository with one commit of ``files``, and ``ignored`` files beside them."""
    for name, data in {**files, **ignored}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    author = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false"]
    for command in (["init", "-q"], ["config", "user.name", "t"], ["config", "user.email", "t@t"],
                    ["add", "-f", "--", *files], ["commit", "-q", "-m", "base"]):  # fmt: skip
        subprocess.run(["git", *author, *command], cwd=folder, check=True)
    return folder


def prepared_of(repo: Path, row: Mapping[str, Any] | None = None, **more: Any) -> Prepared:
    """A prepared task made by hand around ``repo``."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repo, check=True, capture_output=True, text=True
    ).stdout.strip()
    task = Task("hand-made", "Fix it.", row or {"base_commit": head, "test_patch": ""})
    return Prepared(task, head, repo=repo, env=None, git_dir=None, **more)

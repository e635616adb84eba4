"""One running bubblewrap sandbox: commands, files, listener and kill, all by joining its namespaces."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, recv_fds, socket, socketpair
from typing import Any

from polar_env.errors import SandboxError, boundary
from polar_env.sandbox import ExecResult, Overlay, cgroups, janitor, netns, process, root, seccomp, trees
from polar_env.sandbox.limits import Limits
from polar_env.sandbox.spaces import Joined, Spaces

FILE_TIMEOUT = 120.0
"""Seconds one file transfer may take."""
OUTPUT_LIMIT = 16 * 1024 * 1024
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Layout:
    """What of the host a sandbox shows, and how writes are kept."""

    overlays: tuple[Overlay, ...] = ()
    read_only: tuple[tuple[str, str], ...] = ()
    network: bool = False
    workdir: str = "/"
    limits: Limits = Limits()  # noqa: RUF009 - frozen

    @property
    def mounted(self) -> frozenset[str]:
        """Where the box's own mounts are."""
        return frozenset((*(overlay.target for overlay in self.overlays), *(target for _, target in self.read_only)))

    @property
    def own_workdir(self) -> bool:
        return root.own_workdir(self.workdir, self.mounted)

    @property
    def writable(self) -> list[str]:
        """File systems of memory that hold the sandbox's writes, "/" with the upper layers of the overlays."""
        own = (self.workdir,) if self.own_workdir else ()
        return ["/", *(at for at in (*root.WRITABLE, *own) if at not in self.mounted)]


@dataclass(slots=True)
class Bubble:
    """One running sandbox. Made by ``BubblewrapProvider.create``; ``close`` is idempotent and leaves nothing behind."""

    env: dict[str, str]
    layout: Layout
    groups: cgroups.Cgroups
    scratch: Path | None
    hold: int = -1
    """Write end of init's standard input: closing it ends the sandbox."""
    init: asyncio.subprocess.Process | None = None
    pidfd: int = -1
    pid: int = 0
    spaces: Spaces | None = None
    killed: bool = False
    """Its processes were ended by ``kill``; its files are still there."""
    spent: cgroups.Cgroups = cgroups.Cgroups()  # noqa: RUF009 - frozen
    """The groups of before ``kill``. The files that the agent wrote to memory count there and may fill them, so what
    comes after has groups of its own, with the same limits: a test run is an agent's code too."""
    _serial: int = 0
    _closing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def running(self) -> bool:
        alive = self.init is not None and self.init.returncode is None
        return self.spaces is not None and (alive or self.killed)

    @property
    def _spaces(self) -> Spaces:
        if self.spaces is None or not self.running:
            raise SandboxError("the sandbox is closed, or its init has died")
        return self.spaces

    def _spec(self, do: str, spaces: Joined | None = None, **more: Any) -> dict[str, Any]:
        """What the helper is told: by default to work among the agent's processes, alone once they were killed."""
        place = spaces or (self._spaces.alone(scratch=do == "exec") if self.killed else self._spaces.alive())
        return {"do": do, "spaces": place, "cgroups": self.groups.procs if spaces is None else (), **more}

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout: float,  # noqa: ASYNC109 - a budget that yields a result (timed_out), not an exception
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """See ``polar_env.sandbox.sandbox.Sandbox.exec``."""
        self._serial += 1
        mark, groups = self._serial, self.groups
        spec = self._spec(
            "exec",
            argv=list(argv),
            env={**self.env, **(env or {})},
            cwd=cwd or self.layout.workdir,
            filter=seccomp.program().hex(),
            limits=self.layout.limits.rlimits(groups),
            mark=mark,
        )
        stop = () if self.killed else (lambda: self._kill_one(mark), self.kill)
        before = groups.oom_kills()
        result = await process.run(spec, stdin=stdin, timeout=timeout, output_limit=output_limit, stop=stop)
        if result.code in (None, _KILLED) and not result.timed_out and await asyncio.to_thread(self._died):
            raise SandboxError("the sandbox died while a command ran in it: its init was killed")
        return replace(result, out_of_memory=groups.oom_kills() > before)

    async def _kill_one(self, mark: int) -> None:
        """Kill one exec's processes. An agent can shoot the helper or take the mark off: ``kill`` is what follows."""
        with suppress(SandboxError, TimeoutError):
            await asyncio.wait_for(self._helper(self._spec("kill", mark=mark)), process.STOP_GRACE)

    def _died(self) -> bool:
        """Waits a moment, because a pid namespace kills its members before its init is seen to be dead."""
        return not self.killed and (self.pidfd < 0 or trees.wait_pidfd(self.pidfd, 0.2))

    async def _helper(self, spec: Mapping[str, Any], stdin: bytes | None = None, limit: int = 65536) -> bytes:
        async def stop() -> None:
            raise SandboxError(f"{spec['do']} took over {FILE_TIMEOUT:.0f} s in the sandbox")

        result = await process.run(spec, stdin=stdin, timeout=FILE_TIMEOUT, output_limit=limit, stop=(stop,))
        if result.code != 0:
            detail = result.stderr.decode("utf-8", "replace").strip() or f"ended with {result.code}"
            raise SandboxError(f"{spec['do']} {spec.get('path', '')} in the sandbox: {detail}")
        return result.stdout

    def _absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.layout.workdir, path))  # noqa: PTH118 - a path of another filesystem

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._helper(self._spec("write", path=self._absolute(path), mode=mode), stdin=data)

    async def read(self, path: str) -> bytes:
        return await self._helper(self._spec("read", path=self._absolute(path)), limit=1 << 40)

    async def kill(self) -> None:
        """End every process of the sandbox, its init with them, so that nothing can resist; its files stay.

        Commands of ours may follow: they find the files, a /tmp of their own, and no /proc.
        """
        if not self.running:
            raise SandboxError("the sandbox is closed, or its init has died")
        again, self.killed = self.killed, True
        self._signal()
        if not await asyncio.to_thread(trees.wait_pidfd, self.pidfd, FILE_TIMEOUT):
            raise SandboxError("the sandbox's processes cannot be killed: the kernel holds one of them")
        if not again:
            self.spent, self.groups = self.groups, self.layout.limits.groups()
            for folder in self.groups.folders:
                janitor.remove_later(folder)

    async def seal(self) -> None:
        """Bound the writable layer and close the root: what runs after the agent is the host's, read-only."""
        quota = self.layout.limits.quota()
        await self._helper(
            self._spec("seal", self._spaces.mounts(), paths=root.DEVICES, quota=quota, writable=self.layout.writable)
        )

    async def blackhole(self, networks: Sequence[str]) -> None:
        """Let connecting to these IPv4 networks time out. Raises SandboxError for a text that is no network."""
        with boundary(SandboxError, "reading Box.blackholes"):
            parsed = [IPv4Network(text) for text in networks]
        pairs = [(str(network.network_address), str(network.netmask)) for network in parsed]
        await self._helper(self._spec("blackhole", self._spaces.routes(), networks=pairs))

    def listener(self, port: int) -> socket:
        if self._spaces.net is None:
            raise SandboxError("a sandbox on the host's network has no loopback of its own to listen on")
        return self._socket(self._spaces.net, netns.listening(port))

    def watch(self) -> socket | None:
        net = self._spaces.net
        return None if net is None else self._socket(net, netns.watching())

    def _socket(self, net: int, spec: dict[str, Any]) -> socket:
        try:
            return netns.socket_at(net, spec)
        except PermissionError:
            return _socket_by_helper({**self._spec(spec["do"], self._spaces.routes()), **spec})
        except OSError as error:
            raise SandboxError(f"cannot {spec['doing']} inside the sandbox: {error.strerror}") from error

    def _signal(self) -> None:
        with suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self.init is not None and self.init.returncode is None:
                self.init.kill()

    def end(self) -> None:
        """Kill the whole process tree now; the kernel does it, so nothing can be cancelled in between."""
        if self.hold >= 0:
            os.close(self.hold)
            self.hold = -1
        self._signal()

    async def close(self) -> None:
        self.end()
        await asyncio.shield(self._remove())

    async def _remove(self) -> None:
        async with self._closing:
            if self.init is not None:
                await self.init.wait()
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1
            if self.spaces is not None:
                spaces, self.spaces = self.spaces, None
                await asyncio.to_thread(spaces.close)  # frees all that was written: seconds for a million files
            for groups in (self.spent, self.groups):
                await asyncio.to_thread(groups.remove)
            for folder in (*self.spent.folders, *self.groups.folders, *([self.scratch] if self.scratch else [])):
                janitor.removed(folder)
            self.spent = self.groups = cgroups.Cgroups()
            if self.scratch is not None:
                await asyncio.to_thread(trees.remove, self.scratch)
                self.scratch = None


def _socket_by_helper(spec: Mapping[str, Any]) -> socket:
    """Without privilege: a helper joins the user namespace first, and passes the socket back."""
    ours, theirs = socketpair(AF_UNIX, SOCK_STREAM)
    status, writer = os.pipe()
    with ExitStack() as stack, ours, theirs, os.fdopen(status, "rb") as answer:
        spec_fd = process.memory_file(stack, "spec", json.dumps({**spec, "channel": theirs.fileno()}).encode())
        passed = (spec_fd, writer, theirs.fileno(), *(space for space, _ in spec["spaces"]))
        try:
            subprocess.run(process.helper_argv(spec_fd, writer), pass_fds=passed, env=process.helper_env(), check=False)
        finally:
            os.close(writer)
        told: dict[str, Any] = json.loads(answer.read() or b'{"error": "the helper died"}')
        if "error" in told:
            raise SandboxError(f"cannot {spec['doing']} inside the sandbox: {told['error']}")
        _, fds, _, _ = recv_fds(ours, 16, 1)
        return socket(fileno=fds[0])

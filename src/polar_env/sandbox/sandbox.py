"""Open any NeMo Gym sandbox provider behind one handle.

bubblewrap (ours) does everything natively. Of other providers we use the Gym protocol (exec, upload, download); what
it lacks (argv, bytes, standard input, kill) is done with shell quoting and files, and the listener only where the
container's processes are on this machine (docker).
"""

import asyncio
import errno
import os
import shlex
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any, Protocol
from uuid import uuid4

from nemo_gym.sandbox import SandboxHandle, SandboxProvider, SandboxResources, SandboxSpec, create_provider

from polar_env.config import SandboxConfig, child_environment
from polar_env.errors import HarnessError, SandboxError, boundary
from polar_env.sandbox import Box, ExecResult, limits, netns
from polar_env.sandbox.bubble import OUTPUT_LIMIT
from polar_env.sandbox.bubblewrap import BubblewrapProvider, bubble_of

DOCKER_TIMEOUT = 60.0
"""Seconds that docker's command line may take to answer."""


class Sandbox(Protocol):
    """A running sandbox. Every method raises SandboxError when the sandbox itself fails."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout: float,  # noqa: ASYNC109
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a command to its end. ``env`` is added to the box's; ``cwd`` defaults to its workdir; no ``stdin`` is an
        empty one. After ``timeout`` seconds its process tree is killed and what it printed comes back with ``code``
        None. Each stream keeps at most ``output_limit`` bytes. A command that does not exist gives 127, death by
        signal n gives 128 + n.
        """
        ...

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file; parent directories are made."""
        ...

    async def read(self, path: str) -> bytes:
        """Read a regular file. Raises SandboxError when there is none."""
        ...

    async def kill(self) -> None:
        """Kill every process of the agent and keep the filesystem."""
        ...

    def listener(self, port: int) -> socket:
        """A TCP socket listening on 127.0.0.1:``port`` of the sandbox's own network, served from this process."""
        ...

    def watch(self) -> socket | None:
        """From now on what the sandbox's processes send to anyone but their own loopback is held in this socket, to be
        read with ``egress.read``. Connecting is refused where it was unreachable, at once too; addresses of elsewhere
        can be bound. ``None`` where nobody can tell what was tried: on the host's network, and with providers that have
        no way into a sandbox's network. Raises SandboxError where the kernel cannot show it."""
        ...


@asynccontextmanager
async def open_sandbox(box: Box, config: SandboxConfig) -> AsyncGenerator[Sandbox]:
    """Make a sandbox; at the end its process tree is killed and everything of it is removed.

    Raises:
        SandboxError: when it cannot be made, with the provider's own reason.
    """
    with boundary(SandboxError, f"starting the {config.provider} sandbox"):
        provider = create_provider({config.provider: _options(box, config)})
        spec = _spec(box, config)
        handle = await provider.create(spec)
    try:
        if isinstance(provider, BubblewrapProvider):
            if box.blackholes and not box.network:
                await bubble_of(handle).blackhole(box.blackholes)
            yield bubble_of(handle)
        else:
            foreign = Foreign(provider, handle, box.workdir)
            await foreign.remember()
            yield foreign
    finally:
        await asyncio.shield(_close(provider, handle))


class LeftBrokenError(HarnessError):
    """Nothing runs any more in what the agent left: its doing, so no mask. Were it ours, an agent could mask its
    failures."""


async def end_agent(sandbox: Sandbox) -> None:
    """``kill`` after an agent. Raises SandboxError, or LeftBrokenError where the agent's own changes are why."""
    try:
        await sandbox.kill()
    except SandboxError as error:
        if await still_there(sandbox):
            raise LeftBrokenError(f"the agent left a container in which nothing runs any more: {error}") from error
        raise


async def still_there(sandbox: Sandbox) -> bool:
    """Whether the engine is well and has the container, so that a failure in it is the agent's; False where nobody can
    tell, and where the agent cannot change what runs (bubblewrap)."""
    return isinstance(sandbox, Foreign) and await sandbox.known()


async def _close(provider: SandboxProvider, handle: SandboxHandle) -> None:
    with boundary(SandboxError, f"closing the {provider.name} sandbox"):
        await provider.close(handle)
        await provider.aclose()


def _options(box: Box, config: SandboxConfig) -> dict[str, Any]:
    """Provider options; docker gets no network unless the box or the configuration says otherwise."""
    options = dict(config.provider_options)
    if config.provider == "docker" and not box.network:
        options["create"] = {"network": "none", "pids_limit": config.pids, **dict(options.get("create") or {})}
    return options


def _spec(box: Box, config: SandboxConfig) -> SandboxSpec:
    asked = box.memory_mib if box.memory_mib is not None else config.memory_mib
    memory = limits.fair_memory() if asked is None else asked or None
    allowed = SandboxResources(cpu=box.cpus if box.cpus is not None else config.cpus, memory_mib=memory)
    common: dict[str, Any] = {"workdir": box.workdir, "env": dict(box.env), "resources": allowed}
    if config.provider == "bubblewrap":
        shown: dict[str, Any] = {
            "overlays": [(os.fspath(o.source), o.target) for o in box.overlays],
            "read_only": [(os.fspath(source), target) for source, target in box.read_only],
            "network": box.network,
            "pids": config.pids,
            "disk_mib": config.disk_mib or None,
            "automatic": asked is None,
        }
        return SandboxSpec(image=box.image or None, provider_options=shown, **common)
    if box.overlays:
        raise SandboxError(
            f"provider {config.provider!r} cannot show host directories copy-on-write; use the bubblewrap provider, or "
            "tasks whose image holds the repository"
        )
    binds = [f"{os.fspath(source)}:{target}:ro" for source, target in box.read_only]
    if binds and config.provider not in ("docker", "apptainer"):
        raise SandboxError(f"provider {config.provider!r} shows no host directories; bake the harness into the image")
    key = {"docker": "volumes", "apptainer": "binds"}.get(config.provider, "")
    return SandboxSpec(image=box.image or None, provider_options={key: binds} if binds else {}, **common)


@dataclass(slots=True)
class Foreign:
    """A sandbox of a provider that is not ours, through the Gym protocol alone."""

    provider: SandboxProvider
    handle: SandboxHandle
    workdir: str
    _first: frozenset[str] = frozenset()
    """Processes that were there before any command: the container's own, which kill() spares."""
    _scratch: str = field(default_factory=lambda: f"/tmp/.polar-{uuid4().hex[:8]}")  # noqa: S108 - in the sandbox

    _last: str = ""
    """Where the last command's files are."""

    async def _shell(self, command: str, limit: float = 120.0) -> str:
        with boundary(SandboxError, f"running a command in the {self.provider.name} sandbox"):
            result = await self.provider.exec(self.handle, command, cwd="/", timeout_s=limit)
        if result.error_type or result.return_code != 0:
            why = result.stderr or result.error_type or result.return_code
            raise SandboxError(f"{self.provider.name} sandbox: {why}")
        return result.stdout or ""

    async def remember(self) -> None:
        """Note the sandbox's own processes, and refuse a "sandbox" that shares ours."""
        places = "/proc/sys/kernel/random/boot_id /proc/self/ns/pid"
        ask = "readlink /proc/self/ns/pid; cat /proc/sys/kernel/random/boot_id; cd /proc && echo [0-9]*"
        space, boot, *pids = (await self._shell(f"mkdir -p {self._scratch}; {ask}")).split()
        if (space, boot) == await asyncio.to_thread(_own_space):
            raise SandboxError(
                f"provider {self.provider.name!r} does not isolate processes: {places} are this machine's"
            )
        self._first = frozenset(pids)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout: float,  # noqa: ASYNC109
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """See ``Sandbox.exec``. Output goes through files, because the Gym protocol carries text only."""
        place, started = f"{self._scratch}/{uuid4().hex[:8]}", time.monotonic()
        source = f"{place}/in" if stdin else "/dev/null"
        if stdin:
            await self.write(source, stdin)
        # dd writes what it reads at once (a timeout kills it); cat drains the rest, so the command never blocks
        keep = f"bs=65536 iflag=count_bytes count={output_limit} 2>/dev/null"
        cap = f"{{ dd of={place}/%s {keep}; cat > /dev/null; }}"
        inner = f"( {shlex.join(argv)} < {source}; echo $? > {place}/code )"
        # a command takes the last one's files away: one call of the engine less for each
        room = f"rm -rf {self._last}; mkdir -p {place}"
        command = f"{room}; ( {inner} 2>&1 1>&3 3>&- | {cap % 'err'} ) 3>&1 | {cap % 'out'}; rm -f {place}/in"
        self._last = place
        with boundary(SandboxError, f"running {argv[0]} in the {self.provider.name} sandbox"):
            result = await self.provider.exec(
                self.handle, command, cwd=cwd or self.workdir, env=dict(env or {}), timeout_s=timeout
            )
        timed_out = result.error_type == "timeout"
        if result.error_type and not timed_out:
            raise SandboxError(f"{self.provider.name} sandbox: {result.stderr or result.error_type}")
        if timed_out:
            await self.kill()
        code, out, err = await self._results(place)
        code = None if timed_out else code
        if code is not None and (out is None or err is None):
            raise SandboxError(f"{self.provider.name} sandbox: what {argv[0]} printed is gone")
        return ExecResult(code, out or b"", err or b"", timed_out, time.monotonic() - started)

    async def _results(self, place: str) -> tuple[int | None, bytes | None, bytes | None]:
        """(exit code, output, error output) of a command; ``None`` for what it was killed before it could leave."""
        found: list[bytes | None] = []
        with tempfile.TemporaryDirectory(prefix="polar-down-") as folder:
            if self.provider.name == "docker":  # all in one
                try:
                    await asyncio.to_thread(_docker, "cp", f"{self.handle.raw.name}:{place}/.", folder)
                except SandboxError as error:  # else the folder is gone, with what the command left
                    if isinstance(error, _SlowError):
                        raise
            for name in ("code", "out", "err"):
                try:
                    local = Path(folder, name)
                    if self.provider.name != "docker":
                        await self.provider.download_file(self.handle, f"{place}/{name}", local)
                    found.append(await asyncio.to_thread(_regular, local))
                except (OSError, ValueError, RuntimeError, SandboxError):
                    found.append(None)
        told, out, err = found
        return (int(told) if told and told.strip().isdigit() else None), out, err

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._shell(f"mkdir -p -- {shlex.quote(os.path.dirname(path) or '/')}")  # noqa: PTH120 - a sandbox path
        with tempfile.TemporaryDirectory(prefix="polar-up-") as folder:
            local = Path(folder, "file")
            await asyncio.to_thread(local.write_bytes, data)
            with boundary(SandboxError, f"writing {path} in the {self.provider.name} sandbox"):
                await self.provider.upload_file(self.handle, local, path)
        await self._shell(f"chmod {mode:o} -- {shlex.quote(path)}")

    async def read(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="polar-down-") as folder:
            local = Path(folder, "file")
            with boundary(SandboxError, f"reading {path} in the {self.provider.name} sandbox"):
                await self.provider.download_file(self.handle, path, local)
                return await asyncio.to_thread(_regular, local)

    async def kill(self) -> None:
        """Docker's containers are started anew, which no process in them can resist; files stay, /dev/shm does not."""
        if self.provider.name == "docker":
            await asyncio.to_thread(_docker, "restart", "--time", "0", str(self.handle.raw.name))
            await self.remember()
            return
        spared = " ".join(sorted(self._first))
        await self._shell(
            f'cd /proc; for round in 1 2 3; do for pid in [0-9]*; do case \' {spared} \'"$$ " in *" $pid "*) ;; '
            "*) kill -9 $pid 2>/dev/null;; esac; done; done; true"
        )

    async def known(self) -> bool:
        """Whether docker answers, and has the container."""
        if self.provider.name != "docker":
            return False
        try:
            await asyncio.to_thread(_docker, "inspect", str(self.handle.raw.name))
        except (SandboxError, OSError):
            return False
        return True

    async def changes(self) -> list[str]:
        """How its files differ from its image, as docker tells from outside: lines of A, C or D and a path. Nothing for
        other providers, which cannot tell."""
        if self.provider.name != "docker":
            return []
        return (await asyncio.to_thread(_docker, "diff", str(self.handle.raw.name))).splitlines()

    def listener(self, port: int) -> socket:
        """Docker containers without a network of their own (``create.network: none``) on this machine."""
        if self.provider.name != "docker":
            raise SandboxError(
                f"provider {self.provider.name!r} gives no way into the sandbox's network; use bubblewrap, or "
                "docker on this machine"
            )
        return netns.socket_in(docker_pid(str(self.handle.raw.name)), netns.listening(port))

    def watch(self) -> socket | None:
        """Docker containers without a network of their own, as for ``listener``."""
        if self.provider.name != "docker":
            return None
        pid, network = _first_process(str(self.handle.raw.name))
        return netns.socket_in(pid, netns.watching()) if network == "none" else None


def _own_space() -> tuple[str, str]:
    """(pid namespace, boot id): together they name the processes of one machine or container."""
    return os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # noqa: PTH115


def _regular(path: Path) -> bytes:
    """A downloaded file. A link is refused: docker copies it as a link, and its target is then a file of the host."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read()


class _SlowError(SandboxError):
    """Docker has not answered, so what is or is not there is not known."""


def _docker(*words: str) -> str:
    env = child_environment("DOCKER_")
    try:
        asked = subprocess.run(["docker", *words], capture_output=True, check=False, timeout=DOCKER_TIMEOUT, env=env)
    except subprocess.TimeoutExpired as error:
        raise _SlowError(f"docker {words[0]} {words[-1]} took over {DOCKER_TIMEOUT:g} s") from error
    if asked.returncode:
        raise SandboxError(f"docker {words[0]} {words[-1]}: {asked.stderr.decode(errors='replace').strip()}")
    return asked.stdout.decode(errors="replace")


def docker_pid(container: str) -> int:
    """Host pid of a container's first process. Raises SandboxError when docker does not know it."""
    return _first_process(container)[0]


def _first_process(container: str) -> tuple[int, str]:
    """(host pid of a container's first process, its network mode). Raises as ``docker_pid``."""
    with boundary(SandboxError, f"asking docker for the process of {container}"):
        pid, network = _docker("inspect", "-f", "{{.State.Pid}} {{.HostConfig.NetworkMode}}", container).split()
        if int(pid) > 0:
            return int(pid), network
    raise SandboxError(f"docker knows no running container {container}")

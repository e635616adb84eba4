"""What a sandbox must do, as checks that any provider's author can run: ``check_sandbox``.

Each check has a sandbox of its own and needs bash and coreutils in it, nothing else. ``ISOLATION`` names those that a
provider without isolation (NeMo Gym's ``local``) cannot pass; ``open_sandbox`` refuses such a provider.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from polar_env.config import SandboxConfig
from polar_env.errors import SandboxError
from polar_env.sandbox import Box, ExecResult, egress
from polar_env.sandbox.sandbox import Sandbox, open_sandbox

Opener = Callable[..., AbstractAsyncContextManager[Sandbox]]
"""Opens a sandbox; keyword arguments change the ``Box`` (``memory_mib``, ``env``)."""
_TIMEOUT = 60.0
_HERE = Path(__file__).resolve()


async def _sh(sandbox: Sandbox, script: str, **more: Any) -> ExecResult:
    more.setdefault("timeout", _TIMEOUT)
    return await sandbox.exec(["bash", "-c", script], **more)


def _same(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} instead of {wanted!r}")


async def _refused(what: str, doing: Awaitable[object]) -> None:
    try:
        await doing
    except SandboxError:
        return
    raise AssertionError(f"{what} was not refused")


async def commands(opened: Opener) -> None:
    """Arguments, standard input, both streams, environment and directory are bytes and arrive unchanged."""
    async with opened(env={"OF_BOX": "b"}) as sandbox:
        words = ["$HOME", "a b", "", "'; exit 9", "*"]
        echoed = await sandbox.exec(["printf", "%s\\0", *words], timeout=_TIMEOUT)
        _same("arguments", echoed.stdout.split(b"\0")[:-1], [word.encode() for word in words])
        script = "cat; printf '\\377\\0' >&2; echo $OF_BOX $OF_CALL; pwd; exit 3"
        ran = await _sh(sandbox, script, stdin=b"\0in\xfe\n", env={"OF_CALL": "c"}, cwd="/tmp")  # noqa: S108
        _same("output", ran.stdout, b"\0in\xfe\nb c\n/tmp\n")
        _same("error output", ran.stderr, b"\xff\0")
        _same("exit code", (ran.code, ran.timed_out), (3, False))
        _same("no standard input", (await _sh(sandbox, "cat")).stdout, b"")


async def exit_codes(opened: Opener) -> None:
    """A command that is not there gives 127, one that is no program 126, death by signal n gives 128 + n."""
    async with opened() as sandbox:
        _same("not there", (await sandbox.exec(["no-such-command"], timeout=_TIMEOUT)).code, 127)
        _same("no program", (await sandbox.exec(["/etc"], timeout=_TIMEOUT)).code, 126)
        _same("shot", (await _sh(sandbox, "kill -9 $$")).code, 137)


async def long_output(opened: Opener) -> None:
    """A stream over its limit neither blocks the command nor fills our memory."""
    async with opened() as sandbox:
        ran = await _sh(sandbox, "head -c 3000000 /dev/zero; exit 4", output_limit=1000)
        _same("exit code", ran.code, 4)
        if not 1000 <= len(ran.stdout) <= 1100:
            raise AssertionError(f"{len(ran.stdout)} bytes were kept of a limit of 1000")


async def files(opened: Opener) -> None:
    """Written with parents and mode, read back whole; what is no file is an error, and so is a link or a FIFO."""
    data = bytes(range(256)) * 400
    async with opened() as sandbox:
        await sandbox.write("/tmp/deep/er/file", data, 0o750)  # noqa: S108
        _same("a file", await sandbox.read("/tmp/deep/er/file"), data)  # noqa: S108
        _same("its mode", (await _sh(sandbox, "stat -c %a /tmp/deep/er/file")).stdout, b"750\n")
        await _sh(sandbox, "cd /tmp; mkfifo fifo; ln -s /etc/hostname link; ln -s /etc ways; ln -s /dev/zero device")
        for name in ("nothing", "deep", "fifo", "link", "device", "ways/hostname/x"):
            await _refused(f"reading {name}", asyncio.wait_for(sandbox.read(f"/tmp/{name}"), _TIMEOUT))  # noqa: S108


async def names(opened: Opener) -> None:
    """Two sandboxes of a box have the same host name, user, directory and environment: first prompts hold them."""
    seen: list[bytes] = []
    for _ in range(2):
        async with opened() as sandbox:
            seen.append((await _sh(sandbox, "echo $USER $HOME; id; pwd; env | grep -v '^HOSTNAME=' | sort")).stdout)
    _same("the second sandbox", seen[1], seen[0])


async def timeouts(opened: Opener) -> None:
    """A deadline ends children that detached themselves and ignore SIGTERM, and keeps what was printed."""
    async with opened() as sandbox:
        script = "echo part; trap '' TERM HUP; (setsid sleep 7101.5 &); setsid setsid sleep 7101.5 & sleep 7101.5"
        started = time.monotonic()
        ran = await _sh(sandbox, script, timeout=2.0)
        _same("the result", (ran.code, ran.timed_out, ran.stdout), (None, True, b"part\n"))
        if time.monotonic() - started > 2.0 + 10.0:
            raise AssertionError("it took more than 10 s to end the command")
        _same("what still runs", await _running(sandbox, "7101.5"), 0)


async def killing(opened: Opener) -> None:
    """``kill`` ends every process, whatever it does, and keeps the files."""
    async with opened() as sandbox:
        await _sh(sandbox, "echo kept > /tmp/kept; (trap '' TERM; setsid sleep 7102.5 >/dev/null 2>&1 &)")
        await _sh(sandbox, "(while :; do kill -9 -1; done) >/dev/null 2>&1 & exit 0")
        await asyncio.wait_for(sandbox.kill(), 10.0)
        _same("what still runs", await _running(sandbox, "7102.5"), 0)
        _same("a file", await sandbox.read("/tmp/kept"), b"kept\n")  # noqa: S108


async def _running(sandbox: Sandbox, marker: str) -> int:
    """Processes in the sandbox with this argument; none where the sandbox has no /proc any more."""
    pattern = f"[{marker[0]}]{marker[1:]}"  # does not match itself among grep's own arguments
    count = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -cx '{pattern}'; true"
    return int((await _sh(sandbox, count)).stdout)


async def closing(opened: Opener) -> None:
    """Nothing of a closed sandbox is left on this machine."""
    marker = f"7103.{os.getpid()}"
    async with opened() as sandbox:
        await _sh(sandbox, f"(setsid sleep {marker} >/dev/null 2>&1 &)")
        _same("what runs", await _running(sandbox, marker), 1)
    deadline = time.monotonic() + 10.0
    while left := _on_host(marker):
        if time.monotonic() > deadline:
            raise AssertionError(f"processes {left} are left")
        await asyncio.sleep(0.05)


def _on_host(marker: str) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


async def network(opened: Opener) -> None:
    """The listener is reached; this machine's own ports and the world are not, and trying is seen where it can be."""
    async with opened() as sandbox:
        with socket.create_server(("127.0.0.1", 0)) as ours, sandbox.watch() or nullcontext() as watched:
            server = await asyncio.start_server(_pong, sock=sandbox.listener(8123))
            async with server:
                _same("the listener", (await _sh(sandbox, _connect("127.0.0.1", 8123))).stdout, b"pong\n")
            for host, port in (("127.0.0.1", ours.getsockname()[1]), ("192.0.2.1", 80)):
                reached = await _sh(sandbox, _connect(host, port), timeout=5.0)
                if reached.code == 0 or reached.timed_out:
                    raise AssertionError(f"connecting to {host} was not refused at once")
            if watched is not None:
                _same("what was tried", dict(egress.read(watched).tried), {"tcp 192.0.2.1:80": 1})


def _connect(host: str, port: int) -> str:
    return f"exec 3<>/dev/tcp/{host}/{port} && head -n 1 <&3"


async def _pong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"pong\n")
    await writer.drain()
    writer.close()


async def host(opened: Opener) -> None:
    """Neither the host's files nor its processes nor another sandbox's writes are seen."""
    async with opened() as one, opened() as two:
        await _sh(one, "echo x > /tmp/mine")
        _same("another's file", (await _sh(two, "ls /tmp/mine 2>/dev/null")).stdout, b"")
        _same("our own file", (await _sh(one, f"ls {_HERE} 2>/dev/null")).stdout, b"")
        seen = int((await _sh(one, "ls -d /proc/[0-9]* | wc -l")).stdout)
        if seen > 20:
            raise AssertionError(f"{seen} processes are seen: the host's")
        _same("our host name", (await _sh(one, "hostname 2>/dev/null || cat /etc/hostname")).stdout.decode().strip()
              == socket.gethostname(), False)  # fmt: skip


async def memory(opened: Opener) -> None:
    """More than the limit is not had, and the sandbox lives on."""
    async with opened(memory_mib=64) as sandbox:
        ran = await _sh(sandbox, "head -c 300m /dev/zero | tail -c 300m | wc -c")
        if ran.stdout == b"314572800\n":
            raise AssertionError("300 MiB were had under a limit of 64 MiB")
        _same("a command afterwards", (await _sh(sandbox, "echo alive")).stdout, b"alive\n")


CHECKS: tuple[Callable[[Opener], Awaitable[None]], ...] = (
    commands, exit_codes, long_output, files, names, timeouts, killing, closing, network, host, memory,
)  # fmt: skip
ISOLATION = frozenset({"timeouts", "killing", "closing", "network", "host", "memory"})


def opener(box: Box, config: SandboxConfig) -> Opener:
    """Sandboxes of one box and configuration."""

    @asynccontextmanager
    async def opened(**changes: Any) -> AsyncGenerator[Sandbox]:
        fields = {name: getattr(box, name) for name in Box.__dataclass_fields__}
        async with open_sandbox(Box(**cast("Any", {**fields, **changes})), config) as sandbox:
            yield sandbox

    return opened


async def check_sandbox(opened: Opener, without: Collection[str] = (), at_once: int = 1) -> Mapping[str, str]:
    """Run every check but those named in ``without``. Returns name -> what is wrong, empty when it holds.

    A provider's author writes ``await check_sandbox(opener(Box("/tmp", image=...), SandboxConfig(provider="mine")))``
    and asserts that no value holds anything. ``at_once`` checks run beside each other: their sandboxes must not mind.
    """
    chosen = [check for check in CHECKS if _name(check) not in without]
    found = dict.fromkeys(map(_name, chosen), "was not run")
    room = asyncio.Semaphore(at_once)

    async def run(check: Callable[[Opener], Awaitable[None]]) -> None:
        async with room:
            found[_name(check)] = await _judged(check, opened)

    async with asyncio.TaskGroup() as group:
        for check in chosen:
            group.create_task(run(check))
    return found


def _name(check: Callable[[Opener], Awaitable[None]]) -> str:
    return str(getattr(check, "__name__", check))


async def _judged(check: Callable[[Opener], Awaitable[None]], opened: Opener) -> str:
    try:
        await check(opened)
    except (AssertionError, SandboxError, TimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

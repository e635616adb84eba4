"""Run the ``enter`` helper: bytes in, capped bytes out, the exit told over a pipe of its own.

Output is drained for as long as the command runs and at most ``output_limit`` bytes of each stream are kept, its
beginning and its end: a harness that prints a gigabyte neither fills our memory nor blocks.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from polar_env.config import environment
from polar_env.errors import SandboxError
from polar_env.sandbox import ExecResult

_HELPER = Path(__file__).with_name("enter.py")
DRAIN_GRACE = 0.5
"""Seconds that output still counts after the command ended: a background child may hold the pipe for ever."""

PIECE = 4 * 1024 * 1024
"""Bytes that are written at a time: about 2 ms."""

STOP_GRACE = 2.0
"""Seconds a command may take to be gone after it was killed."""


class _Drain:
    """A pipe read as it fills: of more than ``limit`` bytes the middle is left out, since the ending matters most.

    Read with ``add_reader`` and closed by us: a pipe given to ``connect_read_pipe`` is closed twice by uvloop (once by
    libuv, once through its file object), and the second close hits whatever a thread has opened in between.
    """

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader, self.writer = os.pipe()
        self._head, self._tail, self._half, self._seen = bytearray(), bytearray(), limit // 2, 0
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(self._reader, False)
        self._loop.add_reader(self._reader, self._readable)

    def _readable(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._reader, 65536)
            if data:
                self._keep(data)
            else:
                self.close()

    def _keep(self, data: bytes) -> None:
        self._seen += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    @property
    def kept(self) -> bytes:
        """What was read; a cut says how much is missing."""
        tail = self._tail[-self._half :]
        missing = self._seen - len(self._head) - len(tail)
        cut = f"\n[polar: {missing} bytes left out]\n".encode() if missing else b""
        return bytes(self._head) + cut + bytes(tail)

    def close(self) -> None:
        """Stop reading. Idempotent; also called at the end of the pipe."""
        if not self.ended.done():
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self.ended.set_result(None)


def _drain(stack: ExitStack, limit: int) -> _Drain:
    drain = _Drain(limit)
    stack.callback(drain.close)
    return drain


def memory_file(stack: ExitStack, name: str, data: bytes) -> int:
    """A read descriptor positioned at the start of ``data``; ``stack`` closes it."""
    fd = os.memfd_create(name)
    stack.callback(os.close, fd)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def long_memory_file(stack: ExitStack, name: str, data: bytes) -> int:
    """``memory_file`` of what may be long (a baseline has 50 MB, and writing it takes 25 ms), in pieces between which
    the loop goes on."""
    fd = memory_file(stack, name, b"")
    for at in range(0, len(data), PIECE):
        rest = memoryview(data)[at : at + PIECE]
        while rest:
            rest = rest[os.write(fd, rest) :]
        await asyncio.sleep(0)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def helper_argv(spec_fd: int, status_fd: int) -> list[str]:
    return [sys.executable, "-I", "-S", os.fspath(_HELPER), str(spec_fd), str(status_fd)]


def helper_env() -> dict[str, str]:
    """Only what our interpreter may need to start; nothing of it reaches the sandbox."""
    path = environment("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": path} if path else {}


async def _spawn(stack: ExitStack, spec: Mapping[str, Any], stdin: bytes | None, pipes: list[_Drain]) -> Any:
    out, err, status = (pipe.writer for pipe in pipes)
    spec_fd = memory_file(stack, "spec", json.dumps(dict(spec)).encode())
    try:
        stdin_fd = asyncio.subprocess.DEVNULL if stdin is None else await long_memory_file(stack, "stdin", stdin)
        return await asyncio.create_subprocess_exec(
            *helper_argv(spec_fd, status),
            stdin=stdin_fd,
            stdout=out,
            stderr=err,
            pass_fds=(spec_fd, status, *(space for space, _ in spec["spaces"] if space >= 0)),
            env=helper_env(),
            start_new_session=True,
        )
    finally:
        for fd in (out, err, status):
            os.close(fd)


def _answer(status: bytes) -> int | None:
    """The exit code the helper reported; ``None`` when it was killed before it could."""
    if not status:
        return None
    answer = json.loads(status)
    if "error" in answer:
        raise SandboxError(f"the sandbox could not be entered (has it been closed?): {answer['error']}")
    return int(answer["code"])


async def _stop(ways: Sequence[Callable[[], Awaitable[None]]], process: Any, status: _Drain) -> None:
    for way in ways:
        await way()
        if (await asyncio.wait((status.ended,), timeout=STOP_GRACE))[0]:
            return
    process.kill()


async def run(
    spec: Mapping[str, Any],
    *,
    stdin: bytes | None,
    timeout: float,  # noqa: ASYNC109 - a budget that yields a result (timed_out), not an exception
    output_limit: int,
    stop: Sequence[Callable[[], Awaitable[None]]],
) -> ExecResult:
    """Run the helper to its end. At ``timeout`` seconds it is ended by ``stop``, each harder than the one before, at
    last by killing the helper; then what was printed is returned with ``code`` None.

    Raises:
        SandboxError: when the sandbox could not be entered.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        pipes = [_drain(stack, limit) for limit in (output_limit, output_limit, 65536)]
        out, err, status = pipes
        process = await _spawn(stack, spec, stdin, pipes)
        timed_out = False
        try:
            try:
                await asyncio.wait_for(asyncio.shield(status.ended), timeout)
            except TimeoutError:
                timed_out = True
                await _stop(stop, process, status)
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()  # our own cancellation: the helper's death takes the command with it
                await asyncio.shield(process.wait())
        await asyncio.wait((out.ended, err.ended), timeout=DRAIN_GRACE)
        code = None if timed_out else _answer(status.kept)
        return ExecResult(code, out.kept, err.kept, timed_out, time.monotonic() - started)

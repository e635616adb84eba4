"""Run the ``enter`` helper: bytes in, capped bytes out, the exit told over a pipe of its own.

Output is drained for as long as the command runs and only the first ``output_limit`` bytes of each stream are kept: a
harness that prints a gigabyte neither fills our memory nor blocks.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_env.config import environment
from polar_env.errors import SandboxError
from polar_env.sandbox import ExecResult

_HELPER = Path(__file__).with_name("enter.py")
DRAIN_GRACE = 0.5
"""Seconds that output still counts after the command ended: a background child may hold the pipe for ever."""


class _Capped(asyncio.Protocol):
    """Keeps the first ``limit`` bytes of a pipe and throws the rest away."""

    def __init__(self, limit: int) -> None:
        self.kept = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit = limit

    def data_received(self, data: bytes) -> None:
        self.kept += data[: max(0, self._limit - len(self.kept))]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True)
class _Pipe:
    writer: int
    sink: _Capped
    transport: asyncio.ReadTransport


async def _pipe(stack: ExitStack, limit: int) -> _Pipe:
    """A pipe whose read end is drained by the event loop; ``stack`` closes the read end."""
    reader, writer = os.pipe()
    transport, sink = await asyncio.get_running_loop().connect_read_pipe(
        lambda: _Capped(limit), os.fdopen(reader, "rb", buffering=0)
    )
    stack.callback(transport.close)
    return _Pipe(writer, sink, transport)


def memory_file(stack: ExitStack, name: str, data: bytes) -> int:
    """A read descriptor positioned at the start of ``data``; ``stack`` closes it."""
    fd = os.memfd_create(name)
    stack.callback(os.close, fd)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def helper_argv(spec_fd: int, status_fd: int) -> list[str]:
    return [sys.executable, "-I", "-S", os.fspath(_HELPER), str(spec_fd), str(status_fd)]


def helper_env() -> dict[str, str]:
    """Only what our interpreter may need to start; nothing of it reaches the sandbox."""
    path = environment("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": path} if path else {}


async def _spawn(stack: ExitStack, spec: Mapping[str, Any], stdin: bytes | None, pipes: list[_Pipe]) -> Any:
    out, err, status = (pipe.writer for pipe in pipes)
    spec_fd = memory_file(stack, "spec", json.dumps(dict(spec)).encode())
    stdin_fd = memory_file(stack, "stdin", stdin) if stdin is not None else asyncio.subprocess.DEVNULL
    try:
        return await asyncio.create_subprocess_exec(
            *helper_argv(spec_fd, status),
            stdin=stdin_fd,
            stdout=out,
            stderr=err,
            pass_fds=(spec_fd, status, spec["pidfd"], *([spec["netns"]] if "netns" in spec else [])),
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


async def run(
    spec: Mapping[str, Any],
    *,
    stdin: bytes | None,
    timeout: float,  # noqa: ASYNC109 - a budget that yields a result (timed_out), not an exception
    output_limit: int,
    stop: Callable[[], Awaitable[None]],
) -> ExecResult:
    """Run the helper to its end. At ``timeout`` seconds ``stop`` must end what it started; then what was printed is
    returned with ``code`` None.

    Raises:
        SandboxError: when the sandbox could not be entered.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        pipes = [await _pipe(stack, limit) for limit in (output_limit, output_limit, 65536)]
        out, err, status = (pipe.sink for pipe in pipes)
        process = await _spawn(stack, spec, stdin, pipes)
        timed_out = False
        try:
            try:
                await asyncio.wait_for(asyncio.shield(status.ended), timeout)
            except TimeoutError:
                timed_out = True
                await stop()
                await asyncio.wait_for(asyncio.shield(status.ended), 10.0)
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()  # our own cancellation: the helper's death takes the command with it
        await asyncio.wait((out.ended, err.ended), timeout=DRAIN_GRACE)
        code = None if timed_out else _answer(bytes(status.kept))
        return ExecResult(code, bytes(out.kept), bytes(err.kept), timed_out, time.monotonic() - started)

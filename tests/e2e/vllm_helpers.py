"""A real vLLM on this CPU for the tests marked ``vllm``: a tiny random model with the real tokenizer, served and ended.

async with served_vllm(tmp_path) as server:
    engine = VllmEngine(EngineConfig(base_urls=(server.url,)))
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from engine_helpers import CACHE
from polar_env.config import child_environment
from polar_env.engine import tokenizer

VLLM = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin"
"""Made by ``python scripts/bootstrap.py --vllm`` (``make test-vllm`` does it)."""

START_LIMIT = 400.0
"""Seconds until the server must answer: 45 on an idle machine, several times that on a busy one."""

MODEL = "tiny"


@dataclass(frozen=True)
class VllmProcess:
    url: str
    """``http://127.0.0.1:PORT/v1``."""
    model_dir: Path
    log: Path
    pid: int
    """Leader of the session all of its processes are in."""


async def tiny_model(folder: Path, seed: int = 0, *habits: str) -> Path:
    """A model directory in ``folder``: random Qwen3 weights from ``seed``, the pinned tokenizer and template.

    ``habits`` is ``agent`` for one that calls tools by itself (tiny_model.py).
    """
    target = folder / "-".join(("tiny-qwen3", str(seed), *habits))
    words = await asyncio.to_thread(tokenizer.fetch, CACHE)
    script = Path(__file__).with_name("tiny_model.py")
    maker = await asyncio.create_subprocess_exec(
        VLLM / "python",
        script,
        words,
        target,
        str(seed),
        *habits,
        env=_environment(folder),
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await maker.communicate()
    assert maker.returncode == 0, told.decode()[-2000:]
    return target


@contextlib.asynccontextmanager
async def served_vllm(
    folder: Path, *extra: str, max_model_len: int = 32_768, habits: tuple[str, ...] = ()
) -> AsyncGenerator[VllmProcess, None]:
    """Serve a tiny model under ``folder`` as ``tiny``; ``extra`` are more arguments of ``vllm serve``."""
    model = await tiny_model(folder, 0, *habits)
    port, log = _free_port(), folder / "vllm.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            VLLM / "vllm",
            *("serve", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(max_model_len), "--enforce-eager"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--generation-config", "vllm"),
            *extra,
            env=_environment(folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = VllmProcess(f"http://127.0.0.1:{port}/v1", model, log, process.pid)
        await _until_ready(server, process)
        yield server
    finally:
        await asyncio.shield(_end(process))


def _environment(folder: Path) -> dict[str, str]:
    """Offline, no telemetry, its caches in ``folder``; the routes for weight versions need the dev mode."""
    return child_environment() | {
        "HOME": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _until_ready(server: VllmProcess, process: asyncio.subprocess.Process) -> None:
    """vLLM has no readiness signal but its health route, so it is asked."""
    async with aiohttp.ClientSession() as client, asyncio.timeout(START_LIMIT):
        while process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(server.url.removesuffix("/v1") + "/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
    raise AssertionError(f"vLLM ended with {process.returncode}:\n{server.log.read_text()[-3000:]}")


def session_members(leader: int) -> list[int]:
    """Living processes of the session that ``leader`` opened (field 6 of /proc/PID/stat); zombies are not living."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[3] == str(leader) and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask, then kill, and leave nothing: the engine core and its workers are processes of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in session_members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(15):
                await process.wait()
                await asyncio.to_thread(_outlive, process.pid, 10.0)
                return


def _outlive(leader: int, limit: float) -> None:
    """Wait for grandchildren, which are nobody's to wait for: only /proc knows when they are gone."""
    give_up = time.monotonic() + limit
    while session_members(leader):
        if time.monotonic() > give_up:
            raise TimeoutError
        time.sleep(0.1)

"""The peers of bench/proxy.py in front of the same stub: a bare aiohttp passthrough, nginx, LiteLLM and NeMo Gym.

nginx is the machine's own (``apt-get install nginx``, or ``--nginx PATH``). LiteLLM is pinned and goes into an
environment of its own, once, through the package registry. A peer that is not there is said to be missing.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
from aiohttp import web

LITELLM = "1.80.0"
"""The newest version whose proxy extra the registry here can resolve."""

START_SECONDS = 180.0
"""LiteLLM imports for half a minute on a busy machine."""

NGINX = """\
daemon off;
master_process off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_max_body_size 256m;
  client_body_buffer_size 1m;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream stub {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://stub;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.asynccontextmanager
async def running(port: int, ready: str, *command: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A server in a process group of its own, once it answers ``GET ready``."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null, start_new_session=True)
    try:
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as client:
            while not await answers(client, f"http://127.0.0.1:{port}{ready}"):
                if process.returncode is not None:
                    raise RuntimeError(f"{command[0]} ended with code {process.returncode} before it answered")
                await asyncio.sleep(0.2)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        await process.wait()


async def answers(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(url) as response:
            return response.status < 500
    except aiohttp.ClientError:
        return False


def nginx_program(given: str) -> str | None:
    return given or shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextlib.asynccontextmanager
async def nginx(program: str, engine: int) -> AsyncGenerator[tuple[int, asyncio.subprocess.Process]]:
    """(port, process) of one nginx worker that passes everything on."""
    with tempfile.TemporaryDirectory() as folder:
        port, file = free_port(), Path(folder) / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, engine=engine, port=port))
        command = (program, "-p", folder, "-c", str(file), "-e", f"{folder}/error")
        async with running(port, "/v1/models", *command) as process:
            yield port, process


async def litellm_program(store: Path) -> Path:
    """The pinned LiteLLM, installed on first use."""
    home = store / "bench" / f"litellm-{LITELLM}"
    if not (home / "ready").exists():
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "uv"
        python = str(home / "bin" / "python")
        for command in (
            (uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)),
            (uv, "pip", "install", "--quiet", "--python", python, f"litellm[proxy]=={LITELLM}"),
        ):
            process = await asyncio.create_subprocess_exec(*command)
            if await process.wait():
                raise RuntimeError(f"{' '.join(command)} failed: check that the package registry can be reached")
        (home / "ready").touch()
    return home / "bin" / "litellm"


@contextlib.asynccontextmanager
async def litellm(store: Path, engine: int) -> AsyncGenerator[tuple[int, asyncio.subprocess.Process]]:
    """(port, process) of one LiteLLM worker whose only model is the stub."""
    program = await litellm_program(store)
    model = {"model": "openai/stub", "api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "stub", "litellm_params": model}], "litellm_settings": {"telemetry": False}}
    with tempfile.TemporaryDirectory() as folder:
        port, file = free_port(), Path(folder) / "config.yaml"
        file.write_text(json.dumps(config))
        quiet = ("env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR")
        # `env` replaces itself by the program: the process is LiteLLM's own.
        command = (*quiet, str(program), "--config", str(file), "--host", "127.0.0.1", "--port", str(port))
        async with running(port, "/health/liveliness", *command, "--num_workers", "1") as process:
            yield port, process


async def passthrough(engine_url: str) -> None:
    """Reads a request, asks the engine the same, and hands its answer on as it comes. Prints its port."""
    base = engine_url.removesuffix("/v1")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with client.post(f"{base}{request.path_qs}", data=body, headers=headers) as upstream:
                response = web.StreamResponse(headers={"Content-Type": upstream.headers["Content-Type"]})
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(1024)
        runner = web.ServerRunner(web.Server(answer, access_log=None))
        await runner.setup()
        await web.SockSite(runner, sock, backlog=1024).start()
        print(sock.getsockname()[1], flush=True)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(passthrough(sys.argv[1]))

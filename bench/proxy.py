"""What the proxy costs: one stub engine, called directly and through our proxy, in one run, in turn.

The stub answers at once with real vLLM shapes (prompt ids, sampled ids, log-probs), so what is measured is everything
we do around a model: decoding, classifying, judging, the durable record, the harness's own wire API, streaming.
Stub, proxy and client are processes of their own. With ``--peer`` NeMo Gym's own model server (``vllm_model``, token
ids on) stands in front of the same stub, for its non-streaming route.

usage: python bench/proxy.py [--requests 400] [--prompt 2000] [--tokens 128] [--peer]
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from polar_env.capture import Ledger, SegmentLog
from polar_env.config import EngineConfig, ProxyConfig
from polar_env.engine import Session
from polar_env.engine.vllm import VllmEngine
from polar_env.proxy.server import ProxyServer
from polar_env.types import CallKind

LEVELS = (1, 16, 128)
"""Requests in flight."""

PEER = Path(__file__).with_name("proxy_peer.py")

STEP = 8
"""Tokens in one chunk of the stub's stream."""


def listener() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    return sock


async def until_told() -> None:
    """Serve until the parent ends us."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


# --- the stub engine --------------------------------------------------------------------------------------------


class Stub:
    """Chat completions of fixed size, prepared once."""

    def __init__(self, prompt: int, tokens: int) -> None:
        ids, usage = (
            list(range(tokens)),
            {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
        )
        head = {"id": "chatcmpl-stub", "object": "chat.completion", "created": 0, "model": "stub"}
        choice = {"index": 0, "message": {"role": "assistant", "content": "word " * tokens}, "finish_reason": "stop"}
        full = choice | {"token_ids": ids, "logprobs": _log_probs(ids)}
        prompt_ids = list(range(prompt))
        self.whole = json.dumps({**head, "choices": [full], "usage": usage, "prompt_token_ids": prompt_ids}).encode()
        chunks: list[dict[str, Any]] = [{"choices": [], "prompt_token_ids": prompt_ids}]
        for start in range(0, tokens, STEP):
            size = min(STEP, tokens - start)
            piece = {"index": 0, "delta": {"content": "word " * size}, "token_ids": ids[start : start + size]}
            last = {"finish_reason": "stop"} if start + size == tokens else {}
            chunks.append({"choices": [piece | {"logprobs": _log_probs(ids[start : start + size])} | last]})
        chunks.append({"choices": [], "usage": usage})
        self.stream = [b"data: " + json.dumps(head | chunk).encode() + b"\n\n" for chunk in chunks]
        self.stream.append(b"data: [DONE]\n\n")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.Response(body=self.whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self.stream:
            await response.write(chunk)
        return response


def _log_probs(ids: list[int]) -> dict[str, Any]:
    rest = {"logprob": -0.25, "bytes": None, "top_logprobs": []}
    return {"content": [{"token": f"token_id:{each}", **rest} for each in ids]}


async def serve_stub(prompt: int, tokens: int) -> None:
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", Stub(prompt, tokens).answer)
    app.router.add_get("/v1/models", lambda _: web.json_response({"data": [{"id": "stub", "max_model_len": 1 << 17}]}))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = listener()
    await web.SockSite(runner, sock, backlog=1024).start()
    print(sock.getsockname()[1], flush=True)
    await until_told()
    await runner.cleanup()


# --- the proxies ------------------------------------------------------------------------------------------------


async def serve_polar(engine_url: str, stream: bool) -> None:
    engine = VllmEngine(EngineConfig(base_urls=(engine_url,), stream=stream))
    config = ProxyConfig(max_calls=1_000_000, max_concurrent=1000)
    with tempfile.TemporaryDirectory() as folder:
        async with SegmentLog(Path(folder) / "log") as log, ProxyServer(engine, config) as proxy:
            sock = listener()
            session = proxy.open(
                session_id="bench",
                ledger=Ledger("bench", log),
                engine_session=Session("bench"),
                classify=lambda _, body: (CallKind.AGENT, ""),
            )
            async with proxy.listen(sock):
                print(sock.getsockname()[1], session.key, flush=True)
                await until_told()
            sealed = await session.close()
            await engine.aclose()
            assert sealed.complete, sealed.holes[:3]
            assert all(record.sampled_ids == array("i", range(len(record.sampled_ids))) for record in sealed.records)
    print(len(sealed.records), flush=True)


# --- the client -------------------------------------------------------------------------------------------------


@dataclass
class Target:
    name: str
    url: str
    process: asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def served(name: str, *command: str) -> AsyncGenerator[Target]:
    """A server in its own process, until the end of the block. Its first line is its port, and a key if it has one."""
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        port, *key = (await process.stdout.readline()).decode().split()
        prefix = f"/s/{key[0]}" if key else ""
        yield Target(name, f"http://127.0.0.1:{port}{prefix}/v1", process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def one(
    client: aiohttp.ClientSession, target: Target, text: str, number: int, stream: bool
) -> tuple[float, float]:
    """(seconds to the first byte of the body, seconds to its end)."""
    body = {"model": "stub", "stream": stream, "messages": [{"role": "user", "content": f"{number} {text}"}]}
    if target.name == "direct":  # what a proxy asks the engine for
        body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    start, first = time.perf_counter(), 0.0
    async with client.post(f"{target.url}/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            first = first or time.perf_counter()
    return first - start, time.perf_counter() - start


@dataclass
class Measured:
    rate: float
    median: float
    p99: float
    first: float
    cpu: float
    """Seconds of CPU the server process took for one request: what other load on the machine cannot change."""


def cpu_seconds(process: asyncio.subprocess.Process) -> float:
    """User and system time of a process (proc(5), stat fields 14 and 15)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(target: Target, text: str, requests: int, level: int, stream: bool) -> Measured:
    """``requests`` calls, ``level`` at a time, each with its own body."""
    numbers = iter(range(requests))
    times: list[tuple[float, float]] = []

    async def worker(client: aiohttp.ClientSession) -> None:
        for number in numbers:
            times.append(await one(client, target, text, level * 1_000_000 + number, stream))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await one(client, target, text, -level, stream)
        start, cpu = time.perf_counter(), cpu_seconds(target.process)
        async with asyncio.TaskGroup() as group:
            for _ in range(level):
                group.create_task(worker(client))
        seconds, cpu = time.perf_counter() - start, cpu_seconds(target.process) - cpu
    ends = sorted(end for _, end in times)
    first = statistics.median(begin for begin, _ in times)
    return Measured(requests / seconds, statistics.median(ends), ends[int(len(ends) * 0.99)], first, cpu / requests)


async def main(options: argparse.Namespace) -> None:
    text = "word " * options.prompt
    print(f"{options.requests} requests a row; prompt {options.prompt} ids, {options.tokens} sampled; times in ms")
    print(
        f"{'reply':8}{'at once':>8}  {'path':12}{'req/s':>9}{'median':>9}{'p99':>9}{'1st byte':>10}{'added':>9}"
        + f"{'cpu':>7}"
    )
    async with served("direct", __file__, "--role", "stub", str(options.prompt), str(options.tokens)) as direct:
        for stream in (False, True):
            async with contextlib.AsyncExitStack() as stack:
                mode = "stream" if stream else "whole"
                targets = [
                    direct,
                    await stack.enter_async_context(served("polar", __file__, "--role", "polar", direct.url, mode)),
                ]
                if options.peer and not stream:
                    targets.append(await stack.enter_async_context(served("nemo_gym", str(PEER), direct.url)))
                for level in LEVELS:
                    base = 0.0
                    for target in targets:
                        found = await measure(target, text, options.requests, level, stream)
                        base = base or found.median
                        times = (found.median, found.p99, found.first, found.median - base, found.cpu)
                        widths = (9, 9, 10, 9, 7)
                        cells = [f"{1e3 * each:{width}.1f}" for each, width in zip(times, widths, strict=True)]
                        print(f"{mode:8}{level:8}  {target.name:12}{found.rate:9.1f}", *cells, sep="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.role:
        case ["stub", prompt, tokens]:
            asyncio.run(serve_stub(int(prompt), int(tokens)))
        case ["polar", url, mode]:
            asyncio.run(serve_polar(url, mode == "stream"))
        case _:
            asyncio.run(main(arguments))

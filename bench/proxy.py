"""What the proxy costs: one stub engine, called directly and through our proxy, in one run, in turn.

The stub answers at once with real vLLM shapes (prompt ids, sampled ids, log-probs), so what is measured is everything
we do around a model: decoding, classifying, judging, the durable record, the harness's own wire API, streaming.
Stub, proxy and client are processes of their own. A bare aiohttp passthrough, nginx and LiteLLM (pinned) stand in
front of the same stub in the same run (``proxy_peers``), with ``--gym`` NeMo Gym's own model server (``vllm_model``,
token ids on) too, for its non-streaming route. At the end: the goals, and where we stand.

usage: python bench/proxy.py [--requests 400] [--tokens 128] [--size '9.5 KB'] [--nginx PATH] [--no-litellm] [--gym]
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
import proxy_peers
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
PEERS = Path(__file__).with_name("proxy_peers.py")

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
    if target.name in ("direct", "nginx", "aiohttp"):  # what a proxy asks the engine for
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


@dataclass(frozen=True)
class Goal:
    """A bar of the design, and where we stand."""

    words: str
    most: float
    """At most; negative: at least."""

    def line(self, found: float | None) -> str:
        if found is None:
            return f"goal: {self.words}: not measured, the peer is missing"
        met = found <= self.most if self.most > 0 else found >= -self.most
        return f"goal: {self.words}: {found:.1f} ({'met' if met else 'missed'})"


SIZES = {"9.5 KB": (1_900, Goal("added median at one in flight, 9.5 KB, ms, at most 4", 4.0))}
SIZES["50K tokens"] = (50_000, Goal("added median at one in flight, 50K tokens, ms, at most 12", 12.0))
PER_CORE = Goal("requests per second and core, times LiteLLM's, 9.5 KB, at least 40", -40.0)
"""Of whole answers; a streamed one's time is the engine's."""


@contextlib.asynccontextmanager
async def targets(options: argparse.Namespace, direct: Target, stream: bool) -> AsyncGenerator[list[Target]]:
    """The stub itself, we, and every peer that is there."""
    engine = int(direct.url.rpartition(":")[2].removesuffix("/v1"))
    async with contextlib.AsyncExitStack() as stack:
        mode = "stream" if stream else "whole"
        polar = await stack.enter_async_context(served("polar", __file__, "--role", "polar", direct.url, mode))
        found = [direct, polar, await stack.enter_async_context(served("aiohttp", str(PEERS), direct.url))]
        program = proxy_peers.nginx_program(options.nginx)
        if program is None:
            print("nginx     missing: apt-get install nginx, or --nginx PATH")
        else:
            port, process = await stack.enter_async_context(proxy_peers.nginx(program, engine))
            found.append(Target("nginx", f"http://127.0.0.1:{port}/v1", process))
        if options.gym and not stream:
            found.append(await stack.enter_async_context(served("nemo_gym", str(PEER), direct.url)))
        if options.litellm:
            port, process = await stack.enter_async_context(proxy_peers.litellm(options.store, engine))
            found.append(Target("litellm", f"http://127.0.0.1:{port}/v1", process))
        yield found


async def one_size(options: argparse.Namespace, size: str, stream: bool) -> dict[tuple[str, int], Measured]:
    """Every path at every level, printed; times the stub's own beside them."""
    prompt, _ = SIZES[size]
    text, found = "word " * prompt, dict[tuple[str, int], Measured]()
    async with (
        served("direct", __file__, "--role", "stub", str(prompt), str(options.tokens)) as direct,
        targets(options, direct, stream) as paths,
    ):
        for level in LEVELS:
            for target in paths:
                requests = options.requests if target.name != "litellm" else max(20, options.requests // 8)
                measured = found[target.name, level] = await measure(target, text, max(requests, level), level, stream)
                base, ours = found["direct", level], found.get(("polar", level))
                times = (measured.median, measured.p99, measured.first, measured.median - base.median, measured.cpu)
                cells = [f"{1e3 * each:{width}.1f}" for each, width in zip(times, (9, 9, 10, 9, 8), strict=True)]
                ratio = f"{ours.cpu / measured.cpu:9.2f}" if ours and measured.cpu else f"{'':9}"
                row = f"{size:11}{'stream' if stream else 'whole':7}{level:8}  {target.name:10}{measured.rate:9.1f}"
                print(row, *cells, ratio, sep="", flush=True)
    return found


async def main(options: argparse.Namespace) -> None:
    print(
        f"{options.requests} requests a row, {options.tokens} tokens sampled each; times in ms;"
        f" load of the machine {os.getloadavg()[0]:.1f}"
    )
    print(
        "polar's log is durable (one fsync per window); cpu: of the server process, a request; x cpu: polar's over it"
    )
    heads = f"{'req/s':>9}{'median':>9}{'p99':>9}{'1st byte':>10}{'added':>9}{'cpu':>8}{'x cpu':>9}"
    print(f"{'prompt':11}{'reply':7}{'at once':>8}  {'path':10}{heads}")
    goals = list[str]()
    for size, (_, goal) in SIZES.items():
        if options.size not in (None, size):
            continue
        for stream in (False, True):
            found = await one_size(options, size, stream)
            if not stream:
                goals.append(goal.line(1e3 * (found["polar", 1].median - found["direct", 1].median)))
            if not stream and size == "9.5 KB":
                peer = found.get(("litellm", 16))
                goals.append(PER_CORE.line(peer.cpu / found["polar", 16].cpu if peer else None))
    print(*goals, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--size", choices=tuple(SIZES), help="one of them; default: all")
    parser.add_argument("--nginx", default="", help="an nginx program; default: the one on PATH")
    parser.add_argument("--no-litellm", dest="litellm", action="store_false", help="without it: it takes minutes")
    parser.add_argument("--gym", action="store_true", help="NeMo Gym's own model server too")
    parser.add_argument("--store", type=Path, default=Path("~/.cache/polar_env").expanduser())
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.role:
        case ["stub", prompt, tokens]:
            asyncio.run(serve_stub(int(prompt), int(tokens)))
        case ["polar", url, mode]:
            asyncio.run(serve_polar(url, mode == "stream"))
        case _:
            asyncio.run(main(arguments))

"""Many sessions in flight in one proxy process: how late its event loop runs, what a call costs, where a core is full.

usage: python bench/in_flight.py [--sessions 64 256 1024] [--calls 20] [--think 8] [--step 8] [--burst] [--nginx PATH]

A session is a listener of its own, a durable log of its own and a client that asks, reads, "runs a tool" and asks
again with all that was said: prompts grow from 5K to 40K tokens over ``--calls`` calls, every other session streams.
The engine answers after a first token's and ``--tokens`` tokens' time, in chunks of ``--step`` tokens, with prompt ids,
sampled ids and log-probs as vLLM gives them; the prompt ids of a call begin with those of the call before, so all of it
is recorded as one chain. Engine, proxy and clients are three processes. The
same clients ask the engine directly and through nginx in the same run, one line each.

- again: calls that got an error and were asked again; what the engine's side of the proxy said is on standard error
- added: time of a call beyond what the engine plans for it: its own lag and the clients' are in it, as in ``direct``
- CPU: of the proxy process, per call; core: CPU per second of the run; full: sessions of this pace that fill a core
- lag: how late a timer of 10 ms fires in the proxy's loop; idle: the same of a process that has nothing to do
- gc: processor time of the longest collection, and of all of them together
- RSS: resident above the empty process, per session; files: most descriptors open at once
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import proxy_peers
import psutil
from aiohttp import web
from proxy import cpu_seconds, listener, until_told

from polar_env import capacity
from polar_env.capture import Ledger, SegmentLog
from polar_env.config import EngineConfig, ProxyConfig
from polar_env.engine import Session
from polar_env.engine.vllm import VllmEngine
from polar_env.errors import PolarError
from polar_env.proxy.server import ProxyServer
from polar_env.types import CallKind, Delta, EngineReply

FIRST, LAST = 5_000, 40_000
"""Tokens of the first and of the last prompt."""

CHARACTERS = 4
"""Of text for one token."""

FIRST_TOKEN, EACH_TOKEN = 0.4, 0.02
"""Seconds a busy engine takes for them."""

RETRIES = 20
"""How often a client asks again before the bench gives up."""

TICK = 0.01
HEAD = (
    f"{'path':8}{'sessions':>9}{'calls/s':>9}{'again':>6}{'added p50':>11}{'p99':>10}{'CPU':>9}{'core':>7}{'full':>7}"
    f"{'lag p50':>9}{'p99':>9}{'max':>9}{'idle p99':>10}{'max':>9}{'gc max':>9}{'all':>8}{'RSS':>9}{'files':>7}"
)
WORDS = tuple("".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz_.()", k=1 + n % 9)) for n in range(4000))


def text(seed: int, characters: int) -> str:
    """Words that compress about as source code does."""
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=characters // 5))[:characters]


@dataclass(frozen=True)
class Script:
    """What is said in every session: the same sizes, each with its own mark."""

    calls: int
    tokens: int
    """Sampled in each call."""
    step: int
    """Tokens in one chunk of a stream."""

    @property
    def seconds(self) -> float:
        """The engine's time for a call."""
        return FIRST_TOKEN + self.tokens * EACH_TOKEN

    def prompt(self, turn: int) -> int:
        """Tokens of a prompt, that of ``turn`` from 0."""
        return FIRST + (LAST - FIRST) * turn // max(1, self.calls - 1)


# --- the engine -------------------------------------------------------------------------------------------------


class Engine:
    """Chat completions of planned length and time. What all sessions share of an answer is made once."""

    def __init__(self, script: Script) -> None:
        draw = random.Random(1)
        self._script = script
        ids = [str(draw.randrange(150_000)) for _ in range(LAST + script.tokens)]
        self._ids = ",".join(ids).encode()
        self._ends = list(itertools.accumulate((len(each) + 1 for each in ids), initial=0))
        self._words = text(2, script.tokens * CHARACTERS)
        entry = b'{"token":"token_id:%b","logprob":-0.25,"bytes":null,"top_logprobs":[]}'
        self._log_probs = [entry % each.encode() for each in ids[-script.tokens :]]

    def _slice(self, first: int, last: int) -> bytes:
        """Ids ``first`` to ``last``, as JSON."""
        return self._ids[self._ends[first] : self._ends[last] - 1]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        due = time.monotonic() + FIRST_TOKEN
        turn = body.count(b'"role":"assistant"')
        mark = body[body.rfind(b"mark-") :].split(b" ", 1)[0].decode()
        stream = b'"stream":true' in body
        if not stream:
            await asyncio.sleep(due + self._script.tokens * EACH_TOKEN - time.monotonic())
            return web.Response(body=self._whole(turn, mark), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk, steps in self._chunks(turn, mark):
            await asyncio.sleep(due + steps * EACH_TOKEN - time.monotonic())
            await response.write(b"data: " + chunk + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _call(self, mark: str) -> dict[str, Any]:
        function = {"name": "bash", "arguments": json.dumps({"command": f"echo {mark}"})}
        return {"index": 0, "id": f"call-{mark}", "type": "function", "function": function}

    def _whole(self, turn: int, mark: str) -> bytes:
        message = {"role": "assistant", "content": f"{mark} {self._words}", "tool_calls": [self._call(mark)]}
        return b"".join(
            (
                b'{"id":"c","object":"chat.completion","created":0,"model":"stub","choices":[{"index":0,"message":',
                json.dumps(message).encode(),
                b',"finish_reason":"tool_calls",',
                self._sampled(turn, 0, self._script.tokens),
                b'}],"usage":',
                self._usage(turn),
                b',"prompt_token_ids":[',
                self._slice(0, self._script.prompt(turn)),
                b"]}",
            )
        )

    def _sampled(self, turn: int, first: int, last: int) -> bytes:
        prompt = self._script.prompt(turn)
        log_probs = b",".join(self._log_probs[first:last])
        return b'"token_ids":[%b],"logprobs":{"content":[%b]}' % (self._slice(prompt + first, prompt + last), log_probs)

    def _usage(self, turn: int) -> bytes:
        prompt, tokens = self._script.prompt(turn), self._script.tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return json.dumps(usage).encode()

    def _chunks(self, turn: int, mark: str) -> Iterator[tuple[bytes, int]]:
        """(data of an event, tokens sampled by then)."""
        head = b'{"id":"c","object":"chat.completion.chunk","created":0,"model":"stub",'
        yield head + b'"choices":[],"prompt_token_ids":[' + self._slice(0, self._script.prompt(turn)) + b"]}", 0
        tokens, step, said = self._script.tokens, self._script.step, f"{mark} {self._words}"
        for first in range(0, tokens, step):
            last, finish = min(first + step, tokens), b"null"
            delta: dict[str, Any] = {"content": said[len(said) * first // tokens : len(said) * last // tokens]}
            if last == tokens:
                delta, finish = delta | {"tool_calls": [self._call(mark)]}, b'"tool_calls"'
            choice = b'"choices":[{"index":0,"delta":%b,"finish_reason":%b,%b}]}'
            yield head + choice % (json.dumps(delta).encode(), finish, self._sampled(turn, first, last)), last
        yield head + b'"choices":[],"usage":' + self._usage(turn) + b"}", tokens


async def serve_engine(script: Script) -> None:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a client that leaves is no error of ours
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", Engine(script).answer)
    app.router.add_get("/v1/models", lambda _: web.json_response({"data": [{"id": "stub", "max_model_len": 1 << 17}]}))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = listener()
    await web.SockSite(runner, sock, backlog=4096).start()
    print(sock.getsockname()[1], flush=True)
    await until_told()
    await runner.cleanup()


# --- the proxy --------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """How late this process's loop runs, the processor time of its collections, both in ms, and what it holds."""

    late: list[float] = field(default_factory=list[float])
    pauses: list[float] = field(default_factory=list[float])
    files: int = 0
    _since: float = 0.0

    async def run(self) -> None:
        gc.callbacks.append(self._collected)
        process, loop = psutil.Process(), asyncio.get_running_loop()
        for count in itertools.count():
            due = loop.time() + TICK
            await asyncio.sleep(TICK)
            self.late.append(1e3 * (loop.time() - due))
            if count % 100 == 0:
                self.files = max(self.files, process.num_fds())

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._since = time.thread_time()
        else:
            self.pauses.append(1e3 * (time.thread_time() - self._since))

    def told(self) -> dict[str, float]:
        late = sorted(self.late)
        return {
            "p50": quantile(late, 0.5),
            "p99": quantile(late, 0.99),
            "max": late[-1],
            "gc": max(self.pauses, default=0.0),
            "gc_all": sum(self.pauses),
            "files": self.files,
        }


class Told(VllmEngine):
    """The engine, and the reasons of its failures."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.failures: Counter[str] = Counter()

    async def generate(self, *asked: Any) -> AsyncGenerator[Delta | EngineReply, None]:
        try:
            async with contextlib.aclosing(super().generate(*asked)) as parts:
                async for part in parts:
                    yield part
        except PolarError as error:
            self.failures[str(error)] += 1
            raise


async def serve_polar(engine_url: str, sessions: int) -> None:
    """Prints the port and key of every session; when told to stop: what ``Watch`` saw and what was recorded."""
    importlib.import_module("polar_env.gym.resources_server")  # a proxy lives in a Gym server, with all its libraries
    engine = Told(EngineConfig(base_urls=(engine_url,), splice="off"))
    watch = Watch()
    capacity.settle()
    empty = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(ProxyServer(engine, ProxyConfig()))
            stack.push_async_callback(engine.aclose)
            opened = [await opened_session(stack, proxy, Path(folder), f"s{number}") for number in range(sessions)]
            print(" ".join(f"{port}/{session.key}" for port, session in opened), flush=True)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch.run())
                await until_told()
                watching.cancel()
            rss = psutil.Process().memory_info().rss - empty
            sealed = [await session.close() for _, session in opened]
    for why, count in engine.failures.most_common(3):
        print(f"{count} times: {why}", file=sys.stderr)
    holes = [ledger.holes for ledger in sealed if not ledger.complete]
    told = watch.told() | {"rss": rss / sessions, "records": sum(len(ledger.records) for ledger in sealed)}
    chains = {record.continues for ledger in sealed for record in list(ledger.records)[1:]}
    print(json.dumps(told | {"holes": len(holes), "broken": None in chains}), flush=True)


async def opened_session(
    stack: contextlib.AsyncExitStack, proxy: ProxyServer, folder: Path, name: str
) -> tuple[int, Any]:
    """(the port of its own listener, the session), as a rollout opens it."""
    log = await stack.enter_async_context(SegmentLog(folder / name))
    session = proxy.open(
        session_id=name,
        ledger=Ledger(name, log),
        engine_session=Session(name),
        classify=lambda headers, body: (CallKind.AGENT, ""),
    )
    sock = listener()
    await stack.enter_async_context(proxy.listen(sock))
    return sock.getsockname()[1], session


# --- the clients ------------------------------------------------------------------------------------------------


class Client:
    """One harness: keeps its connection and its history, and checks that each answer is the one to its own question."""

    def __init__(self, url: str, number: int, script: Script, think: float, spread: float) -> None:
        self._url, self._number, self._script, self._think, self._spread = url, number, script, think, spread
        self._draw = random.Random(number)
        self._stream = number % 2 == 0
        self.times: list[float] = []
        self.failures: list[str] = []

    async def play(self, shared: "Shared") -> None:
        async with aiohttp.ClientSession() as http:
            history = [shared.opening]
            await asyncio.sleep(self._draw.uniform(0, self._spread))
            for turn in range(self._script.calls):
                mark = f"mark-{self._number}-{turn}"
                history.append(b'{"role":"user","content":"' + mark.encode() + b' go on"}')
                body = shared.body(history, stream=self._stream)
                answer = await self._ask(http, body)
                if f'"call-{mark}"'.encode() not in answer or (self._stream and not answer.endswith(b"[DONE]\n\n")):
                    raise RuntimeError(f"{mark} was answered {answer[:300]!r} … {answer[-300:]!r}")
                call = re.search(rb'"id":\s?"(call[^"]*)"', answer)
                assert call is not None
                history += shared.echo(turn, mark.encode(), call[1])
                await asyncio.sleep(self._draw.uniform(0.5, 1.5) * self._think)

    async def _ask(self, http: aiohttp.ClientSession, body: bytes) -> bytes:
        """The answer. Asks again, as every harness does, when there is none."""
        start = time.perf_counter()
        while True:
            try:
                async with http.post(self._url, data=body, headers={"Content-Type": "application/json"}) as response:
                    answer = await response.read()
                if response.status == 200:
                    self.times.append(time.perf_counter() - start - self._script.seconds)
                    return answer
                why = f"{response.status} {answer[:200]!r}"
            except aiohttp.ClientError as error:
                why = repr(error)
            self.failures.append(why)
            if len(self.failures) > RETRIES:
                raise RuntimeError(f"session {self._number} was refused: {self.failures}")
            await asyncio.sleep(1.0)


class Shared:
    """The parts of requests that all clients send, made once."""

    def __init__(self, script: Script, extra: dict[str, Any]) -> None:
        tools = [{"type": "function", "function": {"name": "bash", "description": text(3, 2000), "parameters": {}}}]
        self._head = json.dumps({"model": "stub", "tools": tools, **extra})[:-1].encode()
        self.opening = self._message("system", text(4, FIRST * CHARACTERS - 2000))
        spoken = script.tokens * CHARACTERS
        self._said = text(2, spoken)
        sizes = [(script.prompt(turn + 1) - script.prompt(turn)) * CHARACTERS - spoken for turn in range(script.calls)]
        self._results = [json.dumps(text(5 + turn, max(10, size))).encode() for turn, size in enumerate(sizes)]

    def _message(self, role: str, content: str) -> bytes:
        return json.dumps({"role": role, "content": content}, separators=(",", ":")).encode()

    def body(self, history: list[bytes], *, stream: bool) -> bytes:
        return (
            self._head + b',"stream":%b,"messages":[' % (b"true" if stream else b"false") + b",".join(history) + b"]}"
        )

    def echo(self, turn: int, mark: bytes, call: bytes) -> list[bytes]:
        """The model's turn as it was said, and the tool's result."""
        arguments = json.dumps(json.dumps({"command": f"echo {mark.decode()}"})).encode()
        return [
            b'{"role":"assistant","content":"%b %b","tool_calls":[{"id":"%b","type":"function","function":'
            b'{"name":"bash","arguments":%b}}]}' % (mark, self._said.encode(), call, arguments),
            b'{"role":"tool","tool_call_id":"%b","content":%b}' % (call, self._results[turn]),
        ]


async def play(urls: list[str], script: Script, think: float, spread: float) -> None:
    """All sessions to their end. Prints seconds of the run and the added times."""
    extra = {} if "/s/" in urls[0] else {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    shared = Shared(script, extra)
    clients = [Client(url, number, script, think, spread) for number, url in enumerate(urls)]
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.play(shared))
    added = sorted(1e3 * seconds for client in clients for seconds in client.times)
    wall = time.perf_counter() - started
    failed = sum(len(client.failures) for client in clients)
    told = {"p50": quantile(added, 0.5), "p99": quantile(added, 0.99), "calls": len(added), "failed": failed}
    print(json.dumps(told | {"wall": wall}))


def quantile(ordered: list[float], share: float) -> float:
    """The nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- all of it --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def started(*role: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process of this program in a role, ended with the block."""
    command = (sys.executable, __file__, "--role", *role)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 24)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def played(urls: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """What the clients of these addresses measured."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(urls, file)
        file.flush()
        async with started("clients", file.name, *sizes(options), *paces(options)) as clients:
            answer = await said(clients)
    if not answer:
        raise SystemExit("the clients failed: see above")
    return json.loads(answer)


def sizes(options: argparse.Namespace) -> tuple[str, ...]:
    return str(options.calls), str(options.tokens), str(options.step)


def paces(options: argparse.Namespace) -> tuple[str, str]:
    return str(options.think), str(0.0 if options.burst else options.think)


def line(path: str, sessions: int, found: dict[str, Any], cpu: float, seen: dict[str, Any] | None) -> str:
    share = cpu / found["wall"]
    cells = f"{path:8}{sessions:9}{found['calls'] / found['wall']:9.1f}{found['failed']:6}"
    cells += f"{found['p50']:8.0f} ms{found['p99']:7.0f} ms"
    cells += f"{1e3 * cpu / found['calls']:6.1f} ms{share:7.2f}{sessions / share:7.0f}"
    if seen is not None:
        cells += f"{seen['p50']:6.1f} ms{seen['p99']:6.0f} ms{seen['max']:6.0f} ms"
        cells += f"{seen['idle_p99']:7.0f} ms{seen['idle_max']:6.0f} ms{seen['gc']:6.0f} ms"
        cells += f"{seen['gc_all'] / 1e3:6.1f} s{seen['rss'] / 2**20:5.2f} MiB{seen['files']:7}"
    return cells


async def through_polar(base: str, sessions: int, options: argparse.Namespace) -> str:
    async with started("polar", base, str(sessions), options.loop) as proxy, asyncio.TaskGroup() as group:
        urls = [f"http://127.0.0.1:{port}/s/{key}/v1/chat/completions" for port, key in pairs(await said(proxy))]
        before, idle = cpu_seconds(proxy), Watch()
        watching = group.create_task(idle.run())
        found = await played(urls, options)
        cpu = cpu_seconds(proxy) - before
        watching.cancel()
        proxy.terminate()
        seen = json.loads(await said(proxy))
    assert seen["records"] == found["calls"] == sessions * options.calls, (seen, found)
    assert not seen["holes"], seen
    assert not seen["broken"], "a call that carries on another was not recognised"
    return line("polar", sessions, found, cpu, seen | {f"idle_{key}": value for key, value in idle.told().items()})


def pairs(words: str) -> list[tuple[str, str]]:
    return [(port, key) for port, _, key in (word.partition("/") for word in words.split())]


async def one(sessions: int, options: argparse.Namespace) -> None:
    async with started("engine", *sizes(options)) as engine:
        port = int(await said(engine))
        direct = [f"http://127.0.0.1:{port}/v1/chat/completions"] * sessions
        if options.direct:
            before = cpu_seconds(engine)
            found = await played(direct, options)
            print(line("direct", sessions, found, cpu_seconds(engine) - before, None), flush=True)
        if options.direct and (program := proxy_peers.nginx_program(options.nginx)) is not None:
            async with proxy_peers.nginx(program, port) as (front, process):
                before = cpu_seconds(process)
                found = await played([url.replace(str(port), str(front)) for url in direct], options)
                print(line("nginx", sessions, found, cpu_seconds(process) - before, None), flush=True)
        print(await through_polar(f"http://127.0.0.1:{port}/v1", sessions, options), flush=True)


async def main(options: argparse.Namespace) -> None:
    print(
        f"{options.calls} calls a session, prompts of {FIRST} to {LAST} tokens, {options.tokens} sampled in chunks of "
        f"{options.step}, {options.think:g} s between calls, loop {options.loop}; load {os.getloadavg()[0]:.1f}"
    )
    print(HEAD)
    for sessions in options.sessions:
        await one(sessions, options)


def run(work: Any, loop: str = "asyncio") -> None:
    if loop == "uvloop":
        import uvloop

        uvloop.run(work)
    else:
        asyncio.run(work)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--calls", type=int, default=20, help="of each session")
    parser.add_argument("--tokens", type=int, default=200, help="sampled in each call")
    parser.add_argument("--step", type=int, default=8, help="tokens in a chunk of the engine's stream")
    parser.add_argument("--think", type=float, default=8.0, help="seconds from an answer to the next question, mean")
    parser.add_argument("--burst", action="store_true", help="all first calls at once; default: over --think seconds")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="of the proxy; Gym's is uvloop")
    parser.add_argument("--nginx", default="", help="an nginx program; default: the one on PATH")
    parser.add_argument("--no-direct", dest="direct", action="store_false", help="without the engine itself and nginx")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.role:
        case ["engine", *numbers]:
            run(serve_engine(Script(*map(int, numbers))), "uvloop")
        case ["polar", url, count, loop]:
            run(serve_polar(url, int(count)), loop)
        case ["clients", path, calls, tokens, step, *pace]:
            script = Script(int(calls), int(tokens), int(step))
            run(play(json.loads(Path(path).read_text("utf-8")), script, *map(float, pace)), "uvloop")
        case _:
            asyncio.run(main(arguments))

"""Parts of the line on their own: the proxy for clients of one's own, one harness on any endpoint, a log read back.

Everything here returns or says lines of text; the command line prints them. A session's key and the control secret are
said once, on standard output, and are in no log.
"""

import asyncio
import re
import secrets
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from polar_env import engine as engine_room
from polar_env.capture import Ledger, SegmentLog
from polar_env.config import HarnessConfig, PolarConfig, environment
from polar_env.errors import ConfigError
from polar_env.harness import HARNESSES, Harness
from polar_env.joins import classify
from polar_env.named import harness_class, make_harness
from polar_env.proxy.control import SECRET
from polar_env.proxy.server import ProxyServer
from polar_env.proxy.session import Session, policy
from polar_env.rollout import RolloutJob, open_proxy, rollout, session_dir
from polar_env.segment_log import SessionLog, read
from polar_env.tasks import Prepared, Task
from polar_env.tasks import rows as task_rows
from polar_env.trajectory import build
from polar_env.types import Outcome, RolloutResult, SealedLedger, Trajectory
from polar_env.verdict import Verdict

HOST = "127.0.0.1"
"""Only this machine can reach a standalone proxy: its key travels in the clear."""

STOPS = (signal.SIGINT, signal.SIGTERM)

Say = Callable[[str], None]


# --- the proxy alone --------------------------------------------------------------------------------------------


async def serve(
    config: PolarConfig, names: Sequence[str], port: int, say: Say, control_port: int | None = None
) -> None:
    """Serve a session per name until SIGINT or SIGTERM, then seal them.

    Says ``session=… base_url=… key=…`` for each when they can be used, and ``session=… calls=… chains=…
    trainable_tokens=… holes=… log=…`` when they are sealed. With a ``control_port`` a trainer's orders are taken on a
    second listener: ``control=…`` says where, and ``secret=…`` unless POLAR_CONTROL_SECRET gave it.

    Raises:
        ConfigError: the names or the port cannot be had. EngineError: the engine does not pass its check.
    """
    for name in names:
        if names.count(name) > 1 or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"--session {name!r}: a name is letters, digits, _ . - and used once (it names a folder)")
    harness = make_harness(_marks(config.harness))
    sealed: list[tuple[str, SealedLedger, Outcome | None]] = []
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(_listening(port))
        door = None if control_port is None else stack.enter_context(_listening(control_port))
        proxy = await stack.enter_async_context(open_proxy(config))
        stopped = await stack.enter_async_context(_until_stopped())
        sessions: dict[str, Session] = {}
        for number, name in enumerate(names):
            sessions[name] = await stack.enter_async_context(_session(config, proxy, harness, name, number))
        await stack.enter_async_context(proxy.listen(sock))
        if door is not None:
            say(await _open_door(proxy, door, stack))
        for name, session in sessions.items():
            say(f"session={name} base_url=http://{HOST}:{sock.getsockname()[1]} key={session.key}")
        await stopped.wait()
        for name, session in sessions.items():
            sealed.append((name, await session.close(), session.outcome))
    for name, ledger, outcome in sealed:
        say(_summary(config, name, ledger, outcome))


def _marks(config: HarnessConfig) -> HarnessConfig:
    """The harness whose request marks tell calls apart; ``shell``, whose command nobody runs here, knows several."""
    return config if config.name != "shell" else config.model_copy(update={"command": ("true",)})


async def _open_door(proxy: ProxyServer, door: socket.socket, stack: AsyncExitStack) -> str:
    """Take orders on ``door`` until the stack ends; what to say of it."""
    given = environment(SECRET)
    secret = given or secrets.token_urlsafe(24)
    await stack.enter_async_context(proxy.listen_control(door, secret))
    return f"control=http://{HOST}:{door.getsockname()[1]}" + ("" if given else f" secret={secret}")


def _listening(port: int) -> socket.socket:
    """Bound before the engine is asked: a port that is taken is told at once."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"port {port} cannot be used ({error}); name another --port, or 0 for any") from error
    return sock


@asynccontextmanager
async def _until_stopped() -> AsyncGenerator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the next one is the process's own again."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()

    def release() -> None:
        for each in STOPS:
            loop.remove_signal_handler(each)

    def stop() -> None:
        release()
        stopped.set()

    for each in STOPS:
        loop.add_signal_handler(each, stop)
    try:
        yield stopped
    finally:
        release()


@asynccontextmanager
async def _session(
    config: PolarConfig, proxy: ProxyServer, harness: Harness, name: str, number: int
) -> AsyncGenerator[Session]:
    """An open session with a durable log of its own, sealed at the end."""
    session_id = f"{name}.{uuid.uuid4().hex[:12]}"
    script = config.engine.scripts[number % len(config.engine.scripts)] if config.engine.kind == "scripted" else ""
    async with SegmentLog(session_dir(config, session_id), messages=config.store.messages) as log:
        session = proxy.open(
            session_id=session_id,
            ledger=Ledger(session_id, log),
            engine_session=engine_room.Session(session_id=session_id, harness=config.harness.name, script=script),
            classify=harness.classify,
            volatile=getattr(harness, "volatile", ()),
        )
        try:
            yield session
        finally:
            await asyncio.shield(session.close())


def _summary(config: PolarConfig, name: str, ledger: SealedLedger, outcome: Outcome | None) -> str:
    trajectory = build(ledger, config.trajectory)
    trainable = sum(chain.trainable_tokens for chain in trajectory.chains)
    ending = "" if outcome is None else f" outcome={outcome.value}"
    return (
        f"session={name} calls={len(ledger.records)} chains={len(trajectory.chains)} trainable_tokens={trainable} "
        f"holes={len(ledger.holes)}{ending} log={session_dir(config, ledger.session_id)}"
    )


# --- harnesses --------------------------------------------------------------------------------------------------


def catalogue(store: Path) -> str:
    """A table of the harnesses: name, pinned version, wire API, and whether ``store`` has that version."""
    lines = [("harness", "version", "wire API", "installed")]
    for name in HARNESSES:
        made = harness_class(name)
        version = str(getattr(sys.modules[made.__module__], "VERSION", ""))
        found = bool(version) and any((store.expanduser() / "harness").glob(f"{name}-{version}*"))
        state = ("yes" if found else "no: at its first rollout") if version else "nothing to install"
        lines.append((name, version or "-", str(getattr(made, "wire", "")), state))
    return table(lines)


@dataclass(frozen=True, slots=True)
class Trial:
    """What to try a harness on: a task of ``data``, or a prompt in a copy of ``repo`` (default: an empty folder)."""

    task: str = ""
    prompt: str = ""
    repo: Path | None = None


async def try_harness(config: PolarConfig, trial: Trial, say: Say) -> int:
    """Run the configured harness once in a sandbox and say how it went; 0 when it completed, else 1.

    Raises:
        ConfigError: there is nothing to try it on. EngineError: the engine does not pass its check.
    """
    with tempfile.TemporaryDirectory(prefix="polar-try-") as empty:
        task, prepared = _subject(config, trial, Path(empty))
        async with open_proxy(config) as proxy:
            job = RolloutJob(task, config.harness, policy(config.proxy, None), prepared=prepared)
            result = await rollout(job, proxy, config)
    for line in _told(result, config):
        say(line)
    return 0 if result.outcome is Outcome.COMPLETED else 1


def _subject(config: PolarConfig, trial: Trial, empty: Path) -> tuple[Task, Prepared | None]:
    if bool(trial.task) == bool(trial.prompt):
        raise ConfigError("say what to try the harness on: either --task ID or --prompt TEXT [--repo DIR]")
    if trial.task:
        return task_rows.load(config.data, (trial.task,))[0], None
    repo = (trial.repo or empty).expanduser().resolve()
    if not repo.is_dir():
        raise ConfigError(f"--repo {repo} is no directory")
    task = Task("prompt", trial.prompt, row={})
    return task, Prepared(task, base_commit="", repo=repo, env=None, git_dir=None)


def _told(result: RolloutResult, config: PolarConfig) -> Iterator[str]:
    yield f"outcome   {result.outcome.value}{': ' if result.detail else ''}{result.detail}"
    if result.verdict is not None:
        yield f"verdict   {_verdict(result.verdict)}, reward {result.decision.reward:g}"
    yield f"seconds   {', '.join(f'{name} {value:.1f}' for name, value in result.seconds.items())}"
    yield f"log       {session_dir(config, result.ledger.session_id)}"
    yield from _captured(result.ledger, result.trajectory)
    yield ""
    yield result.patch.decode("utf-8", "replace") if result.patch else "no change in the repository"


def _verdict(verdict: Verdict) -> str:
    counts = zip(("fail-to-pass", "pass-to-pass"), (verdict.fail_to_pass, verdict.pass_to_pass), strict=True)
    return f"{verdict.status.value} ({', '.join(f'{name} {done}/{of}' for name, (done, of) in counts)})"


# --- what was captured ------------------------------------------------------------------------------------------


def describe(directory: Path, config: PolarConfig) -> tuple[str, bool]:
    """What a session's durable log holds, rebuilt from its bytes, and whether all of the file can be read.

    A log without a seal can be read: its session still runs, or its process was killed between two frames.

    Raises:
        CaptureError: there is no readable log.
    """
    log = read(directory.expanduser().resolve())
    text = "\n".join((*_captured(log.ledger, build(log.ledger, config.trajectory)), *_state(log)))
    return text.lstrip("\n"), not log.damage


def _state(log: SessionLog) -> Iterator[str]:
    """What is not as a session leaves its log when it is closed."""
    calls = f"{len(log.ledger.records)} calls can be read whole"
    if log.damage:
        yield f"damaged: {'; '.join(log.damage)}. {calls}"
    if not log.sealed:
        open_still = "its session still runs, or was never closed"
        yield f"warning: the log has no seal: {open_still}. {calls}; more may have followed"


def _captured(ledger: SealedLedger, trajectory: Trajectory) -> Iterator[str]:
    """Tables of the calls and of the chains they form, and the holes."""
    joined = classify(ledger)
    calls = [("call", "kind", "thread", "wire", "prompt", "join", "sampled", "stop", "seconds", "trained")]
    for record in ledger.records:
        calls.append(
            (
                str(record.index),
                record.kind.value,
                record.thread or "-",
                record.wire.value,
                str(len(record.prompt_ids)),
                joined.get(record.call_id, "-"),
                str(len(record.sampled_ids)),
                record.turn.stop.value,
                f"{record.ended - record.started:.1f}",
                f"no: {reason}" if (reason := trajectory.left_out.get(record.call_id)) else "yes",
            )
        )
    yield from ("", table(calls), "")
    chains = [("chain", "kind", "calls", "trainable", "tokens", "delivered")]
    for number, chain in enumerate(trajectory.chains):
        calls_of, trainable, total = str(len(chain.turns)), str(chain.trainable_tokens), str(chain.total_tokens)
        delivered = "yes" if number == trajectory.delivered else "no"
        chains.append((str(number), chain.kind.value, calls_of, trainable, total, delivered))
    yield table(chains)
    yield from (f"hole: {hole.kind.value} {hole.call_id or ''} {hole.detail}" for hole in ledger.holes)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = (zip(cells, widths, strict=True) for cells in lines)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in rows)

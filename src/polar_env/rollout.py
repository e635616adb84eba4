"""One rollout: the only composer of the rooms. Sandbox, proxy and harness are brought together here and nowhere else.

Budgets are separate (start, agent, grade, finalise; queueing is free), and finalise always runs: whatever ended the
agent, the calls captured so far are sealed, the patch is read, and nothing is left running.
"""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from polar_env import bundle
from polar_env import engine as engine_room
from polar_env.capture import Ledger, SegmentLog
from polar_env.config import HarnessConfig, PolarConfig
from polar_env.ending import Ending, outcome_of, spend
from polar_env.engine import EngineFacts
from polar_env.errors import CaptureError, GradeError, HarnessError, SandboxError, StalePolicy
from polar_env.grade import grading
from polar_env.grade import patch as patches
from polar_env.grade.prewarm import Prewarm
from polar_env.harness import HOME, MODEL_PORT, Harness, Job, Launch, Mount
from polar_env.named import make_engine, make_harness
from polar_env.proxy.server import CONNECTIONS, ProxyServer
from polar_env.proxy.session import Session
from polar_env.reward import decide
from polar_env.sandbox import Box, egress
from polar_env.sandbox.sandbox import Sandbox, end_agent, open_sandbox
from polar_env.tasks import Prepared, Task
from polar_env.tasks.prepare import prepare
from polar_env.trajectory import build
from polar_env.types import INFRASTRUCTURE, CallRecord, HarnessExit, Outcome, RolloutResult, Sampling, SealedLedger
from polar_env.verdict import Flag, Verdict

HELD_AT_MOST = 86_400.0
"""Seconds by which waiting for changes of weights may lengthen an agent's budget: the sandbox itself ends it then."""


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """One harness run on one task. ``index`` numbers the rollouts of a group from 0."""

    task: Task
    harness: HarnessConfig
    sampling: Sampling
    index: int = 0
    model: str = "policy"
    """Model name the harness is told: part of its prompt in some CLIs, so the same for a whole group."""
    prepared: Prepared | None = None
    """A repository that is no dataset's task, to try a harness on: played as it is and not graded."""


async def rollout(
    job: RolloutJob, proxy: ProxyServer, config: PolarConfig, opened: Callable[[Session], None] = lambda _: None
) -> RolloutResult:
    """Run one rollout to its end. Never raises for what a rollout can meet: the outcome says it.

    ``opened`` is given its session, to ``stop`` it from outside.

    Raises:
        ConfigError: the harness cannot be made; nothing was started.
        CaptureError: the session's log cannot be opened; nothing was started.
        asyncio.CancelledError: when the caller cancels; everything is torn down first.
    """
    async with Prewarm(config.sandbox) as warm:
        return await _rollout(job, proxy, config, opened, Ending(warm))


async def _rollout(
    job: RolloutJob, proxy: ProxyServer, config: PolarConfig, opened: Callable[[Session], None], ending: Ending
) -> RolloutResult:
    harness = make_harness(job.harness)
    name = re.sub(r"[^\w.-]", "_", job.task.task_id)  # it names a folder
    session_id = f"{name}.{job.index}.{uuid.uuid4().hex[:12]}"
    async with SegmentLog(session_dir(config, session_id), messages=config.store.messages) as log:
        session = _open_session(job, harness, proxy, config, Ledger(session_id, log))
        try:
            opened(session)
            await _live(job, harness, session, proxy, config, ending)
        finally:
            sealed = await asyncio.shield(session.close())
    ending.seconds |= {"held": session.hold.seconds} if session.hold.seconds else {}
    ended, detail = outcome_of(ending, session, sealed, harness)
    failed = ended in INFRASTRUCTURE
    _judge_age(ending, sealed, proxy, config, failed)
    ungraded = failed or job.prepared is not None or isinstance(ending.error, StalePolicy)
    verdict = None if ungraded else ending.verdict or await _grade(ending, config)
    _judge_age(ending, sealed, proxy, config, failed)  # grading takes minutes: weights may have changed again
    if verdict is not None and ending.egress is not None and ending.egress.packets:
        verdict = verdict.flagged(Flag.EGRESS)
    late = ending.error  # also one that came with the grading
    outcome, detail = (ended, detail) if late is None else (late.outcome, str(late))
    decision = decide(outcome, verdict, sealed.complete, config.reward)
    result = RolloutResult(
        task_id=job.task.task_id,
        harness=harness.name,
        outcome=outcome,
        detail=detail,
        verdict=verdict,
        decision=decision,
        trajectory=await asyncio.to_thread(build, sealed, config.trajectory),  # unpacks all ids: 20 ms and more
        ledger=sealed,
        patch=ending.patch,
        exit=ending.exit,
        seconds=ending.seconds,
        ages={name: proxy.fence.versions.age(name) for name in _versions(sealed.records)},
        stale=ending.stale,
        ended=ended,
        egress=ending.egress,
    )
    if outcome is not Outcome.COMPLETED:
        with suppress(CaptureError):  # a full disk must not cost the result as well
            await asyncio.to_thread(bundle.keep, session_dir(config, session_id), result, session.key)
    return result


def _judge_age(ending: Ending, sealed: SealedLedger, proxy: ProxyServer, config: PolarConfig, failed: bool) -> None:
    """Note whether what may train is over ``engine.max_policy_age``; then it is masked, unless it ``failed`` anyway."""
    kept = sealed.delivered - sealed.superseded
    trained = (r for r in sealed.records if r.kind in config.trajectory.trained_kinds and r.call_id in kept)
    stale = proxy.fence.stale(_versions(trained))
    ending.stale = str(stale or "")
    if stale is not None and not failed and config.engine.stale_rollouts != "report":
        ending.error = stale


def _versions(records: Iterable[CallRecord]) -> list[str]:
    """The policy versions that sampled, each by itself, in order."""
    return list(dict.fromkeys(name for record in records for name in record.policy_version.split("+")))


def session_dir(config: PolarConfig, session_id: str) -> Path:
    """Where a session's durable log is kept."""
    return config.store.sessions.expanduser() / session_id


def _open_session(
    job: RolloutJob, harness: Harness, proxy: ProxyServer, config: PolarConfig, ledger: Ledger
) -> Session:
    scripts = config.engine.scripts
    who = engine_room.Session(
        session_id=ledger.session_id,
        harness=harness.name,
        task_id=job.task.task_id,
        script=scripts[job.index % len(scripts)] if config.engine.kind == "scripted" else "",
        gold_patch=str(job.task.row.get("patch", "")) if config.engine.kind == "scripted" else "",
    )
    return proxy.open(
        session_id=ledger.session_id,
        ledger=ledger,
        engine_session=who,
        classify=harness.classify,
        sampling=job.sampling,
        max_turns=None if getattr(harness, "enforces_turns", False) else job.harness.max_turns,
        volatile=getattr(harness, "volatile", ()),
    )


async def _live(
    job: RolloutJob, harness: Harness, session: Session, proxy: ProxyServer, config: PolarConfig, ending: Ending
) -> None:
    """Start, play, finalise. Errors of each phase are kept in ``ending``."""
    async with AsyncExitStack() as stack:
        with ending.phase("start"):
            async with spend(config.budget.start, SandboxError, "starting the rollout"):
                ending.sandbox = await _start(job, harness, proxy, config, ending, stack)
        sandbox, prepared = ending.sandbox, ending.prepared
        if sandbox is None or prepared is None:
            return
        if job.prepared is None:
            ending.warm.begin(prepared)
        try:
            with ending.phase("agent"):
                ending.exit = await _play(job, harness, session, sandbox, config, prepared)
        finally:
            with ending.phase("finalise"):
                await _finalise(session, sandbox, config, ending)
        ours = isinstance(ending.error, SandboxError) or session.outcome in INFRASTRUCTURE
        if job.prepared is None and grading.grades_left(prepared) and not ours:
            ending.verdict = await _grade(ending, config, sandbox)


async def _start(
    job: RolloutJob, harness: Harness, proxy: ProxyServer, config: PolarConfig, ending: Ending, stack: AsyncExitStack
) -> Sandbox:
    """CLI installed, task prepared, sandbox up, and the model reachable from inside it and from nowhere else."""
    store = config.store.cache.expanduser()
    grading.grader_of(job.task.grader)  # one that is not there must not cost a rollout first
    mounts = await _install(harness, store)
    ending.prepared = job.prepared or await prepare(job.task, store, sandbox=config.sandbox)
    sandbox = await stack.enter_async_context(open_sandbox(_box(ending.prepared, mounts, config), config.sandbox))
    if ending.prepared.by_snapshot:  # in the image: what it looks like now is what a patch is against
        ending.baseline = await patches.snapshot(sandbox, ending.prepared.workdir, ending.prepared.hide)
    await stack.enter_async_context(proxy.listen(sandbox.listener(MODEL_PORT), CONNECTIONS))
    with suppress(SandboxError):  # a kernel that shows no packets: the row says that nobody watched
        if watched := sandbox.watch():
            ending.watched = stack.enter_context(watched)
    return sandbox


async def _install(harness: Harness, store: Path) -> tuple[Mount, ...]:
    """Install the CLI. A CLI that cannot be installed is our infrastructure's failure, not the agent's."""
    try:
        return await harness.install(store)
    except HarnessError as error:
        raise SandboxError(f"the harness could not be installed: {error}") from error


def _box(prepared: Prepared, mounts: tuple[Mount, ...], config: PolarConfig) -> Box:
    """The sandbox the patch will be graded in, with the CLI and a home added."""
    graded = grading.box_of(prepared, config.sandbox)
    shown = tuple((mount.source, mount.target) for mount in mounts)
    return replace(graded, read_only=(*graded.read_only, *shown), env={**graded.env, "HOME": HOME})


async def _play(
    job: RolloutJob, harness: Harness, session: Session, sandbox: Sandbox, config: PolarConfig, prepared: Prepared
) -> HarnessExit:
    """Run the harness until it exits, its budget is spent, or the session ended under it."""
    launch = harness.launch(_job(job, session, config, prepared))
    budget = min(config.budget.agent, prepared.patience)
    for path, data in launch.files.items():
        await sandbox.write(path, data)
    started, spent = time.monotonic(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_kill_when_ended(session, sandbox))
        deadline = group.create_task(_kill_when_spent(session, sandbox, budget, spent))
        result = await _exec(launch, sandbox, budget + HELD_AT_MOST)
        watching.cancel()
        deadline.cancel()
    timed_out = result.timed_out or (spent.is_set() and result.code != 0)
    stopped = timed_out or (session.outcome is not None and result.code != 0)
    seconds = time.monotonic() - started
    return replace(result, code=None if stopped else result.code, timed_out=timed_out, seconds=seconds)


def _job(job: RolloutJob, session: Session, config: PolarConfig, prepared: Prepared) -> Job:
    return Job(
        instruction=job.task.instruction,
        model=job.model,
        base_url=f"http://127.0.0.1:{MODEL_PORT}",
        key=session.key,
        workdir=prepared.workdir,
        context_window=job.harness.context_window,
        max_output_tokens=job.sampling.max_tokens or config.proxy.max_output_tokens,
        max_turns=job.harness.max_turns,
    )


async def _exec(launch: Launch, sandbox: Sandbox, timeout: float) -> HarnessExit:  # noqa: ASYNC109 - enforced by the sandbox
    result = await sandbox.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout=timeout)
    return HarnessExit(
        code=result.code,
        stdout=result.stdout.decode("utf-8", "replace"),
        stderr=result.stderr.decode("utf-8", "replace"),
        timed_out=result.timed_out,
        seconds=result.seconds,
        out_of_memory=result.out_of_memory,
    )


async def _kill_when_ended(session: Session, sandbox: Sandbox) -> None:
    """Kill the harness when its session is over (call limit, dead engine): it would only retry for minutes."""
    await session.ended.wait()
    await sandbox.kill()


async def _kill_when_spent(session: Session, sandbox: Sandbox, budget: float, spent: asyncio.Event) -> None:
    """Kill the harness when its budget is spent; the time its calls were held for a change of weights is not in it."""
    granted = 0.0
    await asyncio.sleep(budget)
    while more := session.hold.owed(granted):
        granted += more
        await asyncio.sleep(more)
    spent.set()
    await sandbox.kill()


async def _finalise(session: Session, sandbox: Sandbox, config: PolarConfig, ending: Ending) -> None:
    """Nothing may reach the policy after this (a colocated engine sleeps then): harness dead, session sealed."""
    async with spend(config.budget.finalise, SandboxError, "finalising the rollout"):
        await end_agent(sandbox)
        if ending.watched is not None:
            ending.egress = egress.read(ending.watched)
        await session.close()
        if ending.prepared is not None and (ending.prepared.repo is not None or ending.baseline is not None):
            ending.patch = await patches.extract(sandbox, ending.prepared, ending.baseline)


async def _grade(ending: Ending, config: PolarConfig, left: Sandbox | None = None) -> Verdict | None:
    """Grade the patch, or what is ``left``, inside the grade budget. A grader's failure is kept, never a verdict."""
    prepared, budget = ending.prepared, config.budget
    if prepared is None:
        return None
    with ending.phase("grade"):
        async with spend(budget.grade + budget.finalise, GradeError, "grading"):
            return await grading.grade(prepared, ending.patch, left, sandbox=config.sandbox, timeout=budget.grade)
    return None


@asynccontextmanager
async def open_proxy(config: PolarConfig) -> AsyncGenerator[ProxyServer]:
    """Engine and proxy for many rollouts, checked before the first one starts."""
    engine = make_engine(config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.aclose)
        await engine.check()
        yield await stack.enter_async_context(ProxyServer(engine, config.proxy, updates=config.engine))


async def check(config: PolarConfig) -> EngineFacts:
    """Prove the configured engine with one tiny generation. Raises EngineError with the reason."""
    engine = make_engine(config)
    try:
        return await engine.check()
    finally:
        await engine.aclose()

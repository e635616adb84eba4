"""How a rollout ends: what is known of it so far, and the one word that names it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import socket
from typing import cast

from polar_env.errors import CaptureError, PolarError
from polar_env.grade.prewarm import Prewarm
from polar_env.harness import Harness
from polar_env.proxy.session import Session
from polar_env.sandbox.sandbox import Sandbox
from polar_env.tasks import Prepared
from polar_env.types import Egress, HarnessExit, Outcome, SealedLedger
from polar_env.verdict import Verdict


@dataclass(slots=True)
class Ending:
    """What is known of a rollout so far; filled in as phases end, read once at the end."""

    warm: Prewarm
    exit: HarnessExit | None = None
    patch: bytes = b""
    prepared: Prepared | None = None
    sandbox: Sandbox | None = None
    baseline: bytes | None = None
    error: PolarError | None = None
    verdict: Verdict | None = None
    watched: socket | None = None
    egress: Egress | None = None
    stale: str = ""
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def phase(self, name: str) -> "_Phase":
        return _Phase(self, name)


class _Phase:
    """Times a phase and keeps the first real error, which outranks everything that follows."""

    def __init__(self, ending: Ending, name: str) -> None:
        self._ending, self._name = ending, name

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        seconds = self._ending.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + time.monotonic() - self._started
        failure = _failure(error)
        if failure is None:
            return False
        self._ending.error = self._ending.error or failure
        return True


def _failure(error: BaseException | None) -> PolarError | None:
    """The failure itself: a task group wraps what its body and its tasks raise. ``None`` when a bug is among it."""
    if isinstance(error, ExceptionGroup):
        ours, bugs = cast("ExceptionGroup[Exception]", error).split(PolarError)
        return None if ours is None or bugs is not None else _failure(ours.exceptions[0])
    return error if isinstance(error, PolarError) else None


@asynccontextmanager
async def spend(seconds: float, error: type[PolarError], doing: str) -> AsyncGenerator[None]:
    """Run a phase inside its budget. Raises ``error`` naming the budget when it is spent."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as spent:
        raise error(
            f"{doing} took longer than its budget of {seconds:g} s; raise budget in the configuration"
        ) from spent


def outcome_of(ending: Ending, session: Session, sealed: SealedLedger, harness: Harness) -> tuple[Outcome, str]:
    """The one place that names the ending. The first real error outranks the harness's own word."""
    if ending.error is not None:
        return ending.error.outcome, str(ending.error)
    if session.outcome is not None:
        return session.outcome, str(session.first_error or session.outcome.value)
    if ending.exit is None:
        return Outcome.SANDBOX_ERROR, "the harness was never started"
    report = harness.read(ending.exit)
    if not sealed.records:
        if session.first_error is not None:
            return session.first_error.outcome, str(session.first_error)
        return Outcome.NO_CALLS, f"the harness made no model call ({_tail(ending.exit)})"
    if report.outcome is Outcome.AGENT_ERROR and session.first_error is not None:
        return session.first_error.outcome, str(session.first_error)
    if not sealed.complete:
        return CaptureError.outcome, "; ".join(f"{hole.kind.value}: {hole.detail}" for hole in sealed.holes[:3])
    if report.outcome is Outcome.AGENT_ERROR and session.refused is not None:
        return report.outcome, f"{report.detail}; requests refused: {session.usage.refused}, first: {session.refused}"
    starved = ending.exit.out_of_memory and report.outcome is not Outcome.COMPLETED
    detail = f"out of memory (sandbox.memory_mib): {report.detail}" if starved else report.detail
    return report.outcome, detail


def _tail(exit: HarnessExit, size: int = 400) -> str:
    text = (exit.stderr or exit.stdout).strip()
    return f"exit {exit.code}: …{text[-size:]}" if text else f"exit {exit.code}, nothing printed"

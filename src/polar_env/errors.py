"""Failures, named by the boundary they crossed.

The first real error of a rollout is kept and outranks the harness's exit code. Each class maps onto one outcome, so
nobody compares strings to learn what happened.
"""

from collections.abc import Generator
from contextlib import contextmanager

from polar_env.types import Outcome


class PolarError(Exception):
    """Base of every failure polar_env raises on purpose. The message says what to do."""

    outcome: Outcome = Outcome.SANDBOX_ERROR


class ConfigError(PolarError):
    """The configuration or a dataset row cannot be used as given."""


class SandboxError(PolarError):
    """The sandbox could not be made, entered or read."""

    outcome = Outcome.SANDBOX_ERROR


class HarnessError(PolarError):
    """The harness could not be installed or launched, or reported its own failure."""

    outcome = Outcome.AGENT_ERROR


class EngineError(PolarError):
    """The model engine is down, answered nonsense, or died mid-stream."""

    outcome = Outcome.ENGINE_ERROR


class EngineOverflow(EngineError):  # noqa: N818 - an overflow is the name the field uses
    """The prompt does not fit the engine's context window: becomes the dialect's own overflow error."""

    outcome = Outcome.CONTEXT_OVERFLOW


class EngineBusy(EngineError):  # noqa: N818 - a 429/503 of the engine: retryable by the harness
    """The engine asked us to come back later. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineRefused(EngineError):  # noqa: N818 - the engine is well, and will not sample this request
    """The engine answered that the request itself cannot be sampled: a tool schema it does not take, an image a text
    model cannot see. The harness gets a 400 with the message, which is the engine's own words and must name no host.

    Never a dead engine. Its outcome ends a session only when no turn of the agent was ever sampled in it
    (``proxy.session``): nothing the policy did can have led there.
    """

    outcome = Outcome.REQUEST_REFUSED


class CaptureError(PolarError):
    """A model call could not be recorded."""

    outcome = Outcome.CAPTURE_INCOMPLETE


class GradeError(PolarError):
    """The grader itself failed; says nothing about the patch."""

    outcome = Outcome.GRADE_ERROR


class Stopped(PolarError):  # noqa: N818 - nothing failed: somebody ended it
    """The rollout was ended from outside, and nothing more is sampled for it."""

    outcome = Outcome.CANCELLED


class StalePolicy(Stopped):
    """Tokens of the rollout are of weights that were replaced too many updates ago."""

    outcome = Outcome.STALE_POLICY


class Straggler(Stopped):
    """Most of the rollout's group had finished, and the time the rest was given is over."""

    outcome = Outcome.STRAGGLER


class GroupTimeout(Straggler):
    """The same, where what stands then is graded."""

    outcome = Outcome.GROUP_TIMEOUT


class BadRequest(PolarError):  # noqa: N818 - the wire's own name for it
    """A harness sent something whose meaning we cannot keep (n > 1, not JSON): HTTP 400 in the dialect's shape."""


@contextmanager
def boundary(kind: type[PolarError], doing: str) -> Generator[None]:
    """Name foreign failures (OSError, timeouts, ValueError) by the boundary they crossed.

    Args:
        kind: the error class of this boundary.
        doing: what was being done, present participle ("starting the sandbox").

    Raises:
        kind: with ``doing`` and the cause, when anything but a PolarError was raised.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise kind(f"{doing}: {type(error).__name__}: {error}") from error

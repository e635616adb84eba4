"""Failures are named by the boundary they crossed, and each name says how the rollout ended."""

import pytest

from polar_env import errors
from polar_env.errors import EngineBusy, EngineError, EngineOverflow, GradeError, PolarError, SandboxError, boundary
from polar_env.types import INFRASTRUCTURE, Outcome

EVERY = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PolarError)]


@pytest.mark.parametrize(
    "cause", [OSError("gone"), TimeoutError("late"), ValueError("odd"), KeyError("key"), RuntimeError("?")]
)
def test_a_foreign_failure_takes_the_name_of_the_boundary(cause: Exception) -> None:
    with (
        pytest.raises(SandboxError, match="starting the sandbox") as caught,
        boundary(SandboxError, "starting the sandbox"),
    ):
        raise cause
    assert caught.value.__cause__ is cause
    assert type(cause).__name__ in str(caught.value)


def test_the_first_name_is_kept_when_boundaries_nest() -> None:
    outer, inner = boundary(SandboxError, "running the harness"), boundary(EngineError, "asking the model")
    with pytest.raises(EngineError, match="model died") as caught, outer, inner:
        raise OSError("model died")
    assert type(caught.value) is EngineError


@pytest.mark.parametrize("bug", [AssertionError("broken"), ZeroDivisionError(), NotImplementedError()])
def test_what_a_boundary_lets_through(bug: Exception) -> None:
    """Our own broken invariants stay what they are; NotImplementedError is a RuntimeError and is named."""
    expected = SandboxError if isinstance(bug, RuntimeError) else type(bug)
    with pytest.raises(expected), boundary(SandboxError, "thinking"):
        raise bug


def test_an_interrupt_is_never_renamed() -> None:
    with pytest.raises(KeyboardInterrupt), boundary(SandboxError, "waiting"):
        raise KeyboardInterrupt


def test_nothing_raised_is_nothing_changed() -> None:
    with boundary(GradeError, "grading"):
        value = 1
    assert value == 1


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_every_failure_has_an_outcome_and_a_docstring(kind: type[PolarError]) -> None:
    assert isinstance(kind.outcome, Outcome)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "infrastructure"),
    [
        (SandboxError, True),
        (EngineError, True),
        (GradeError, True),
        (errors.CaptureError, True),
        (errors.HarnessError, False),
    ],
)
def test_only_the_harness_own_failures_can_train(kind: type[PolarError], infrastructure: bool) -> None:
    assert (kind.outcome in INFRASTRUCTURE) is infrastructure


def test_an_overflow_is_an_engine_error_with_its_own_ending() -> None:
    assert issubclass(EngineOverflow, EngineError)
    assert EngineOverflow.outcome is Outcome.CONTEXT_OVERFLOW
    assert EngineOverflow.outcome not in INFRASTRUCTURE


def test_a_busy_engine_says_when_to_come_back() -> None:
    assert EngineBusy("full", retry_after=7.5).retry_after == 7.5
    assert EngineBusy("full").retry_after > 0

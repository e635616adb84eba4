"""What a grading found: the verdict, and what it noticed on the way."""

from dataclasses import dataclass, replace
from enum import StrEnum

GRAIN = 256
"""Rewards are multiples of 1/GRAIN: exact in binary, and so are their squares and the sums of both over a group of up
to 256 in single precision. Of equal rewards of any other kind a trainer's mean and spread may be off by a last bit, and
the advantages in the thousands (NeMo-RL, ``calculate_baseline_and_std_per_prompt``)."""


class VerdictStatus(StrEnum):
    """What the grader found. Only ``ERROR`` is infrastructure; the rest are facts about the patch."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    PATCH_FAILED = "patch_failed"
    TESTS_TIMED_OUT = "tests_timed_out"
    REFUSED = "refused"
    ERROR = "error"


class Flag(StrEnum):
    """What a grading noticed about a patch besides its verdict; ``reward.FLAGS`` says what each is worth."""

    TEST_HOOKS = "test_hooks"
    """It brings files that change what a test run means (conftest.py, .pth, a module named pytest, …)."""
    GIT_FILES = "git_files"
    """It writes into git's own directory, or its attributes."""
    OUTSIDE = "outside"
    """It names, or links to, something outside the repository."""
    OVERSIZED = "oversized"
    LOG_MARKERS = "log_markers"
    """It holds or prints SWE-bench's log markers."""
    TESTS_EDITED = "tests_edited"
    """It changes files the hidden tests bring or may use; those parts were left out."""
    BUILD_FILES = "build_files"
    """It changes what installing the project runs or reads."""
    NESTED_REPOSITORY = "nested_repository"
    """It holds a gitlink; that part was left out."""
    ENVIRONMENT = "environment"
    """Installing it changed the environment as the right fix does not: plugins, programs, start-up files."""
    LEFT_RUNNING = "left_running"
    """Installing it left processes behind; they were killed before the tests."""
    PLANTED = "planted"
    """It left files where the verifier's own are put (a task folder's /tests and /logs/verifier); they were removed."""
    CONFLICTING = "conflicting_statuses"
    """The log gives one test two results."""
    FORCED_PASS = "forced_pass"
    """A test rewritten to fail did not, or one that must pass did not."""
    UNSTABLE = "unstable"
    """The tests that passed did not pass again."""
    UNPROVEN = "unproven"
    """Resolved, but no test could be rewritten to prove that passing means anything."""
    EGRESS = "egress"
    """The agent's sandbox sent something to others than its model (``polar.egress``); it was refused."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grader's finding. Counts are (passed, total) of the instance's FAIL_TO_PASS and PASS_TO_PASS lists."""

    status: VerdictStatus
    fail_to_pass: tuple[int, int] = (0, 0)
    pass_to_pass: tuple[int, int] = (0, 0)
    detail: str = ""
    seconds: float = 0.0
    flags: tuple[Flag, ...] = ()
    """Sorted, each once."""
    official: bool = False
    """The official report called it resolved, whatever else was found."""
    score: float | None = None
    """In [0, 1]: what a grader gave that knows more than yes and no. It is the reward of a patch that was graded
    (resolved or unresolved), rounded to ``GRAIN``; ``None``: the status alone decides."""

    def flagged(self, flag: Flag) -> "Verdict":
        return replace(self, flags=tuple(sorted({*self.flags, flag})))

"""Who grades a task, and what a grader may answer."""

import math
from dataclasses import replace
from typing import Any

import pytest

from grader_helpers import Answers, CountsLines
from polar_env.config import RewardConfig
from polar_env.errors import ConfigError, GradeError, SandboxError
from polar_env.grade import GRADERS
from polar_env.grade.grading import grade, grader_of, prewarm
from polar_env.reward import decide
from polar_env.tasks import Prepared
from polar_env.tasks.rows import task_of
from polar_env.types import Outcome, RewardDecision
from polar_env.verdict import Verdict, VerdictStatus
from sandbox_helpers import config, git_repo, prepared_of


def own(name: str, **fields: Any) -> dict[str, Any]:
    row = {"instance_id": "own-1", "problem_statement": "Write a poem.", "base_commit": "x" * 40}
    source = {"kind": "git", "mirror": "/somewhere"}
    return row | {"polar_grader": f"grader_helpers:{name}", "polar_source": source} | fields


@pytest.fixture(scope="module")
def poem(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    repo = git_repo(tmp_path_factory.mktemp("poem") / "repo", {"poem.txt": b"one\n"}, {})
    return replace(prepared_of(repo), task=task_of(own("CountsLines")))


def to(prepared: Prepared, grader: str) -> Prepared:
    return replace(prepared, task=replace(prepared.task, grader=grader))


async def graded(prepared: Prepared, patch: bytes = b"") -> Verdict:
    return await grade(prepared, patch, sandbox=config(), timeout=30)


def adding(lines: int) -> bytes:
    body = "".join(f"+line {number}\n" for number in range(lines))
    return f"--- a/poem.txt\n+++ b/poem.txt\n@@ -1 +1,{1 + lines} @@\n one\n{body}".encode()


# --- a grader of the user's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "score"), [(1, 0.5), (2, 0.75), (3, 1.0)])
async def test_a_users_own_grader_runs_in_a_sandbox_of_its_own_and_gives_a_part(
    poem: Prepared, lines: int, score: float
) -> None:
    found = await graded(poem, adding(lines))
    assert found.score == score
    assert found.status is (VerdictStatus.RESOLVED if score == 1.0 else VerdictStatus.UNRESOLVED)
    assert decide(Outcome.COMPLETED, found, True, RewardConfig()) == RewardDecision(score, False)


async def test_a_grader_that_can_be_warmed_is_and_one_that_cannot_is_left_alone(poem: Prepared) -> None:
    await prewarm(poem, sandbox=config())
    assert CountsLines.warmed == ["own-1"]
    await prewarm(to(poem, "grader_helpers:Answers"), sandbox=config())


@pytest.mark.parametrize(
    "answer", [math.nan, math.inf, -0.1, 1.5, True, "1", None, Verdict(VerdictStatus.RESOLVED, score=7.0)]
)
async def test_what_is_no_reward_is_an_error_and_never_one(
    poem: Prepared, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    with pytest.raises(GradeError, match=r"grader grader_helpers:Answers gave .*; a reward is a number in \[0, 1\]"):
        await graded(to(poem, "grader_helpers:Answers"))


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), SandboxError("no disk"), ExceptionGroup("two", [OSError()])]
)
async def test_a_grader_that_breaks_masks_and_says_how(
    poem: Prepared, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "answer", error)
    with pytest.raises(GradeError, match="grader grader_helpers:Answers") as caught:
        await graded(to(poem, "grader_helpers:Answers"))
    assert caught.value.outcome is Outcome.GRADE_ERROR


async def test_a_verdict_of_its_own_is_passed_on_as_it_is(poem: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verdict(VerdictStatus.TESTS_TIMED_OUT, detail="too slow")
    monkeypatch.setattr(Answers, "answer", verdict)
    assert await graded(to(poem, "grader_helpers:Answers")) is verdict


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("swebbench", "unknown grader 'swebbench'; known: swebench"),
        ("no_such_module:Grader", "cannot be had: ModuleNotFoundError"),
        ("grader_helpers:NoSuchGrader", "cannot be had: AttributeError"),
        ("grader_helpers:WantsMore", "cannot be had: TypeError"),
    ],
)
def test_a_grader_that_is_not_there_is_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grader_of(name)


@pytest.mark.parametrize("name", sorted(GRADERS))
def test_every_grader_of_ours_is_there(name: str) -> None:
    assert callable(grader_of(name).grade)


# --- rows -------------------------------------------------------------------------------------------------------


def test_a_row_names_its_grader() -> None:
    task = task_of(own("CountsLines"))
    assert (task.grader, task.task_id) == ("grader_helpers:CountsLines", "own-1")
    assert "<issue>\nWrite a poem.\n</issue>" in task.instruction


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"polar_source": None}, "field 'polar_source' is missing"),
        ({"problem_statement": " "}, "field 'problem_statement' must be a non-empty text"),
        ({"base_commit": 7}, "field 'base_commit' must be a non-empty text, not 7"),
        ({"polar_grader": "exam"}, "field 'polar_grader' must be one of swebench"),
        ({"polar_grader": ["a"]}, "field 'polar_grader' must be one of swebench"),
    ],
)
def test_a_row_whose_grader_cannot_work_with_it_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(own("CountsLines", **fields), "mine.jsonl line 3")
    assert str(caught.value).startswith("mine.jsonl line 3 (own-1): ")
    assert words in str(caught.value)

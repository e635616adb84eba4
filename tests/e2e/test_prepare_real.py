"""Tasks made from the real registry, and judged by the official report: the fix resolves them, nothing else does."""

import os
from pathlib import Path

import pytest

from polar_env.config import SandboxConfig
from polar_env.tasks import Prepared, Task
from polar_env.tasks.prepare import prepare
from polar_env.tasks.rows import load
from tasks_helpers import evaluate, official_report, passed, spent, swebench_data

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REQUESTS = "psf__requests-6028"
REQUESTS_COMMIT = "9a6bd509a74dc360a034eff2e18e483839d81012"
"""The id that an independent script made of the same sdist on another day."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for this module; POLAR_TEST_STORE keeps one between runs."""
    kept = os.environ.get("POLAR_TEST_STORE")
    return Path(kept) if kept else tmp_path_factory.mktemp("store")


async def prepared(task: Task, store: Path) -> Prepared:
    return await prepare(task, store, sandbox=SandboxConfig())


async def judged(task: Prepared, patch: str, scratch: Path) -> tuple[bool, tuple[int, int], tuple[int, int]]:
    """(resolved, FAIL_TO_PASS, PASS_TO_PASS) of a patch, by the official report on a real run."""
    log = await evaluate(task, patch)
    report = official_report(task, patch or "(none)", log.stdout, scratch)
    return report["resolved"], passed(report, "FAIL_TO_PASS"), passed(report, "PASS_TO_PASS")


async def gold_resolves_and_nothing_does_not(task: Prepared, scratch: Path) -> None:
    row = task.task.row
    to_fix, to_keep = len(row["FAIL_TO_PASS"]), len(row["PASS_TO_PASS"])
    assert await judged(task, str(row["patch"]), scratch) == (True, (to_fix, to_fix), (to_keep, to_keep))
    assert await judged(task, "", scratch) == (False, (0, to_fix), (to_keep, to_keep))


def first_hunks(patch: str) -> str:
    """The part of a patch that touches its first file: what an agent that stops half way leaves."""
    return "diff --git" + patch.split("diff --git")[1]


@pytest.mark.parametrize("task", load("embedded"), ids=lambda task: task.task_id)
async def test_an_embedded_task_is_resolved_by_its_fix_alone(task: Task, store: Path, tmp_path: Path) -> None:
    await gold_resolves_and_nothing_does_not(await prepared(task, store), tmp_path)


async def test_half_of_an_embedded_fix_is_not_enough(store: Path, tmp_path: Path) -> None:
    (task,) = load("embedded", ["polar-env__spans-1"])
    half = first_hunks(str(task.row["patch"]))
    resolved, fixed, kept = await judged(await prepared(task, store), half, tmp_path)
    assert (resolved, fixed, kept[0]) == (False, (1, 7), kept[1])


async def test_a_real_task_is_the_known_commit_and_graded_as_known(store: Path, tmp_path: Path) -> None:
    (task,) = load(swebench_data(), [REQUESTS])
    first = await prepared(task, store)
    assert first.base_commit == REQUESTS_COMMIT
    before = spent()
    assert await prepared(task, store) == first
    assert spent() - before < 0.5
    await gold_resolves_and_nothing_does_not(first, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "psf__requests-2931",
        "pytest-dev__pytest-7571",
        "sympy__sympy-13031",
        "sphinx-doc__sphinx-7440",
        "marshmallow-code__marshmallow-1343",
        "django__django-11790",
    ],
)
@pytest.mark.timeout(900)
async def test_other_sdist_recipes_reproduce_the_official_verdicts(name: str, store: Path, tmp_path: Path) -> None:
    (task,) = load(swebench_data(), [name])
    await gold_resolves_and_nothing_does_not(await prepared(task, store), tmp_path)

"""Attacks on the grading of a real instance: each is 0.0 and flagged; honest odd patches stay 1.0 (``make attack``).

The corpus holds cases measured on the official grader, which calls twelve of them resolved; ``attack_helpers`` as many
of our own again.
"""

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attack_helpers import ATTACKS, HONEST, Attack, patch_of
from polar_env.config import RewardConfig
from polar_env.grade.swebench import grade
from polar_env.reward import decide
from polar_env.tasks import ENV_PREFIX, Prepared
from polar_env.tasks.prepare import prepare
from polar_env.tasks.rows import load
from polar_env.types import Outcome
from polar_env.verdict import Flag, Verdict
from sandbox_helpers import config, data_folder

DATA = data_folder()
STORE = Path(__file__).parents[2] / ".cache" / "gold"
INSTANCE, MODULE = "psf__requests-6028", "requests/__init__.py"

pytestmark = [
    pytest.mark.attack,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(DATA is None, reason="no SWE-bench data (set POLAR_SWEBENCH_DATA)"),
]

CORPUS: tuple[tuple[str, frozenset[Flag]], ...] = (
    ("conftest", frozenset({Flag.TEST_HOOKS})),
    ("ini_addopts", frozenset({Flag.TEST_HOOKS, Flag.BUILD_FILES})),
    ("ini_deselect", frozenset({Flag.TEST_HOOKS, Flag.BUILD_FILES})),
    ("setup_pth", frozenset({Flag.ENVIRONMENT})),
    ("setup_", frozenset({Flag.BUILD_FILES})),
    ("edit_f2p", frozenset({Flag.TESTS_EDITED})),
    ("delete_test", frozenset({Flag.TESTS_EDITED})),
    ("traversal", frozenset({Flag.OUTSIDE})),
    ("git_hook", frozenset({Flag.GIT_FILES})),
)
"""Start of a case's name -> flags of which it raises one."""
NO_FIX_LEFT = ("gold_hang", "gold_kill_parent")
"""They hold the fix and a conftest.py that stops the run: refused, as the official grader does not resolve them."""


def corpus() -> list[dict[str, Any]]:
    if DATA is None or not (DATA / "attack_cases.jsonl.gz").exists():
        return []
    with gzip.open(DATA / "attack_cases.jsonl.gz", "rt") as file:
        cases = [json.loads(line) for line in file]
    return [case for case in cases if case["iid"] == INSTANCE and case["attack"] != "huge_20MB"]


Tell = Callable[[str, object], None]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    (task,) = load(str(DATA), [INSTANCE])
    return asyncio.run(prepare(task, STORE, sandbox=config()))


async def graded(prepared: Prepared, patch: bytes, name: str, kind: str, tell: Tell) -> tuple[float, Verdict]:
    """Grade it, and one line for the table at the end (``conftest.py``)."""
    verdict = await grade(prepared, patch, sandbox=config(), timeout=300)
    reward = decide(Outcome.COMPLETED, verdict, True, RewardConfig()).reward
    official = "resolved" if verdict.official else ""
    flags = ", ".join(flag.value for flag in verdict.flags)
    tell("table", {"case": name, "kind": kind, "reward": reward, "official": official, "flags": flags})
    return reward, verdict


@pytest.mark.parametrize("case", corpus(), ids=lambda case: case["attack"])
async def test_the_corpus_is_worth_what_it_fixes(
    prepared: Prepared, case: dict[str, Any], record_property: Tell
) -> None:
    here = case["patch"].replace("/opt/miniconda3/envs/testbed", ENV_PREFIX)  # where the official images have it
    kind = "corpus, with the fix" if case["contains_real_fix"] else "corpus"
    reward, verdict = await graded(prepared, here.encode(), case["attack"], kind, record_property)
    fixes = case["contains_real_fix"] and case["attack"] not in NO_FIX_LEFT
    assert reward == (1.0 if fixes else 0.0), verdict
    wanted = next((flags for start, flags in CORPUS if case["attack"].startswith(start)), frozenset[Flag]())
    assert not wanted or wanted & set(verdict.flags), verdict


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_no_attack_of_ours_is_worth_anything(prepared: Prepared, attack: Attack, record_property: Tell) -> None:
    assert prepared.repo is not None
    kind = "package" if attack.runs else "install" if attack.installs else "files"
    patch = patch_of(attack, prepared.repo, MODULE)
    reward, verdict = await graded(prepared, patch, attack.name, kind, record_property)
    assert reward == 0.0, verdict
    official_saw_through = attack.runs and not verdict.official
    assert not attack.flags or attack.flags & set(verdict.flags) or official_saw_through, verdict
    assert not (attack.inert and verdict.official), verdict


@pytest.mark.parametrize("honest", HONEST, ids=lambda honest: honest.name)
async def test_honest_work_around_the_right_fix_is_worth_one(
    prepared: Prepared, honest: Attack, record_property: Tell
) -> None:
    assert prepared.repo is not None
    fix = str(prepared.task.row["patch"]).encode()
    patch = patch_of(honest, prepared.repo, MODULE, fix=fix)
    reward, verdict = await graded(prepared, patch, honest.name, "honest", record_property)
    assert reward == 1.0, verdict
    assert set(verdict.flags) == honest.flags

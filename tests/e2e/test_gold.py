"""Real SWE-bench instances whose tree comes from the package index: the right fix is 1.0, nothing is 0.0.

``make gold`` runs all of them; what they need is built once under ``.cache/gold``, so a second run goes on where the
first was ended. A fix that is not the row's own, byte for byte, has to prove itself (``canary``): that is graded too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar_env.config import RewardConfig
from polar_env.grade.swebench import grade
from polar_env.reward import decide
from polar_env.tasks.prepare import prepare
from polar_env.tasks.rows import load
from polar_env.tasks.sources import sdist_table
from polar_env.types import Outcome
from polar_env.verdict import Flag, Verdict, VerdictStatus
from sandbox_helpers import config, data_folder

DATA = data_folder()
STORE = Path(__file__).parents[2] / ".cache" / "gold"
NOTES = (
    b"diff --git a/notes.txt b/notes.txt\nnew file mode 100644\n--- /dev/null\n+++ b/notes.txt\n@@ -0,0 +1 @@\n+why\n"
)
TIMEOUT = 600.0

pytestmark = [pytest.mark.gold, pytest.mark.slow, pytest.mark.timeout(3600)]


def known() -> list[str]:
    """Instances of ours whose rows are here."""
    if DATA is None:
        return []
    here = {task.task_id for task in load(str(DATA))}
    return sorted(here & set(sdist_table()))


def reward(verdict: Verdict) -> float:
    decision = decide(Outcome.COMPLETED, verdict, True, RewardConfig())
    assert not decision.masked
    return decision.reward


def tell(name: str, table: Callable[[str, object], None], **found: Verdict) -> None:
    """One line an instance in ``.cache/gold/results.jsonl``, and in the table at the end (``conftest.py``)."""
    line: dict[str, Any] = {"instance": name}
    for kind, verdict in found.items():
        line[kind] = {
            "reward": reward(verdict),
            "status": verdict.status.value,
            "fail_to_pass": verdict.fail_to_pass,
            "pass_to_pass": verdict.pass_to_pass,
            "flags": [flag.value for flag in verdict.flags],
            "seconds": round(verdict.seconds, 1),
        }
    with (STORE / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    gold = found["gold"]
    told = {kind: reward(verdict) for kind, verdict in found.items()}
    counts = {"fail_to_pass": gold.fail_to_pass[1], "pass_to_pass": gold.pass_to_pass[1]}
    flags = sorted({flag.value for verdict in found.values() for flag in verdict.flags})
    table("table", {"instance": name, **told, **counts, "flags": ", ".join(flags)})


@pytest.mark.skipif(DATA is None, reason="no SWE-bench data (set POLAR_SWEBENCH_DATA)")
@pytest.mark.parametrize("name", known())
async def test_the_right_fix_is_worth_one_and_nothing_is_worth_zero(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    (task,) = load(str(DATA), [name])
    prepared = await prepare(task, STORE, sandbox=config())
    patch = str(task.row["patch"]).encode()

    async def graded(change: bytes) -> Verdict:
        return await grade(prepared, change, sandbox=config(), timeout=TIMEOUT)

    gold, proved, useless, empty = [await graded(p) for p in (patch, patch + NOTES, NOTES, b"")]
    tell(name, record_property, gold=gold, proved=proved, useless=useless)
    assert (reward(gold), reward(proved), reward(useless), reward(empty)) == (1.0, 1.0, 0.0, 0.0)
    assert gold.status is proved.status is VerdictStatus.RESOLVED
    assert useless.status is VerdictStatus.UNRESOLVED
    assert empty.status is VerdictStatus.EMPTY_PATCH
    assert set(proved.flags) <= {Flag.BUILD_FILES, Flag.UNPROVEN}

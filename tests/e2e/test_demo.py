"""The main job, as a user runs it: `polar demo` ends with the table, the right rewards, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

from census import census
from polar_env.demo import COLUMNS, HARNESSES
from polar_env.gym import contract
from rollout_helpers import STORE, adopting, settled

pytestmark = [pytest.mark.e2e, pytest.mark.ray]


def polar(tmp_path: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, measured when the tests are."""
    command = [str(Path(sys.executable).parent / "polar"), *arguments]
    measured = coverage.Coverage.current()
    if measured is not None:
        data = Path(measured.get_data().base_filename()).resolve()
        config = Path(__file__).resolve().parents[2] / "pyproject.toml"
        run = ["run", "--parallel-mode", f"--data-file={data}", f"--rcfile={config}", *command]
        command = [sys.executable, "-m", "coverage", *run]
    env = {**os.environ, "POLAR_CACHE": str(STORE)}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def run_demo(tmp_path: Path, *arguments: str, timeout: float = 500) -> tuple[str, list[dict]]:
    """(what it printed, its rows) of a demo that must succeed and leave nothing."""
    before = census()
    with adopting():
        done = polar(tmp_path, "demo", "--data", "embedded", *arguments, timeout=timeout)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert settled() == []
    assert census().mounts.keys() - before.mounts.keys() == set()
    written = (tmp_path / "out" / "rollouts.jsonl").read_text(encoding="utf-8")
    return done.stdout, [json.loads(line) for line in written.splitlines()]


def assert_a_group_per_harness(rows: list[dict], harnesses: tuple[str, ...]) -> None:
    assert [contract.violations(row) for row in rows] == [[]] * len(rows)
    assert [row["polar"]["harness"] for row in rows] == [name for name in harnesses for _ in range(4)]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0] * len(harnesses)
    assert not any(row["mask_sample"] for row in rows)
    for at in range(0, len(rows), 4):
        assert contract.group_disagreements(rows[at : at + 4]) == []
        assert len({row["first_prompt_digest"] for row in rows[at : at + 4]}) == 1


@pytest.mark.timeout(560)
def test_the_demo_of_one_harness_ends_with_its_table_and_leaves_nothing(tmp_path: Path):
    printed, rows = run_demo(tmp_path, "--harness", "claude_code")
    assert_a_group_per_harness(rows, ("claude_code",))
    table = [line.split() for line in printed.splitlines() if line.startswith(("harness ", "claude_code "))]
    assert table[0] == list(COLUMNS)
    assert [cells[4] for cells in table[1:]] == ["1.0", "1.0", "0.0", "0.0"]
    assert "LOG-PROBABILITIES ARE SCRIPTED" in printed
    assert "all valid for NeMo-RL and as expected" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_cannot_start_ends_gym_in_words_and_leaves_nothing(tmp_path: Path):
    code = (
        "from pathlib import Path; from polar_env.errors import SandboxError; from polar_env.gym import launch\n"
        "BAD = {'engine': {'kind': 'scripted'}, 'concurency': 3}\n"
        "try:\n    with launch.running(BAD, Path('gym')): raise SystemExit('it started')\n"
        "except SandboxError as error: print('REFUSED', error)"
    )
    with adopting():
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )
        assert settled() == []
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "REFUSED starting NeMo Gym" in done.stdout
    assert "did you mean 'concurrency'" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_demo_runs_four_real_clis(tmp_path: Path):
    _, rows = run_demo(tmp_path, timeout=1700)
    assert_a_group_per_harness(rows, HARNESSES)

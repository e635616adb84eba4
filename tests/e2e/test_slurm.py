"""`polar submit slurm` against a real Slurm of two nodes on this machine.

What is submitted is a stand-in for NeMo-RL's ray.sub: it reads the same variables and runs setup on every node and the
command on the first, by srun, as that does; the container and Ray inside it are left out.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_env.cli import main
from rollout_helpers import STORE, adopting, below_us, settled
from slurm_helpers import NODES, NoSlurmError, Slurm, running, unpacked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]  # packages are fetched the first time

RAY_SUB = """#!/bin/bash
#SBATCH --exclusive
#SBATCH --time=0:5:0
set -euo pipefail
echo "job $SLURM_JOB_NAME on $SLURM_JOB_NUM_NODES nodes, $GPUS_PER_NODE GPUs each, of $CONTAINER with $MOUNTS"
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
[[ -z "$SETUP_COMMAND" ]] || srun --label --ntasks-per-node=1 bash -c "$SETUP_COMMAND"
srun --nodes=1 --ntasks=1 -w "${nodes[0]}" bash -c "$COMMAND"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    before = below_us()
    with adopting():
        try:
            with running(unpacked(STORE / "slurm"), tmp_path_factory.mktemp("slurm")) as made:
                yield made
        except NoSlurmError as error:
            pytest.skip(str(error))
        assert settled(known=before) == []


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`polar submit slurm`'s words so far; the job's output goes to ``out`` in the test's folder."""
    for name, value in slurm.variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "ray.sub").write_text(RAY_SUB)
    waiting = ["--sbatch=--wait", f"--sbatch=--output={tmp_path}/out"]
    return ["submit", "slurm", "--nemo-rl", str(tmp_path), "--image", "nvcr/nemo-rl:v1", *waiting]


def recipe(tmp_path: Path) -> list[str]:
    """The words for a recipe whose script says where it runs."""
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "run.sh").write_text('echo "$0: training on $SLURMD_NODENAME, it\'s $((40 + 2))"\n')
    return ["--recipe", str(folder), "--mount", "/a:/a", "--mount", "/b:/c", "--nodes", "2", "--gpus", "4"]


def expected(tmp_path: Path) -> list[str]:
    """What that recipe's job prints, in order of the alphabet."""
    setup = [f"{task}: set up {node}" for task, node in enumerate(NODES)]
    trained = f"{tmp_path}/my run/run.sh: training on {NODES[0]}, it's 42"
    return sorted([*setup, "job my run on 2 nodes, 4 GPUs each, of nvcr/nemo-rl:v1 with /a:/a,/b:/c", trained])


SETUP = ["--setup", 'echo "set up $SLURMD_NODENAME"']


def test_a_recipe_runs_on_the_nodes_it_asked_for(slurm: Slurm, job: list[str], tmp_path: Path):
    assert main([*job, *recipe(tmp_path), *SETUP]) == 0
    assert slurm.jobs()[-1] == "my run"
    assert sorted((tmp_path / "out").read_text().splitlines()) == expected(tmp_path)


def test_a_dry_run_submits_nothing_and_a_shell_given_what_it_printed_runs_the_same_job(
    slurm: Slurm, job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = slurm.jobs()
    assert main([*job, *recipe(tmp_path), *SETUP, "--dry-run"]) == 0
    assert slurm.jobs() == before
    assert subprocess.run(["bash", "-c", capsys.readouterr().out], stdout=subprocess.PIPE, check=False).returncode == 0
    assert slurm.jobs() == [*before, "my run"]
    assert sorted((tmp_path / "out").read_text().splitlines()) == expected(tmp_path)


def test_a_command_that_fails_ends_the_job_and_polar_with_its_code(slurm: Slurm, job: list[str], tmp_path: Path):
    assert main([*job, "--name", "broken", "--command", "echo no GPU here >&2; exit 7"]) == 7
    assert "no GPU here" in (tmp_path / "out").read_text()
    assert slurm.ask("squeue", "--states=all", "--name=broken", "--noheader", "--format=%T") == "FAILED"


def test_what_the_cluster_does_not_take_is_not_submitted(
    slurm: Slurm, job: list[str], capfd: pytest.CaptureFixture[str]
):
    before = slurm.jobs()
    assert main([*job, "--command", "true", "--sbatch=--partition=gpus"]) == 1
    assert "invalid partition" in capfd.readouterr().err
    assert slurm.jobs() == before

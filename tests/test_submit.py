"""Jobs for three kinds of cluster, down to what is run: here only read, the clusters are in tests/e2e."""

import json
import subprocess
from pathlib import Path

import pytest

from polar_env import submit
from polar_env.cli import main
from polar_env.errors import ConfigError
from polar_env.submit import Submission, Work, kubernetes, ray, recipe_work, slurm

WORK = Work("swe-run", "bash '/shared/my run/run.sh'", nodes=2, gpus=8)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "ray.sub").write_text("#!/bin/bash\n")
    return tmp_path


def test_slurm_gets_nemo_rl_s_script_and_the_variables_it_reads(checkout: Path):
    job = slurm(
        WORK, checkout, "nvcr/nemo-rl:v1", ["/shared:/shared", "/data:/data"], "pip install w.whl", ["--time=4:0:0"]
    )
    assert job.argv == ("sbatch", "--nodes=2", "--job-name=swe-run", "--time=4:0:0", str(checkout / "ray.sub"))
    assert job.env == {
        "CONTAINER": "nvcr/nemo-rl:v1",
        "MOUNTS": "/shared:/shared,/data:/data",
        "COMMAND": "bash '/shared/my run/run.sh'",
        "SETUP_COMMAND": "pip install w.whl",
        "GPUS_PER_NODE": "8",
    }


def test_slurm_without_nemo_rl_s_script_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"ray\.sub"):
        slurm(WORK, tmp_path, "image", [], "", [])


def test_ray_runs_the_command_in_a_shell_and_waits_for_it():
    assert ray(WORK, "http://head:8265").argv == (
        *("ray", "job", "submit", "--address=http://head:8265", "--submission-id=swe-run"),
        *("--", "bash", "-c", "bash '/shared/my run/run.sh'"),
    )


def test_kubernetes_gets_one_head_and_the_other_nodes_as_workers():
    job = kubernetes(WORK, "nemo-rl:v1", "rl", "pip install w.whl", "shared-claim")
    assert job.argv == ("kubectl", "create", "-f", "-")
    manifest = json.loads(job.stdin)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest["metadata"] == {"generateName": "swe-run-", "namespace": "rl"}
    assert manifest["spec"]["submissionMode"] == "HTTPMode"
    assert manifest["spec"]["entrypoint"] == WORK.command
    cluster = manifest["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (1, 1, 1)
    for pod in (cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert container["command"] == ["pip install w.whl"]
        assert "SYS_ADMIN" in container["securityContext"]["capabilities"]["add"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_one_node_is_a_head_alone_and_without_extras_nothing_is_asked_for():
    manifest = json.loads(kubernetes(Work("a_b.c", "true", 1, 0), "image", "default", "").stdin)
    assert manifest["metadata"]["generateName"] == "a-b-c-"
    cluster = manifest["spec"]["rayClusterSpec"]
    assert set(cluster) == {"headGroupSpec"}
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert not {"resources", "command"} & set(container)


def test_what_is_printed_is_what_a_shell_would_run(tmp_path: Path):
    """The dry run is a script: run by a shell it gives the command the same words, variables and input."""
    env = {"SAID": "it's $HOME; `x`"}
    job = Submission(("sh", "-c", 'printf "%s|" "$SAID" "$@"; cat', "sh", "two words", "a'b"), env, '{"a": "$HOME"}\n')
    done = subprocess.run(
        ["bash", "-c", str(job)], capture_output=True, text=True, check=True, env={"PATH": "/bin:/usr/bin"}
    )
    assert done.stdout == "it's $HOME; `x`|two words|a'b|" + '{"a": "$HOME"}\n'


def test_a_real_run_gives_the_command_its_variables_and_input_and_returns_its_code(tmp_path: Path):
    out = tmp_path / "seen"
    job = Submission(("sh", "-c", f'echo "$SAID" > {out}; cat >> {out}; exit 3'), {"SAID": "hello"}, "input\n")
    told: list[str] = []
    assert submit.run(job, told.append, dry=False) == 3
    assert out.read_text() == "hello\ninput\n"
    assert told == [str(job)]


def test_a_dry_run_starts_nothing(tmp_path: Path):
    job = Submission(("touch", str(tmp_path / "made")))
    assert submit.run(job, lambda line: None, dry=True) == 0
    assert not (tmp_path / "made").exists()


def test_a_cluster_s_command_that_is_not_here_is_named():
    with pytest.raises(ConfigError, match="polar-no-such-command is not on PATH"):
        submit.run(Submission(("polar-no-such-command",)), lambda line: None, dry=False)


def test_the_work_of_a_recipe_is_its_script(tmp_path: Path):
    with pytest.raises(ConfigError, match="polar recipe"):
        recipe_work(tmp_path, 1, 8)
    (tmp_path / "run.sh").write_text("true\n")
    assert recipe_work(tmp_path, 1, 8) == Work(tmp_path.name, f"bash {tmp_path}/run.sh", 1, 8)


@pytest.mark.parametrize(("nodes", "gpus"), [(0, 8), (1, -1)])
def test_a_job_needs_a_node(nodes: int, gpus: int):
    with pytest.raises(ConfigError, match="at least one node"):
        Work("job", "true", nodes, gpus)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["ray", "--address", "http://head:8265", "--command", "polar check"], "ray job submit"),
        (["k8s", "--image", "i", "--command", "polar check", "--gpus", "0"], '"kind": "RayJob"'),
        (["slurm", "--image", "i", "--nemo-rl", "{checkout}", "--command", "polar check", "--sbatch=-A x"], "sbatch"),
    ],
    ids=["ray", "k8s", "slurm"],
)
def test_the_command_shows_what_would_run(checkout: Path, capsys, arguments: list[str], shown: str):
    words = [word.format(checkout=checkout) for word in arguments]
    assert main(["submit", *words, "--dry-run"]) == 0
    assert shown in capsys.readouterr().out

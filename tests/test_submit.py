"""Jobs for three kinds of cluster, down to what is run: here only read, the clusters are in tests/e2e."""

import asyncio
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from aiohttp import web

from polar_env import submit
from polar_env.cli import main
from polar_env.config import environment
from polar_env.errors import ConfigError
from polar_env.submit import Submission, Work, kubernetes, ray, recipe_work, slurm
from served_helpers import serving

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
    """Its id ends with the time: Ray takes an id once, and a recipe is submitted again and again."""
    *submit_it, named, dash, shell, option, command = ray(WORK, "http://head:8265").argv
    assert submit_it == ["ray", "job", "submit", "--address=http://head:8265"]
    assert re.fullmatch(r"--submission-id=swe-run-\d{8}-\d{6}", named)
    assert (dash, shell, option, command) == ("--", "bash", "-c", "bash '/shared/my run/run.sh'")


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_a_dead_address_is_one_line_that_says_what_to_do(capsys):
    address = nobody()
    assert main(["submit", "ray", "--address", address, "--command", "true"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert f"no Ray job server answers at {address}" in line
    assert "ray start --head" in line
    assert main(["submit", "ray", "--address", address, "--command", "true", "--dry-run"]) == 0


@pytest.mark.parametrize(("status", "refused"), [(200, False), (401, False), (403, False), (404, True)])
async def test_a_job_server_that_wants_a_token_answers_and_another_server_is_told_apart(status: int, refused: bool):
    async def version(_: web.Request) -> web.Response:
        return web.Response(status=status)

    async with serving({"GET /api/version": version}) as url:
        if refused:
            with pytest.raises(ConfigError, match="not Ray's job server"):
                await asyncio.to_thread(submit.answering, url)
        else:
            await asyncio.to_thread(submit.answering, url)


def test_an_address_of_another_kind_is_left_to_ray():
    submit.answering("auto")


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
        assert "SYS_ADMIN" in container["securityContext"]["capabilities"]["add"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_one_node_is_a_head_alone_and_without_extras_nothing_is_asked_for():
    manifest = json.loads(kubernetes(Work("a_b.c", "true", 1, 0), "image", "default", "").stdin)
    assert manifest["metadata"]["generateName"] == "a-b-c-"
    cluster = manifest["spec"]["rayClusterSpec"]
    assert set(cluster) == {"headGroupSpec"}
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert not {"resources", "command"} & set(container)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("a_b.c", "a-b-c-"),
        ("2026 run!", "job-2026-run-"),
        ("__", "job-"),
        ("grpo_qwen3.5_4b_swe_claude_code_with_a_long_name", "grpo-qwen3-5-4b-swe-claude-code-with-a-lo-"),
    ],
)
def test_a_job_s_name_is_one_that_kuberay_takes(name: str, label: str):
    """A DNS label that begins with a letter, 47 characters with the five that Kubernetes adds."""
    generated = json.loads(kubernetes(Work(name, "true"), "image", "default", "").stdin)["metadata"]["generateName"]
    assert generated == label
    assert len(generated) + 5 <= 47


@pytest.mark.parametrize(
    ("setup", "ended", "said"),
    [
        ("export READY=yes; echo set up", 0, "set up\nray started, yes\n"),
        ("echo trying; false", 1, "trying\n"),
        ("pip-that-is-not-here install w.whl", 1, ""),
        ("export READY=yes  # a remark", 0, "ray started, yes\n"),
    ],
)
def test_ray_starts_in_a_pod_only_after_its_setup_worked(setup: str, ended: int, said: str):
    """KubeRay makes one line of bash of the container's command, `&&`, a ulimit, `;` and its `ray start` (BuildPod)."""
    manifest = json.loads(kubernetes(WORK, "image", "rl", setup).stdin)
    (container,) = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    line = "".join(f" {word} " for word in container["command"])
    line += '&& ulimit -c 0; echo "ray started, $READY"'
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", "--", line], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ended, said)


CRD = environment("POLAR_KUBERAY_CRD")


def rayjob_schema() -> dict[str, Any]:
    """The OpenAPI schema of ``ray.io/v1`` RayJobs, with unknown fields refused, as `kubectl create` does."""
    crd = yaml.load(Path(CRD).read_text("utf-8"), Loader=yaml.CSafeLoader)
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    return closed(version["schema"]["openAPIV3Schema"])


def closed(schema: Any) -> Any:
    """The schema whose objects have no other fields than it names. ``metadata`` is Kubernetes' own and left open."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: closed(value) for key, value in schema.items()}
    opened = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    return own | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) and not opened else own


@pytest.mark.skipif(not CRD, reason="POLAR_KUBERAY_CRD names no ray.io_rayjobs.yaml of KubeRay's config/crd/bases")
def test_the_manifest_holds_to_kuberay_s_own_schema():
    schema = jsonschema.Draft202012Validator(rayjob_schema())
    full = json.loads(kubernetes(WORK, "nemo-rl:v1", "rl", "pip install w.whl", "shared-claim").stdin)
    bare = json.loads(kubernetes(Work("job", "true", 1, 0), "image", "default", "").stdin)
    assert [error.message for manifest in (full, bare) for error in schema.iter_errors(manifest)] == []
    spec = full["spec"]
    for wrong in (spec | {"entryPoint": "true"}, spec | {"backoffLimit": "0"}, spec | {"submissionMode": 1}):
        assert not schema.is_valid(full | {"spec": wrong})


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


def test_a_command_that_came_with_our_own_packages_is_found_without_a_path(tmp_path: Path, monkeypatch):
    """`/opt/venv/bin/polar submit ray` runs the ``ray`` beside it."""
    beside = tmp_path / "bin" / "polar-own-command"
    beside.parent.mkdir()
    beside.write_text("#!/bin/sh\nexit 7\n")
    beside.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    assert submit.run(Submission(("polar-own-command",)), lambda line: None, dry=False) == 7


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

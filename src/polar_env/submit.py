"""`polar submit`: a rendered recipe, or any command, as a job of a cluster. What would run can always be read first.

Three doors: Slurm through NeMo-RL's own ``ray.sub`` (its header lists the variables), a running Ray cluster through
``ray job submit``, and Kubernetes as a KubeRay ``RayJob`` (docs.ray.io, "RayJob Quickstart").
"""

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_env.config import child_environment
from polar_env.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Work:
    """What the cluster is to run. ``command`` is a shell command; a recipe's is its ``run.sh``."""

    name: str
    command: str
    nodes: int = 1
    gpus: int = 8
    """GPUs of each node."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 0:
            raise ConfigError("a job needs at least one node, and no negative number of GPUs")


@dataclass(frozen=True, slots=True)
class Submission:
    """A command line with what it needs: ``env`` is added to ours, ``stdin`` is fed to it."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    stdin: str = ""

    def __str__(self) -> str:
        """As a shell would run it."""
        lines = [f"export {key}={shlex.quote(value)}" for key, value in self.env.items()]
        if not self.stdin:
            return "\n".join([*lines, shlex.join(self.argv)])
        return "\n".join([*lines, f"{shlex.join(self.argv)} <<'EOF'", self.stdin.rstrip("\n"), "EOF"])


def recipe_work(folder: Path, nodes: int, gpus: int) -> Work:
    """The training `polar recipe` prepared in ``folder``. Raises ConfigError when there is none."""
    script = folder.expanduser().resolve() / "run.sh"
    if not script.is_file():
        raise ConfigError(f"{folder} holds no run.sh: make it with `polar recipe NAME --out {folder} ...`")
    return Work(script.parent.name, shlex.join(["bash", str(script)]), nodes, gpus)


def slurm(
    work: Work, nemo_rl: Path, image: str, mounts: Sequence[str], setup: str, options: Sequence[str]
) -> Submission:
    """``sbatch`` on NeMo-RL's ray.sub, which starts Ray on all nodes of the job and runs the command on the first.

    Args:
        image: container image of NeMo-RL, as Slurm's pyxis takes it.
        mounts: ``host:container`` pairs; paths in a recipe are the host's, so mount them under the same names.
        setup: a command run on every node before Ray starts, such as the installation of polar_env's wheel.
        options: further options of sbatch, such as ``--account=...``.
    """
    script = nemo_rl.expanduser().resolve() / "ray.sub"
    if not script.is_file():
        raise ConfigError(f"{nemo_rl} holds no ray.sub: give the folder of a NeMo-RL checkout")
    env = {
        "CONTAINER": image,
        "MOUNTS": ",".join(mounts),
        "COMMAND": work.command,
        "SETUP_COMMAND": setup,
        "GPUS_PER_NODE": str(work.gpus),
    }
    return Submission(("sbatch", f"--nodes={work.nodes}", f"--job-name={work.name}", *options, str(script)), env)


def ray(work: Work, address: str) -> Submission:
    """``ray job submit`` to a running cluster; it follows the job's output and ends with 0, or 1: the job failed.

    The job's processes run in the cluster's own environment: what a recipe needs is exported by its script, not by a
    ``runtime_env``, which NeMo-RL's actors would not inherit.
    """
    argv = ("ray", "job", "submit", f"--address={address}", f"--submission-id={work.name}")
    return Submission((*argv, "--", "bash", "-c", work.command))


def kubernetes(work: Work, image: str, namespace: str, setup: str, volume: str = "") -> Submission:
    """``kubectl create`` of a RayJob whose head and workers are alike: NeMo-RL places its actors over all of them.

    Args:
        setup: run in every pod before Ray starts.
        volume: name of a PersistentVolumeClaim mounted at /shared in every pod; recipes and checkpoints belong there.
    """
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "generateName": f"{work.name.lower().replace('_', '-').replace('.', '-')}-",
            "namespace": namespace,
        },
        "spec": {
            "submissionMode": "HTTPMode",
            "entrypoint": work.command,
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 0,
            "rayClusterSpec": _cluster(work, image, setup, volume),
        },
    }
    return Submission(("kubectl", "create", "-f", "-"), stdin=json.dumps(manifest, indent=2) + "\n")


def _cluster(work: Work, image: str, setup: str, volume: str) -> dict[str, Any]:
    pod = {"template": {"spec": _pod(work, image, setup, volume)}}
    head = {"rayStartParams": {"dashboard-host": "0.0.0.0"}, **pod}  # noqa: S104 - KubeRay's service reaches the head
    if work.nodes == 1:
        return {"headGroupSpec": head}
    counts = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), work.nodes - 1)
    start: dict[str, str] = {}
    return {
        "headGroupSpec": head,
        "workerGroupSpecs": [{"groupName": "nodes", **counts, "rayStartParams": start, **pod}],
    }


def _pod(work: Work, image: str, setup: str, volume: str) -> dict[str, Any]:
    """Sandboxes need namespaces of their own: without SYS_ADMIN bubblewrap cannot mount inside a container."""
    container: dict[str, Any] = {
        "name": "ray",
        "image": image,
        "securityContext": {"capabilities": {"add": ["SYS_ADMIN", "NET_ADMIN"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - NCCL's and Ray's shared memory
    }
    spec: dict[str, Any] = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    if work.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": work.gpus}}
    if volume:
        container["volumeMounts"].append({"name": "shared", "mountPath": "/shared"})
        spec["volumes"].append({"name": "shared", "persistentVolumeClaim": {"claimName": volume}})
    if setup:
        container["command"] = [setup]  # KubeRay runs it before its own `ray start` (docs.ray.io, pod-command, part 2)
    return spec


def run(submission: Submission, say: Callable[[str], None], *, dry: bool) -> int:
    """Print what runs, and run it unless ``dry``; returns its exit code. Raises ConfigError: it is not installed."""
    say(str(submission))
    if dry:
        return 0
    try:
        done = subprocess.run(
            submission.argv,
            env={**child_environment(""), **submission.env},
            input=submission.stdin or None,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{submission.argv[0]} is not on PATH here: submit from a node that has it") from error
    return done.returncode

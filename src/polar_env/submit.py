"""`polar submit`: a rendered recipe, or any command, as a job of a cluster. What would run can always be read first.

Three doors: Slurm through NeMo-RL's own ``ray.sub`` (its header lists the variables), a running Ray cluster through
``ray job submit``, and Kubernetes as a KubeRay ``RayJob`` (docs.ray.io, "RayJob Quickstart").
"""

import http.client
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_env.config import child_environment
from polar_env.errors import ConfigError

RAYJOB_NAME = 47
"""Characters of a RayJob's name, at most (KubeRay, controllers/ray/utils/constant.go, MaxRayJobNameLength)."""

GENERATED = 5
"""Characters that Kubernetes puts behind a ``generateName``."""


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
    ``runtime_env``, which NeMo-RL's actors would not inherit. The job's id ends with the time: Ray takes an id once.
    """
    name = f"{work.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    argv = ("ray", "job", "submit", f"--address={address}", f"--submission-id={name}")
    return Submission((*argv, "--", "bash", "-c", work.command))


def answering(address: str) -> None:
    """Raises ConfigError when nothing answers at a job server's http address, in place of Ray's page of traceback.

    That it wants a token (401, 403) is an answer. Addresses of other kinds are Ray's own affair.
    """
    if not address.startswith(("http://", "https://")):
        return
    try:
        urllib.request.urlopen(f"{address.rstrip('/')}/api/version", timeout=10).close()  # noqa: S310 - http(s), see above
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                raise ConfigError(
                    f"what answers at {address} is not Ray's job server (it knows no /api/version): give the address "
                    "that `ray start --head` prints for its dashboard, port 8265 unless it was moved"
                ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(
            f"no Ray job server answers at {address} ({getattr(error, 'reason', error)}): is the head up, with its "
            "dashboard (`ray start --head --dashboard-host=0.0.0.0`, ray[default]), and its port 8265 reachable from "
            "here (or forwarded: `ssh -L 8265:localhost:8265 HEAD`)?"
        ) from None


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
            "generateName": f"{_label(work.name)}-",
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


def _label(name: str) -> str:
    """``name`` as the beginning of a name that Kubernetes and KubeRay take: a DNS label of RFC 1035."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"job-{label}".rstrip("-")
    return label[: RAYJOB_NAME - GENERATED - 1].rstrip("-")


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
        # KubeRay makes `SETUP && ulimit …; ray start …` of it: without the exit, Ray would start on a failed setup.
        container["command"] = [f"{{ {setup}\n}} || exit 1"]
    return spec


def run(submission: Submission, say: Callable[[str], None], *, dry: bool) -> int:
    """Print what runs, and run it unless ``dry``; returns its exit code. Raises ConfigError: it is not installed."""
    say(str(submission))
    if dry:
        return 0
    program = _program(submission.argv[0])
    try:
        done = subprocess.run(
            (program, *submission.argv[1:]),
            env={**child_environment(""), **submission.env},
            input=submission.stdin or None,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{submission.argv[0]} is not on PATH here: submit from a node that has it") from error
    return done.returncode


def _program(name: str) -> str:
    """Where it is: on PATH, else beside our own interpreter (``ray`` comes with the packages of this environment)."""
    here = child_environment("").get("PATH", "")
    return shutil.which(name, path=here) or shutil.which(name, path=str(Path(sys.executable).parent)) or name

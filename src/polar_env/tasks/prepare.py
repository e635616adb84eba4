"""Prepare a task once: repository and environment under the store, shared by its group and by every process.

Layout: ``store/tasks/<task_id>-<digest>/{repo,env,git,prepared.json}``, a copy of ``store/envs/<digest>`` with the
project installed, and ``store/sdists``. The digests cover everything that shapes a directory.
"""

import asyncio
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from polar_env.config import SandboxConfig
from polar_env.errors import ConfigError, SandboxError, boundary
from polar_env.tasks import ENV_PREFIX, Prepared, Task, harbor, harbor_prepare
from polar_env.tasks.conda import environment_of, install_line
from polar_env.tasks.embedded_rows import tree_digest
from polar_env.tasks.environment import ENV_VARS, Pins, copy_environment, find_python, install_project, is_prepared
from polar_env.tasks.once import make_once
from polar_env.tasks.sources import git, make_repository

FORMAT = 1
"""Raised when this code lays out or builds a prepared task differently: old ones are then left alone and rebuilt."""

IMAGE_PROVIDERS: Mapping[str, frozenset[str]] = {
    "image": frozenset({"docker", "apptainer", "daytona", "opensandbox", "ecs_fargate", "enroot"}),
    "sif": frozenset({"apptainer", "singularity"}),
}


async def prepare(task: Task, store: Path, *, sandbox: SandboxConfig) -> Prepared:
    """The task ready to run; the first caller builds it (seconds to a minute), every other one gets it from disk.

    Raises:
        ConfigError: the task's source cannot be used here, and what would make it usable.
        SandboxError: fetching or building failed; nothing half-made is left.
    """
    if task.grader == harbor.GRADER:
        return await harbor_prepare.prepare(task, _absolute(store), sandbox=sandbox)
    if image := image_of(task, sandbox):
        return Prepared(task, str(task.row["base_commit"]), repo=None, env=None, git_dir=None, image=image)
    recipe = await asyncio.to_thread(_recipe, task)
    store = _absolute(store)
    place = store / "tasks" / f"{_safe(task.task_id)}-{_digest(recipe)}"
    await make_once(place, is_prepared, partial(_build, recipe, store))
    return await asyncio.to_thread(_read, task, place)


def image_of(task: Task, sandbox: SandboxConfig) -> str:
    """The image a task runs in under this sandbox; ``""``: it is built here. Nothing is fetched or started to know.

    Raises ConfigError: the task's source cannot be used under this sandbox, and what would make it usable.
    """
    if task.grader == harbor.GRADER:
        return harbor_prepare.image_of(task, sandbox)
    kind = str(task.source.get("kind", ""))
    if kind == "sdist" and sandbox.provider != "bubblewrap" and task.row.get("image"):
        kind = "image"  # our recipes stand in for an official image where none can run
    if kind in IMAGE_PROVIDERS:
        return _runnable_image(task, kind, sandbox)
    if kind not in ("sdist", "git", "files", "embedded"):
        raise ConfigError(f"{task.task_id}: source kind {kind!r} is unknown; use sdist, git, files, image or sif")
    if (route := task.source.get("needs_route")) and sandbox.provider != "bubblewrap":
        raise ConfigError(
            f"{task.task_id}: some of its tests need packets to {route} to vanish, and a sandbox without network "
            "answers at once: the right fix would be scored 0. Leave it out or run its official image"
        )
    return ""


def _absolute(store: Path) -> Path:
    return store.expanduser().absolute()


def _runnable_image(task: Task, kind: str, sandbox: SandboxConfig) -> str:
    image = str(task.source.get("path" if kind == "sif" else "image") or task.row.get("image") or "")
    if not image:
        raise ConfigError(f"{task.task_id}: a source of kind {kind} needs {'path' if kind == 'sif' else 'image'!r}")
    if sandbox.provider == "bubblewrap" or (kind == "sif" and sandbox.provider not in IMAGE_PROVIDERS["sif"]):
        raise ConfigError(
            f"{task.task_id} comes as {image}, which the {sandbox.provider} sandbox cannot run. Either set "
            f"sandbox.provider to one that can ({', '.join(sorted(IMAGE_PROVIDERS[kind]))}), or give the row a "
            'polar_source {"kind": "git", "mirror": PATH, "python": "3.9", "requirements": [...]}, or choose one of '
            "the instances that are made from their sdist (polar_env/tasks/sdist_instances.json)"
        )
    return image


def _recipe(task: Task) -> dict[str, Any]:
    """Everything that shapes the prepared task, as plain JSON."""
    source = dict(task.source)
    if source["kind"] == "git":
        derived = environment_of(source, task.task_id) | {"install": install_line(str(task.row["eval_script"]))}
        source = derived | {key: value for key, value in source.items() if not key.startswith("environment_yml")}
    minor = str(source.get("python") or f"{sys.version_info.major}.{sys.version_info.minor}")
    recipe = {"format": FORMAT, "source": source, "python": minor, "base_commit": str(task.row["base_commit"])}
    if source["kind"] == "embedded":
        recipe["tree"] = tree_digest(str(source["path"]))
    return recipe


async def _build(recipe: Mapping[str, Any], store: Path, work: Path) -> None:
    """Fill ``work`` with repo, env, git and prepared.json."""
    source: Mapping[str, Any] = recipe["source"]
    python = await find_python(recipe["python"])
    repo, env = work / "repo", work / "env"
    await asyncio.to_thread(repo.mkdir)
    head = await make_repository(source, recipe["base_commit"], repo, store)
    pins = Pins(tuple(source.get("requirements", ())), str(source.get("pip", "")))
    await copy_environment(pins, python, store, env)
    await install_project(str(source.get("install", "")), python, repo, env)
    if dirty := await git(repo, "status", "--porcelain"):
        raise SandboxError(f"installing the project changed tracked or new files in its tree: {dirty[:300]}")
    mounts = [[str(host), inside] for host, inside in python.mounts]
    facts = {"base_commit": head, "mounts": mounts, "python": python.version, "recipe": dict(recipe)}
    with boundary(SandboxError, f"writing {work}"):
        await asyncio.to_thread(_write, work, facts)


def _write(work: Path, facts: Mapping[str, Any]) -> None:
    shutil.copytree(work / "repo" / ".git", work / "git")
    (work / "prepared.json").write_text(json.dumps(facts, indent=1, sort_keys=True), "utf-8")


def _read(task: Task, place: Path) -> Prepared:
    with boundary(SandboxError, f"reading the prepared task in {place}; delete that directory to build it again"):
        facts = json.loads((place / "prepared.json").read_text("utf-8"))
        mounts = tuple((Path(host), inside) for host, inside in facts["mounts"])
    return Prepared(
        task=task,
        base_commit=facts["base_commit"],
        repo=place / "repo",
        env=place / "env",
        git_dir=place / "git",
        mounts=mounts,
        eval_rewrites=eval_rewrites(task, facts["base_commit"]),
        env_vars=ENV_VARS,
    )


def eval_rewrites(task: Task, head: str) -> tuple[tuple[str, str], ...]:
    """Replacements, in order, that point an official eval script (conda in an image) at our environment."""
    activate = f'export VIRTUAL_ENV={ENV_PREFIX} PATH="{ENV_PREFIX}/bin:$PATH"'
    recipe: list[list[str]] = task.source.get("rewrites", [])
    return (
        (str(task.row["base_commit"]), head),
        ("source /opt/miniconda3/bin/activate", activate),
        ("conda activate testbed", ":"),
        *((old, new) for old, new in recipe),
    )


def _digest(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _safe(task_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", task_id)

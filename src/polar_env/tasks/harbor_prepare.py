"""A Harbor task folder made ready to run: its image named or built, or its Dockerfile served as a directory.

Of a Dockerfile a directory can stand for ``WORKDIR``, ``ENV`` and ``COPY`` into the working directory, over a base that
the folder's author has declared to be this machine (``polar_source.kind = "local"``). Anything else of it would have to
be guessed, so it is refused by line.
"""

import asyncio
import hashlib
import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from polar_env.config import SandboxConfig, child_environment
from polar_env.errors import ConfigError, SandboxError, boundary
from polar_env.tasks import Prepared, Task
from polar_env.tasks.environment import ENV_VARS, Pins, copy_environment, find_python, is_prepared
from polar_env.tasks.harbor import folder_of, settings_of
from polar_env.tasks.once import make_once
from polar_env.tasks.process import run

FORMAT = 1
"""Raised when a folder is laid out differently."""
_TRAPS = ("tests", "logs/verifier", "logs/agent", "logs/artifacts")
_IGNORED = frozenset({"FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"})
"""What changes nothing in a sandbox that runs commands of ours. ``FROM`` is answered by the author's declaration."""


@dataclass(slots=True)
class Layout:
    """What a simple Dockerfile makes."""

    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    copies: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(path in the build context, absolute path in the image)."""


async def prepare(task: Task, store: Path, *, sandbox: SandboxConfig) -> Prepared:
    """The task ready to run. A directory is made once and cached, an image is built once by the engine's own cache.

    Raises:
        ConfigError: this sandbox cannot run it, and what would.
        SandboxError: building failed.
    """
    image = image_of(task, sandbox)
    if not image:
        return await _local(task, store)
    if task.source["kind"] == "dockerfile":
        await _build(task, image)
    workdir = settings_of(task)["workdir"] or await _workdir_of(task, image, sandbox)
    return replace(_prepared(task, workdir), image=image)


def image_of(task: Task, sandbox: SandboxConfig) -> str:
    """The image's name; ``""``: a directory. Nothing is started to know. Raises ConfigError as ``prepare`` does."""
    kind = str(task.source["kind"])
    if kind == "local":
        return ""
    if sandbox.provider == "bubblewrap" or (kind == "sif") != (sandbox.provider in ("apptainer", "singularity")):
        raise ConfigError(
            f"{task.task_id} comes as {kind}, which the {sandbox.provider} sandbox cannot run. Set sandbox.provider to "
            "one that can (docker; apptainer for a SIF), or, if this machine's /usr is all it needs, "
            'polar_source = { kind = "local" } under [metadata.polar] of its task.toml'
        )
    if kind != "dockerfile":
        return _named(task, kind)
    if sandbox.provider != "docker":
        raise ConfigError(
            f"{task.task_id} comes as a Dockerfile, which only the docker sandbox builds; for {sandbox.provider} build "
            'it yourself and name it: polar_source = { kind = "image", image = "..." }'
        )
    return f"polar-harbor:{task.row['base_commit']}"


def _prepared(task: Task, workdir: str) -> Prepared:
    settings = settings_of(task)
    return Prepared(
        task,
        str(task.row["base_commit"]),
        repo=None,
        env=None,
        git_dir=None,
        workdir=workdir,
        env_vars=settings["env"],
        patience=settings["agent_timeout"] or math.inf,
        memory_mib=settings["memory_mb"],
        cpus=settings["cpus"],
        whole=settings["grade_in"] == "agent",
    )


# --- an image -----------------------------------------------------------------------------------------------------


async def _build(task: Task, name: str) -> None:
    words = ("docker", "build", "--quiet", "--tag", name, str(folder_of(task) / "environment"))
    env = child_environment("DOCKER_")
    await run(words, f"building the image of {task.task_id}", env=env, limit=settings_of(task)["build_timeout"])


def _named(task: Task, kind: str) -> str:
    files = folder_of(task) / "environment"
    if kind == "image" and not (files / "Dockerfile").exists() and any(files.glob("*")):
        raise ConfigError(
            f"{files}: Harbor puts these files into the working directory of {task.source.get('image')}; that is not "
            "supported: write environment/Dockerfile with FROM and COPY instead"
        )
    key = "path" if kind == "sif" else "image"
    if not (image := str(task.source.get(key) or "")):
        raise ConfigError(f"{task.task_id}: a polar_source of kind {kind} needs {key!r}")
    return image


async def _workdir_of(task: Task, image: str, sandbox: SandboxConfig) -> str:
    """Where the image itself works. Raises ConfigError when it does not say so, or cannot be asked."""
    found, env = "", child_environment("DOCKER_")
    if sandbox.provider == "docker":
        asking = ("docker", "image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
        try:
            found = (await run(asking, f"asking for {image}", env=env)).decode().strip()
        except SandboxError:  # not here yet
            await run(("docker", "pull", "--quiet", image), f"pulling {image}", env=env)
            found = (await run(asking, f"asking for {image}", env=env)).decode().strip()
    if not found.startswith("/") or found == "/":
        toml = folder_of(task) / "task.toml"
        raise ConfigError(f"{toml}: {image} names no working directory; set [environment] workdir")
    return found


# --- a directory --------------------------------------------------------------------------------------------------


async def _local(task: Task, store: Path) -> Prepared:
    dockerfile = folder_of(task) / "environment" / "Dockerfile"
    layout = await asyncio.to_thread(read_dockerfile, dockerfile) if dockerfile.is_file() else Layout()
    workdir = str(settings_of(task)["workdir"] or layout.workdir)
    _check_workdir(workdir, dockerfile)
    recipe = {"format": FORMAT, "source": dict(task.source), "digest": task.row["base_commit"]}
    name = re.sub(r"[^A-Za-z0-9._-]", "_", task.task_id)
    place = store / "tasks" / f"{name}-{task.row['base_commit'][:12]}-{_digest(recipe)}"
    await make_once(place, is_prepared, partial(_fill, task, layout, workdir, store))
    facts: dict[str, Any] = json.loads(await asyncio.to_thread((place / "prepared.json").read_text, "utf-8"))
    mounts = tuple((Path(host), inside) for host, inside in facts["mounts"])
    made = _prepared(task, workdir)
    return replace(
        made,
        repo=place / "repo",
        env=place / "env" if facts["python"] else None,
        mounts=mounts,
        overlays=((place / "traps" / "tests", "/tests"), (place / "traps" / "logs", "/logs")),
        env_vars={**(ENV_VARS if facts["python"] else {}), **layout.env, **made.env_vars},
    )


def _digest(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


def _check_workdir(workdir: str, dockerfile: Path) -> None:
    taken = ("/usr", "/bin", "/lib", "/etc", "/proc", "/dev", "/tests", "/logs", "/opt/testbed-env", "/run", "/tmp")  # noqa: S108
    path = PurePosixPath(workdir)
    if not path.is_absolute() or str(path) == "/" or ".." in path.parts or any(map(path.is_relative_to, taken)):
        raise ConfigError(
            f"{dockerfile}: a local task cannot work in {workdir or 'a folder that is not named'}; its WORKDIR, or "
            "environment.workdir in task.toml, must be a folder of its own, such as /app"
        )


async def _fill(task: Task, layout: Layout, workdir: str, store: Path, work: Path) -> None:
    source, context = task.source, folder_of(task) / "environment"
    repo = work / "repo"
    await asyncio.to_thread(repo.mkdir)
    with boundary(SandboxError, f"laying out {task.task_id}"):
        await asyncio.to_thread(lay_out, layout, context, workdir, repo)
        for name in _TRAPS:
            await asyncio.to_thread((work / "traps" / name).mkdir, parents=True)
    facts: dict[str, Any] = {"python": "", "mounts": []}
    if wanted := source.get("requirements"):
        python = await find_python(str(source.get("python") or "3.11"))
        await copy_environment(Pins(tuple(wanted), str(source.get("pip", ""))), python, store, work / "env")
        facts = {"python": python.version, "mounts": [[str(host), inside] for host, inside in python.mounts]}
    await asyncio.to_thread((work / "prepared.json").write_text, json.dumps(facts), "utf-8")


def lay_out(layout: Layout, context: Path, workdir: str, repo: Path) -> None:
    """Copy what the Dockerfile copies into ``repo``, which stands for the working directory. Blocks.

    Raises:
        ConfigError: a copy that is not there, leaves the context or lands outside the working directory.
    """
    for source, target in layout.copies:
        inside = PurePosixPath(target)
        if not inside.is_relative_to(workdir):
            raise ConfigError(f"{context / 'Dockerfile'}: COPY to {target} is outside the working directory {workdir}")
        found = (context / source).resolve()
        if not found.is_relative_to(context.resolve()) or not found.exists():
            raise ConfigError(f"{context / 'Dockerfile'}: COPY {source}: there is no such file in {context}")
        at = repo / inside.relative_to(workdir)
        if found.is_dir():
            shutil.copytree(found, at, symlinks=True, dirs_exist_ok=True)
        else:
            at = at / found.name if target.endswith("/") or at.is_dir() else at
            at.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, at)


def read_dockerfile(path: Path) -> Layout:
    """A simple Dockerfile as what it makes. Blocks. Raises ConfigError at the first line a directory cannot serve."""
    layout = Layout()
    if (path.parent / ".dockerignore").exists():
        raise ConfigError(
            f"{path.parent / '.dockerignore'}: a local task copies whole folders; remove it or use an image"
        )
    for name, words, at in _lines(path):
        where = f"{path} line {at}: {name}"
        if name == "WORKDIR" and words:
            layout.workdir = str(PurePosixPath(layout.workdir or "/") / _literal(words[0], where))
        elif name == "ENV":
            layout.env |= _variables(words, where)
        elif name == "COPY":
            layout.copies += _copies(words, layout.workdir or "/", where)
        elif name == "USER" and words and words[0] in ("root", "0", "root:root"):
            continue
        elif name not in _IGNORED:
            raise ConfigError(
                f"{where} cannot be served by a local environment (WORKDIR, ENV and COPY can); use an image, or leave "
                "it out and name what it installs under polar_source.requirements"
            )
    return layout


def _lines(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """(instruction, its words, line number); continued lines are one."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    held, begun = "", 0
    for at, line in enumerate(lines, start=1):
        if line.lstrip().startswith("#") or (not held and not line.strip()):
            continue
        begun = begun or at
        held += line.removesuffix("\\") if line.endswith("\\") else line
        if line.endswith("\\"):
            continue
        name, _, rest = held.strip().partition(" ")
        yield name.upper(), _words(rest), begun
        held, begun = "", 0


def _words(text: str) -> list[str]:
    try:
        return [str(word) for word in json.loads(text)] if text.lstrip().startswith("[") else shlex.split(text)
    except ValueError:
        return text.split()  # the shell form of what is not read (LABEL, CMD)


def _literal(word: str, where: str) -> str:
    if any(mark in word for mark in "$*?["):
        raise ConfigError(f"{where}: {word!r} would have to be expanded; write it out, or use an image")
    return word


def _variables(words: list[str], where: str) -> dict[str, str]:
    if words and "=" not in words[0]:
        words = [f"{words[0]}={' '.join(words[1:])}"]
    if not words or not all("=" in word for word in words):
        raise ConfigError(f"{where}: write ENV NAME=value")
    return {word.partition("=")[0]: _literal(word.partition("=")[2], where) for word in words}


def _copies(words: list[str], workdir: str, where: str) -> list[tuple[str, str]]:
    if len(words) < 2 or any(word.startswith("--") for word in words):
        raise ConfigError(f"{where}: only COPY SOURCE... TARGET, without options, can be served by a local environment")
    *sources, target = [_literal(word, where) for word in words]
    at = str(PurePosixPath(workdir) / target)
    keeps = target.endswith("/") or len(sources) > 1 or target in (".", "./")
    return [(source.lstrip("/"), f"{at}/" if keeps else at) for source in sources]

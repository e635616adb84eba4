"""Task folders of Harbor and Terminal-Bench 2 (task.toml, schema 1.0 to 1.4) -> tasks. Reads files, makes nothing.

A folder holds ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and mostly ``solution/solve.sh``
(harborframework.com/docs/tasks; the models of the ``harbor`` package 0.26, which keys and defaults follow). What Harbor
ignores is ignored; what it would do and we cannot is refused, with file and key, and never left out in silence.

What is ours is said under ``[metadata.polar]``, which Harbor passes over, or on a dataset row that names the folder
(``{"polar_grader": "harbor", "folder": PATH, ...}``): ``polar_source`` and ``grade_in``. Sources:

- ``{"kind": "image", "image": NAME}`` or ``{"kind": "sif", "path": PATH}``: default with ``environment.docker_image``;
- ``{"kind": "dockerfile"}``: ``docker build`` of ``environment/``, once (default with a Dockerfile);
- ``{"kind": "local", "python": "3.11", "requirements": [...]}``: no image. The folder's author says that this machine's
  ``/usr``, shown read-only, and these packages are what the task needs (``tasks.harbor_prepare`` reads the Dockerfile).
"""

import difflib
import hashlib
import logging
import math
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar_env.errors import ConfigError
from polar_env.tasks import Task
from polar_env.tasks.fields import mapping, need

_LOG = logging.getLogger(__name__)

GRADER = "harbor"
DEPTH = 3
"""Folders below the one that is named in which task folders are looked for."""
SOURCE_KINDS = ("local", "dockerfile", "image", "sif")
GRADE_IN = ("agent", "fresh")
LARGEST = 64 * 1024 * 1024
"""Bytes that ``tests/``, or ``solution/``, may hold: they are carried into sandboxes."""

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-([^}]*))?\}")
_ROOT = (None, "root", 0, "0")


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class _Environment(_Part):
    """[environment]"""

    docker_image: str | None = None
    build_timeout_sec: float = Field(600.0, gt=0, allow_inf_nan=False)
    os: str = "linux"
    cpus: float | None = Field(None, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(None, gt=0)
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    workdir: str | None = None
    env: dict[str, str] = Field(default_factory=dict[str, str])
    network_mode: Literal["no-network", "public", "allowlist"] = "public"
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None


class _Agent(_Part):
    """[agent]"""

    timeout_sec: float | None = Field(None, gt=0, allow_inf_nan=False)
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class _Verifier(_Part):
    """[verifier]"""

    timeout_sec: float = Field(600.0, gt=0, allow_inf_nan=False)
    env: dict[str, str] = Field(default_factory=dict[str, str])
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class _Solution(_Part):
    """[solution]"""

    env: dict[str, str] = Field(default_factory=dict[str, str])


class _Toml(_Part):
    """task.toml"""

    schema_version: str = ""
    version: str = ""
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    environment: _Environment = _Environment.model_validate({})
    agent: _Agent = _Agent.model_validate({})
    verifier: _Verifier = _Verifier.model_validate({})
    solution: _Solution = _Solution.model_validate({})
    artifacts: list[str | dict[str, Any]] = Field(default_factory=list[str | dict[str, Any]])
    steps: list[dict[str, Any]] | None = None
    multi_step_reward_strategy: str | None = None
    source: str | None = None


def is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file()


def folders(place: Path) -> tuple[Path, ...]:
    """The task folders at or below ``place``, by path; hidden folders and links are passed over."""
    if is_task(place):
        return (place,)
    return tuple(_below(place, DEPTH))


def _below(place: Path, depth: int) -> Iterator[Path]:
    for path in sorted(place.iterdir()):
        if path.name.startswith(".") or path.is_symlink() or not path.is_dir():
            continue
        if is_task(path):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


def told_apart(place: Path) -> tuple[Path, ...]:
    """``folders``, refused when there is none or two have one name. Raises ConfigError."""
    found = folders(place)
    if not found:
        old = next((path for path in place.glob("**/task.yaml")), None)
        hint = (
            f" ({old.relative_to(place)} is Terminal-Bench's first format: convert it with `harbor tasks migrate`)"
            if old
            else ""
        )
        raise ConfigError(f"no task folder at or below {place}: none holds a task.toml{hint}")
    names: dict[str, Path] = {}
    for path in found:
        if path.name in names:
            raise ConfigError(f"{names[path.name]} and {path} have one name, and a task's name is its id: rename one")
        names[path.name] = path
    return found


def row_of(folder: Path) -> dict[str, Any]:
    """A dataset row that stands for the folder; ``task`` reads it when the task is wanted."""
    return {"instance_id": folder.name, "polar_grader": GRADER, "folder": str(folder.absolute())}


def task(row: Mapping[str, Any], where: str) -> Task:
    """The task of a folder. The task's ``row`` gets ``base_commit`` (a digest of the folder) and ``harbor`` (settings).

    Raises:
        ConfigError: names the file and the key that cannot be used, and what to do.
    """
    folder = Path(need(row, "folder", where, else_do="a row of a task folder names it")).expanduser()
    if not is_task(folder):
        raise ConfigError(f"{where}: field 'folder': {folder} holds no task.toml")
    told = _toml(folder / "task.toml")
    own = {**mapping(told.metadata.get("polar", {}), str(folder / "task.toml"), "metadata.polar")}
    own |= {key: row[key] for key in ("polar_source", "grade_in") if row.get(key)}
    _refuse(told, folder)
    source = _source(told, own, folder)
    settings = _settings(told, own, folder)
    full = {"patch": "", "test_patch": "", **row, "base_commit": digest(folder), "harbor": settings}
    return Task(str(row["instance_id"]), _instruction(folder), full, source, GRADER)


# --- task.toml ----------------------------------------------------------------------------------------------------


def _toml(path: Path) -> _Toml:
    try:
        told = _Toml.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: key {key!r}: {first['msg']}, not {first['input']!r:.80}") from error
    for name, part in (("", told), *((name, getattr(told, name)) for name in ("environment", "agent", "verifier"))):
        _note_unknown(path, name, part)
    return told


def _note_unknown(path: Path, name: str, part: BaseModel) -> None:
    """Harbor passes over keys it does not know, so folders hold some; one that is misspelt is worth a word."""
    known = list(type(part).model_fields)
    for key in part.model_extra or {}:
        if near := difflib.get_close_matches(key, known, n=1, cutoff=0.75):
            _LOG.warning("%s: key %r of [%s] is not known; is it %r?", path, key, name or "task.toml", near[0])


def _refuse(told: _Toml, folder: Path) -> None:
    """What Harbor does and we cannot: a task without it would be another task."""
    box, verifier = told.environment, told.verifier
    artifacts = [item if isinstance(item, str) else str(item.get("source", "")) for item in told.artifacts]
    cannot: tuple[tuple[str, object, str], ...] = (
        ("steps", told.steps, "multi-step tasks are not supported: make one folder per step"),
        ("environment.os", box.os.lower() != "linux", "only Linux is supported"),
        ("environment.gpus", box.gpus, "no sandbox of ours gives a GPU"),
        ("environment.tpu", box.tpu, "no sandbox of ours gives a TPU"),
        ("environment.mcp_servers", box.mcp_servers, "harnesses are given no MCP servers"),
        ("environment.skills_dir", box.skills_dir, "harnesses are given no skills"),
        ("environment.healthcheck", box.healthcheck, "sandboxes are not waited for: start what it checks in test.sh"),
        ("agent.user", told.agent.user not in _ROOT, "agent and verifier are the sandbox's one user"),
        ("verifier.user", verifier.user not in _ROOT, "agent and verifier are the sandbox's one user"),
        ("verifier.environment", verifier.environment, "the verifier runs in the task's own environment"),
        ("verifier.collect", verifier.collect, "collect in tests/test.sh instead"),
        (
            "artifacts",
            verifier.environment_mode == "separate" and any(path.startswith("/") for path in _outside(artifacts, box)),
            'a separate verifier gets the change of the work tree: set [metadata.polar] grade_in = "agent"',
        ),
    )
    for key, found, instead in cannot:
        if found:
            raise ConfigError(f"{folder / 'task.toml'}: key {key!r}: {instead}")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise ConfigError(f"{folder / 'environment' / name}: tasks of several containers are not supported")


def _outside(artifacts: list[str], box: _Environment) -> list[str]:
    """Artifacts that are not in the work tree; where that is, a Dockerfile may say, so an unset one holds none."""
    root = PurePosixPath(box.workdir or "/nowhere")
    return [path for path in artifacts if not PurePosixPath(path).is_relative_to(root)]


def _settings(told: _Toml, own: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What preparing and grading need, as plain JSON."""
    box, path = told.environment, folder / "task.toml"
    grade_in = str(own.get("grade_in") or ("fresh" if told.verifier.environment_mode == "separate" else "agent"))
    if grade_in not in GRADE_IN:
        raise ConfigError(f"{path}: grade_in must be one of {', '.join(GRADE_IN)}, not {grade_in!r}")
    if box.workdir is not None and not box.workdir.startswith("/"):
        raise ConfigError(f"{path}: key 'environment.workdir': {box.workdir!r} is not an absolute path")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder / 'tests' / 'test.sh'} is missing: it gives the reward")
    return {
        "workdir": box.workdir or "",
        "agent_timeout": told.agent.timeout_sec,
        "verifier_timeout": told.verifier.timeout_sec,
        "build_timeout": box.build_timeout_sec,
        "cpus": box.cpus,
        "memory_mb": box.memory_mb or _megabytes(box.memory, path),
        "env": _plain(box.env, path, "environment.env"),
        "verifier_env": _plain(told.verifier.env, path, "verifier.env"),
        "solution_env": _plain(told.solution.env, path, "solution.env"),
        "grade_in": grade_in,
        "solved": (folder / "solution" / "solve.sh").is_file(),
    }


def _megabytes(text: str | None, path: Path) -> int | None:
    """``memory = "2G"`` of schema 1.0."""
    if text is None:
        return None
    match = re.fullmatch(r"([\d.]+)\s*([GMK])B?", text.strip().upper())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ConfigError(f"{path}: key 'environment.memory': {text!r} is no size; write memory_mb = 2048")
    return max(1, int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]]))


def _plain(env: Mapping[str, str], path: Path, key: str) -> dict[str, str]:
    """``${VAR:-default}`` stands for its default and ``${VAR}`` is refused: nothing of this machine's environment,
    where keys and tokens are, goes into a sandbox."""

    def filled(match: re.Match[str]) -> str:
        if match[2] is None:
            raise ConfigError(
                f"{path}: key {key!r}: {match[0]} would show this machine's {match[1]} to the agent; write the value, "
                f"or ${{{match[1]}:-default}}"
            )
        return match[2]

    return {name: _TEMPLATE.sub(filled, value) for name, value in env.items()}


def _source(told: _Toml, own: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    path = folder / "task.toml"
    if (given := own.get("polar_source")) is not None:
        source = mapping(given, str(path), "polar_source")
        if source.get("kind") not in SOURCE_KINDS:
            raise ConfigError(f"{path}: polar_source.kind must be one of {', '.join(SOURCE_KINDS)}")
        return source
    if told.environment.docker_image:
        return {"kind": "image", "image": told.environment.docker_image}
    if (folder / "environment" / "Dockerfile").is_file():
        return {"kind": "dockerfile"}
    raise ConfigError(
        f"{path}: nothing says what the task runs in: set environment.docker_image, add environment/Dockerfile, or "
        'give [metadata.polar] polar_source = { kind = "local" } for one that needs no image'
    )


# --- files --------------------------------------------------------------------------------------------------------


def _instruction(folder: Path) -> str:
    """instruction.md as it stands, without the canary lines at its top, which mark test data and are not for agents."""
    path = folder / "instruction.md"
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read, and it is what the agent is asked: {error}") from error
    first = next((at for at, line in enumerate(lines) if not _CANARY.fullmatch(line.strip())), len(lines))
    text = "\n".join(lines[first:]).lstrip("\n") if first else "\n".join(lines)
    if not text.strip():
        raise ConfigError(f"{path} is empty, and it is what the agent is asked")
    return text


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Relative path -> (bytes, mode) of every file below ``folder``; none when it is not there. Blocks.

    Raises:
        ConfigError: a link, a device or more than LARGEST bytes: what would be carried into a sandbox is only files.
    """
    found: dict[str, tuple[bytes, int]] = {}
    size = 0
    for path in _walk(folder):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is a link or no file: put a copy in its place")
        size += status.st_size
        if size > LARGEST:
            raise ConfigError(f"{folder} holds more than {LARGEST} bytes: put what is so large into the image")
        found[path.relative_to(folder).as_posix()] = (path.read_bytes(), status.st_mode & 0o777)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def digest(folder: Path) -> str:
    """SHA-1 (hex, 40) over names, modes and bytes of a task folder; stands where a row has its base commit. Blocks."""
    told = hashlib.sha1(usedforsecurity=False)
    for path in _walk(folder):
        kind = "link" if path.is_symlink() else oct(path.lstat().st_mode & 0o111)
        body = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        told.update(f"{path.relative_to(folder).as_posix()}\0{kind}\0{len(body)}\0".encode() + body)
    return told.hexdigest()


def settings_of(task: Task) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", task.row["harbor"])


def folder_of(task: Task) -> Path:
    return Path(str(task.row["folder"]))

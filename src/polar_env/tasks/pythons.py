"""Base interpreters: the Python minor a task's pins were made for, found on this machine or installed by uv."""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from polar_env.config import child_environment
from polar_env.errors import ConfigError, SandboxError
from polar_env.tasks.process import run

_PROBE = """
import sys, json, ensurepip, venv
print(json.dumps(["%d.%d" % sys.version_info[:2], "%d.%d.%d" % sys.version_info[:3], sys.base_prefix]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A base Python that can make virtual environments (it has venv and ensurepip)."""

    minor: str
    version: str
    prefix: Path

    @property
    def binary(self) -> str:
        return str(self.prefix / "bin" / f"python{self.minor}")

    @property
    def usable(self) -> bool:
        """False for builds that do not keep ``bin/pythonX.Y`` under their prefix."""
        return Path(self.binary).exists()

    @property
    def mounts(self) -> tuple[tuple[Path, str], ...]:
        """What a sandbox must show besides /usr. The path is kept: shared builds find libpython by absolute path."""
        return () if self.prefix.is_relative_to("/usr") else ((self.prefix, str(self.prefix)),)


async def find_python(minor: str) -> Interpreter:
    """A Python ``minor`` ("3.9"): our own, PATH, beside our own, pyenv, what uv has, and last what uv can install.

    Raises:
        ConfigError: none can be had; says how to install one.
    """
    candidates = [Path(sys.base_prefix, "bin", f"python{minor}")]
    candidates += [Path(hit) for hit in [shutil.which(f"python{minor}", path=child_environment().get("PATH"))] if hit]
    for versions in (Path(sys.base_prefix).parent, Path.home() / ".pyenv" / "versions"):  # pyenv's, wherever it lives
        candidates += sorted(versions.glob(f"{minor}.*/bin/python{minor}"), reverse=True)
    for candidate in candidates:
        if candidate.exists() and (found := await _probe(candidate, minor)):
            return found
    if found := await _from_uv(minor):
        return found
    raise ConfigError(
        f"this task needs Python {minor} (with venv and ensurepip) and none was found on PATH, under ~/.pyenv or "
        f"through uv; install one (`pip install uv`, then `uv python install {minor}`) or leave the task out"
    )


async def _probe(binary: Path, minor: str) -> Interpreter | None:
    env = child_environment() | {"HOME": str(Path.home())}
    try:
        told = json.loads(await run((str(binary), "-c", _PROBE), f"probing {binary}", env=env, limit=30.0))
    except (SandboxError, ValueError):
        return None
    found = Interpreter(told[0], told[1], Path(told[2]))
    return found if found.minor == minor and found.usable else None


async def _from_uv(minor: str) -> Interpreter | None:
    """uv's interpreter, installed when it has none; ``None`` without uv or without its download site."""
    beside_us = f"{child_environment().get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    uv = shutil.which("uv", path=beside_us)
    if uv is None:
        return None
    env = child_environment("XDG_") | {"HOME": str(Path.home())}
    try:
        await run((uv, "python", "install", "--quiet", minor), f"uv installing Python {minor}", env=env)
        told = await run((uv, "python", "find", "--no-project", minor), "asking uv for a Python", env=env)
    except SandboxError:
        return None
    return await _probe(Path(told.decode().strip()), minor)

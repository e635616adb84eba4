"""Base interpreters: a Python of a wanted version, found on this machine or installed by uv. For tasks, whose pins were
made for one version, and for harnesses that do not run on ours.
"""

import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_env.config import child_environment
from polar_env.errors import PolarError

Ask = Callable[[Sequence[str], str, dict[str, str], float], Awaitable[str]]
"""(argv, what is being done, environment, seconds it may take) -> what it printed. Raises PolarError: it failed."""

UV_TIMEOUT = 180.0
"""Seconds uv may take to download an interpreter (about 30 MB)."""

_PROBE = (
    'import json, sys; list(map(__import__, sys.argv[1:])); v = "%d.%d.%d" % sys.version_info[:3]; '
    'print(json.dumps([v.rpartition(".")[0], v, sys.base_prefix]))'
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Python ``version`` ("3.9.18") at ``prefix``; ``minor`` is "3.9"."""

    minor: str
    version: str
    prefix: Path

    @property
    def binary(self) -> str:
        return str(self.prefix / "bin" / f"python{self.minor}")

    @property
    def usable(self) -> bool:
        """False for builds that do not keep ``bin/pythonX.Y`` under their prefix."""
        return Path(self.binary).is_file()

    @property
    def mounts(self) -> tuple[tuple[Path, str], ...]:
        """What a sandbox must show besides /usr. The path is kept: shared builds find libpython by absolute path."""
        return () if self.prefix.is_relative_to("/usr") else ((self.prefix, str(self.prefix)),)


async def find_interpreter(minors: Sequence[str], ask: Ask, modules: Sequence[str] = ()) -> Interpreter | None:
    """A Python of one of ``minors``, best first: our own, else on PATH, beside our own, of pyenv, what uv has or can
    install. ``None``: there is none that can import ``modules``."""
    for candidate in _candidates(minors):
        if found := await _probe(candidate, minors, ask, modules):
            return found
    for install in (False, True):
        for minor in minors[:1] if install else minors:
            if found := await _from_uv(minor, ask, modules, install=install):
                return found
    return None


def uv_program() -> str | None:
    """uv beside our interpreter, or on PATH."""
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.is_file() else shutil.which("uv")


def _candidates(minors: Sequence[str]) -> Iterator[str]:
    environment, ours = child_environment("HOME"), f"{sys.version_info.major}.{sys.version_info.minor}"
    if ours in minors:
        yield str(Path(sys.base_prefix, "bin", f"python{ours}"))
    home = Path(environment.get("HOME", "/nonexistent"))
    for minor in minors:
        if hit := shutil.which(f"python{minor}", path=environment.get("PATH")):
            yield hit
        for versions in (Path(sys.base_prefix).parent, home / ".pyenv" / "versions"):  # pyenv's, wherever it lives
            yield from map(str, sorted(versions.glob(f"{minor}.*/bin/python{minor}"), reverse=True))


async def _probe(binary: str, minors: Sequence[str], ask: Ask, modules: Sequence[str]) -> Interpreter | None:
    """``None`` for what is not there, does not run (pyenv's shims of other versions), or is not what its name says."""
    try:
        told = await ask((binary, "-c", _PROBE, *modules), f"probing {binary}", child_environment("HOME"), 30.0)
        minor, version, prefix = json.loads(told)
        found = Interpreter(minor, version, Path(prefix))
    except (PolarError, ValueError, TypeError):
        return None
    return found if found.minor in minors and found.usable else None


async def _from_uv(minor: str, ask: Ask, modules: Sequence[str], *, install: bool) -> Interpreter | None:
    """uv's interpreter; ``None`` without uv, without one, or without its download site."""
    uv, environment = uv_program(), child_environment("HOME", "XDG_")
    if uv is None:
        return None
    try:
        if install:
            argv = (uv, "python", "install", "--quiet", minor)
            await ask(argv, f"uv installing Python {minor}", environment, UV_TIMEOUT)
        told = await ask(
            (uv, "python", "find", "--no-project", minor), "asking uv for a Python", environment, UV_TIMEOUT
        )
    except PolarError:
        return None
    return await _probe(told.strip().rpartition("\n")[2], (minor,), ask, modules)

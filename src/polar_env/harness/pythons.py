"""A base interpreter for harnesses that do not run on ours."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polar_env.config import child_environment
from polar_env.errors import HarnessError
from polar_env.harness.install import run, uv_program

UV_TIMEOUT = 180.0
"""Seconds uv may take to download an interpreter (about 30 MB)."""

_PROBE = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.base_prefix]))"


@dataclass(frozen=True, slots=True)
class Python:
    """Python 3.``minor`` at ``prefix``."""

    minor: int
    prefix: Path

    @property
    def binary(self) -> str:
        return str(self.prefix / "bin" / f"python3.{self.minor}")

    @property
    def usable(self) -> bool:
        """False for builds that keep their program elsewhere."""
        return Path(self.binary).is_file()


async def find_python(who: str, oldest: int, newest: int) -> Python:
    """A Python from 3.``oldest`` to 3.``newest``: ours, else the newest of PATH, pyenv, what uv has or can download.

    Raises:
        HarnessError: there is none; says how to get one for ``who``.
    """
    wanted = range(newest, oldest - 1, -1)
    for candidate in _candidates(wanted):
        if found := await _probe(candidate, wanted):
            return found
    for minor in wanted:
        if found := await _from_uv(minor, wanted):
            return found
    if (found := await _from_uv(newest, wanted, install=True)) is not None:
        return found
    raise HarnessError(
        f"{who} runs on Python 3.{oldest} to 3.{newest} and none was found: ours is 3.{sys.version_info.minor}, and "
        f"there is none on PATH, under ~/.pyenv or through uv. Install one (`uv python install 3.{newest}`, pyenv, or "
        f"the system's package manager) and put python3.{newest} on PATH"
    )


def _candidates(wanted: range) -> Iterator[str]:
    if sys.version_info.minor in wanted:
        yield str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    environment = child_environment("HOME")
    for minor in wanted:
        name = f"python3.{minor}"
        if hit := shutil.which(name, path=environment.get("PATH", os.defpath)):
            yield hit
        home = Path(environment.get("HOME", "/nonexistent"))
        yield from map(str, sorted(home.glob(f".pyenv/versions/3.{minor}.*/bin/{name}"), reverse=True))


async def _probe(binary: str, wanted: range) -> Python | None:
    """``None`` for what is not there, does not run (pyenv's shims of other versions), or keeps no bin/python3.N."""
    try:
        told = json.loads(await run((binary, "-c", _PROBE), f"probing {binary}", child_environment("HOME"), limit=30.0))
        found = Python(told[1], Path(told[2]))
    except (HarnessError, ValueError, LookupError):
        return None
    return found if told[0] == 3 and found.minor in wanted and found.usable else None


async def _from_uv(minor: int, wanted: range, *, install: bool = False) -> Python | None:
    """uv's interpreter; ``None`` without uv, without one, or without its download site."""
    uv, environment, version = uv_program(), child_environment("HOME", "XDG_"), f"3.{minor}"
    if uv is None:
        return None
    try:
        if install:
            await run((uv, "python", "install", "--quiet", version), "uv installing Python", environment, UV_TIMEOUT)
        told = await run((uv, "python", "find", "--no-project", version), "asking uv for a Python", environment)
    except HarnessError:
        return None
    return await _probe(told.strip().rpartition("\n")[2], wanted)

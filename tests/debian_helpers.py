"""Debian's packages as a folder: downloaded and unpacked once per machine, by its own apt, and not installed."""

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from polar_env.tasks.once import make_once


class NoPackagesError(Exception):
    """Why this machine cannot have them."""


def unpacked(place: Path, packages: Sequence[str], proof: str, optional: Sequence[str] = ()) -> Path:
    """``place``, filled with the packages and the libraries they name, but for the C library.

    Args:
        proof: a file below ``place`` by which an earlier filling is known to be whole.
        optional: packages that some releases do not have.

    Raises:
        NoPackagesError: there is no apt, archive or package.
    """
    if not all(map(shutil.which, ("apt-get", "apt-cache", "dpkg"))):
        raise NoPackagesError("no Debian here: apt-get, apt-cache and dpkg are needed")

    async def fill(work: Path) -> None:
        await asyncio.to_thread(_fill, work, packages, optional)

    asyncio.run(make_once(place, lambda made: (made / proof).is_file(), fill))
    return place


def libraries(root: Path) -> list[Path]:
    """Folders below an unpacked root in which the loader must look."""
    return [place for pattern in ("usr/lib/*-linux-gnu", "lib/*-linux-gnu") for place in root.glob(pattern)]


def _fill(work: Path, packages: Sequence[str], optional: Sequence[str]) -> None:
    try:
        _download(work, packages, optional, [])
    except subprocess.CalledProcessError:  # a machine without package lists: they are fetched beside, not into it
        lists = work / "lists"
        (lists / "partial").mkdir(parents=True)
        options = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={lists}", "-o", "APT::Sandbox::User="]
        try:
            _called(work, "apt-get", *options, "update")
            _download(work, packages, optional, options)
        except subprocess.CalledProcessError as error:
            raise NoPackagesError(f"apt: {error.stderr.strip()[-200:]}") from None
        finally:
            shutil.rmtree(lists)
    for package in sorted(work.glob("*.deb")):
        _called(work, "dpkg", "-x", str(package), str(work))
        package.unlink()


def _download(work: Path, packages: Sequence[str], optional: Sequence[str], options: Sequence[str]) -> None:
    known = _called(work, "apt-cache", *options, "pkgnames", "docker-").split() if optional else []
    packages = [*packages, *(name for name in optional if name in known)]
    words = _called(work, "apt-cache", *options, "depends", *packages).split()
    needed = {word for before, word in itertools.pairwise(words) if before == "Depends:"}
    wanted = sorted(name for name in needed if name.startswith("lib") and name != "libc6")
    _called(work, "apt-get", *options, "download", *packages, *wanted)


def _called(where: Path, *command: str) -> str:
    try:
        return subprocess.run(command, cwd=where, capture_output=True, text=True, check=True, timeout=60).stdout
    except subprocess.TimeoutExpired as error:
        raise NoPackagesError(str(error)) from None

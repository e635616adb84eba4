"""Directories that are made once, however many rollouts and processes want them at the same time."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from polar_env.errors import SandboxError, boundary
from polar_env.steps import locked


async def make_once(place: Path, whole: Callable[[Path], bool], build: Callable[[Path], Awaitable[None]]) -> None:
    """Return when ``place`` is whole. It is built beside its place under a file lock and renamed into it.

    Args:
        whole: whether a directory can be used as it is; one that cannot is replaced.
        build: fills the empty directory it is given; whatever it raises is passed on and nothing half-made is left.
    """
    if await asyncio.to_thread(whole, place):
        return
    async with locked(place.with_name(place.name + ".lock"), SandboxError):
        if await asyncio.to_thread(whole, place):
            return
        with boundary(SandboxError, f"making room in {place.parent}"):
            work = await asyncio.to_thread(_room, place)
        try:
            await build(work)
            with boundary(SandboxError, f"putting {place.name} in its place"):
                await asyncio.to_thread(work.rename, place)
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, work, ignore_errors=True))


def _room(place: Path) -> Path:
    """An empty directory beside ``place``, and ``place`` itself gone if it was there and not whole."""
    if place.exists():
        shutil.rmtree(place)
    for left in place.parent.glob(f".{place.name}.*"):  # of a builder that was killed: we hold its lock now
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    work.chmod(0o755)
    return work

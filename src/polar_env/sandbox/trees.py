"""Host directories behind a sandbox: how they are shown, and how what it wrote is removed."""

import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from polar_env.sandbox import Overlay

PREFIX = "polar-box-"


def make(parent: str | None) -> Path:
    """A fresh scratch directory (mode 0700) under ``parent``, or the temporary directory."""
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))


_TOOLS = {"PATH": os.defpath, "LC_ALL": "C"}


def remove(tree: Path) -> None:
    """Remove what a sandbox wrote, whatever modes it gave its directories and however deep they lie (deeper than a path
    is long, which Python's own walk gives up on). Never follows a symbolic link. Blocks. Raises OSError."""
    subprocess.run(["chmod", "-R", "u+rwX", "--", tree], env=_TOOLS, capture_output=True, check=False)
    done = subprocess.run(["rm", "-rf", "--one-file-system", "--", tree], env=_TOOLS, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"{tree} cannot be removed: {done.stderr.decode(errors='replace').strip()[-300:]}")


def write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def wait_pidfd(pidfd: int, seconds: float) -> bool:
    """Is the process dead within ``seconds``? Blocks."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _overlay(source: Path, target: str, writes: str, scratch: Path | None, at: int) -> list[str]:
    if writes == "memory":
        return ["--overlay-src", os.fspath(source), "--tmp-overlay", target]
    assert scratch is not None
    if writes == "copy":
        copy = scratch / f"{at}.copy"
        shutil.copytree(source, copy, symlinks=True)
        return ["--bind", os.fspath(copy), target]
    upper, work = scratch / f"{at}.upper", scratch / f"{at}.work"
    upper.mkdir()
    work.mkdir()
    return ["--overlay-src", os.fspath(source), "--overlay", os.fspath(upper), os.fspath(work), target]


def mount_args(
    overlays: Iterable[Overlay], read_only: Iterable[tuple[str, str]], writes: str, scratch: Path | None
) -> list[str]:
    """bubblewrap arguments of a box's mounts, outer targets before the ones inside them.

    ``writes`` is where copy-on-write goes: ``memory`` (tmpfs), ``disk`` (upper directories under ``scratch``) or
    ``copy`` (a whole copy under ``scratch``, where overlayfs refuses).
    """
    mounts = [(target, ["--ro-bind", source, target]) for source, target in read_only]
    for at, overlay in enumerate(overlays):
        mounts.append((overlay.target, _overlay(overlay.source, overlay.target, writes, scratch, at)))
    mounts.sort(key=lambda mount: mount[0].rstrip("/").count("/"))
    return [arg for _, args in mounts for arg in args]

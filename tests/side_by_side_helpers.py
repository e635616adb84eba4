"""Which test files `make test` runs side by side: pytest-xdist hands out whole files, some of them together."""

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ALONE = {
    "mark.ray": "Ray: a process that names no cluster joins whichever this machine started last",
    "docker_engine()": "Docker: engines share /run/docker and /run/containerd",
}
"""Text in a test file -> why no two such files run at the same time."""


@cache
def kind(path: Path) -> str:
    """Why the file runs only after the others of its kind; empty for one that runs beside any."""
    text = path.read_text(encoding="utf-8")
    return next((why for mark, why in ALONE.items() if mark in text), "")


class Files(LoadFileScheduling):
    """Gives a worker a file at a time, so that a module's fixtures are set up once, or all files of a kind."""

    def _split_scope(self, nodeid: str) -> str:
        name = super()._split_scope(nodeid)
        return kind(self.config.rootpath / name) or name

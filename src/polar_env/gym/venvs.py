"""Our environment lent to Gym's servers, so that it builds none of its own."""

import sys
from collections.abc import Sequence
from pathlib import Path

from polar_env.gym import SERVERS


def link_venvs(directory: Path, servers: Sequence[str] = SERVERS) -> Path:
    """Point each server's venv at ours: with ``skip_venv_if_present`` Gym then builds none (gym_plugin facts 2.3)."""
    for server in servers:
        link = directory / server / ".venv"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(sys.prefix)
    return directory

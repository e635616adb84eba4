"""Sdists from the package registry, through pip's own settings (index, mirror, certificate, proxy), sha256 checked.

``pip download`` would run each sdist's ``setup.py`` to learn its metadata; here pip only finds the link and moves
bytes. pip's finder is internal API (stable since 19.3), so it runs in a child process and its failure is one message.
"""

import ast
import asyncio
import hashlib
import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from polar_env.config import child_environment
from polar_env.errors import SandboxError, boundary
from polar_env.tasks.process import run

_FIND_AND_FETCH = """
import sys
from pip._internal.commands import create_command
name, filename, target = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args([name])
session = command._build_session(options)
finder = command._build_package_finder(options=options, session=session, ignore_requires_python=True)
finder.format_control.disallow_binaries()
links = {c.link.filename: c.link for c in finder.find_all_candidates(name)}
if filename not in links:
    sys.exit(f"the registry lists {len(links)} files of {name}, and {filename} is not one of them")
link = links[filename]
if link.scheme == "file":
    body = open(link.file_path, "rb").read()
else:
    reply = session.get(link.url_without_fragment)
    reply.raise_for_status()
    body = reply.content
open(target, "wb").write(body)
"""

_SETTINGS = frozenset(
    {"index-url", "extra-index-url", "no-index", "find-links", "cert", "client-cert", "proxy", "trusted-host"}
    | {"timeout", "default-timeout", "retries"}
)
"""pip settings that say where packages come from; the rest (constraints, targets) must not shape a pinned build."""


async def fetch_sdist(store: Path, name: str, filename: str, sha256: str) -> Path:
    """The path of the sdist ``filename`` of project ``name``, fetched once into ``store``.

    Raises:
        SandboxError: the registry cannot be reached, lacks the file, or serves other bytes than ``sha256``.
    """
    target = store / f"{sha256[:12]}-{filename}"
    if await asyncio.to_thread(_holds, target, sha256):
        return target
    part = await asyncio.to_thread(_part, target)
    try:
        argv = (sys.executable, "-c", _FIND_AND_FETCH, name, filename, str(part))
        await run(argv, f"fetching {filename} from the package registry", env=_pip_environment(), limit=600.0)
        if not await asyncio.to_thread(_holds, part, sha256):
            raise SandboxError(f"{filename} from the registry does not have the sha256 {sha256}: not used")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


async def pip_settings() -> dict[str, str]:
    """Where this machine's pip takes packages from, as ``PIP_*`` variables (for a child without our config files)."""
    argv = (sys.executable, "-m", "pip", "config", "list")
    listing = await run(argv, "reading pip's settings", env=_pip_environment(), limit=60.0)
    return read_settings(listing.decode())


def read_settings(listing: str) -> dict[str, str]:
    """``pip config list`` -> ``PIP_*`` variables. Environment beats command sections beat global, as in pip."""
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        match = re.fullmatch(r"(global|install|:env:)\.([\w-]+)=('.*'|\".*\")", line.strip())
        if match and match[2] in _SETTINGS and ranks[match[1]] >= found.get(match[2], (0, ""))[0]:
            found[match[2]] = (ranks[match[1]], " ".join(str(ast.literal_eval(match[3])).split()))
    return {"PIP_" + key.upper().replace("-", "_"): value for key, (_, value) in found.items()}


def _pip_environment() -> dict[str, str]:
    """Our environment with pip importable: an interpreter without pip lends the wheel that ensurepip bundles."""
    env = child_environment() | {"HOME": str(Path.home()), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if not (Path(sysconfig.get_path("purelib")) / "pip").is_dir():
        bundled = sorted(Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled").glob("pip-*.whl"))
        env |= {"PYTHONPATH": str(bundled[-1])} if bundled else {}
    return env


def _part(target: Path) -> Path:
    """A fresh file beside ``target``, so that two processes fetching the same sdist never share one."""
    with boundary(SandboxError, f"making room in {target.parent}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
    return Path(name)


def _holds(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256

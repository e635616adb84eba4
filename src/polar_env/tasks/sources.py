"""Repository trees: an sdist, a git mirror, files in a row or a task of our own becomes two commits at a fixed id.

Why two commits: SWE-bench eval scripts run ``git show``; on a single commit that prints the whole tree into the log
(9.4 MB with non-UTF-8 bytes for one instance, and the official grader then cannot open it). The second commit is
empty, or holds a recipe's edits for a mirror, as the ``SWE-bench`` commit of the official images does.
"""

import asyncio
import importlib.resources
import json
import shutil
import stat
import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from polar_env.config import child_environment
from polar_env.errors import ConfigError, SandboxError, boundary
from polar_env.tasks.process import run
from polar_env.tasks.registry import fetch_sdist

EXCLUDE = ("*.egg-info", "__pycache__", "*.pyc", ".pytest_cache", ".eggs", "build", "dist")
"""Written to .git/info/exclude: what installing and testing leaves behind must not show up in a patch."""

SYMPY_TEST_SHIM = '''\
#!/usr/bin/env python
"""Runs sympy's own test runner over the named files: sdists leave bin/test out, and eval scripts call it."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))
flags = [word for word in sys.argv[1:] if word.startswith("-")]
files = [word for word in sys.argv[1:] if not word.startswith("-")]
if "-C" in flags:
    os.environ["SYMPY_USE_CACHE"] = "no"

import sympy

sys.exit(not sympy.test(*files, verbose="--verbose" in flags))
'''
_SHIMS = {"sympy_test": ("bin/test", SYMPY_TEST_SHIM)}


@cache
def sdist_table() -> Mapping[str, dict[str, Any]]:
    """instance_id -> recipe of the SWE-bench instances whose sdist is known to reproduce the official verdicts."""
    text = importlib.resources.files("polar_env.tasks").joinpath("sdist_instances.json").read_text("utf-8")
    return json.loads(text)


async def make_repository(source: Mapping[str, Any], base_commit: str, repo: Path, store: Path) -> str:
    """Fill the empty directory ``repo`` and return its HEAD: the same id for the same source, on any machine.

    Raises:
        SandboxError: the tree could not be fetched or unpacked. ConfigError: the source lacks something.
    """
    date = f"{source.get('base_date') or '2000-01-01T00:00:00'}Z"
    if source["kind"] == "git":
        await _fetch_mirror(source, base_commit, repo)
    elif source["kind"] == "sdist":
        sdist = await fetch_sdist(store / "sdists", source["name"], source["file"], source["sha256"])
        await asyncio.to_thread(_unpack, sdist, repo)
    elif source["kind"] == "files":
        with boundary(SandboxError, "writing the repository's files"):
            await asyncio.to_thread(write_files, source["files"], repo)
    else:
        await asyncio.to_thread(copy_embedded, str(source["path"]), repo)
    with boundary(ConfigError, "editing the tree as its recipe says"):
        await asyncio.to_thread(_edit, source, repo)
    if source["kind"] != "git":
        await _first_commit(repo, date)
    await git(repo, "add", "-A")
    await git(repo, "commit", "-q", "--allow-empty", "-m", "SWE-bench", date=date)
    if source.get("tag"):
        await git(repo, "tag", str(source["tag"]))
    return await _finish(repo)


async def git(repo: Path, *args: str, date: str = "") -> str:
    """Run git in ``repo`` without anybody's configuration, hooks or prompts; returns its standard output."""
    env = {
        "PATH": child_environment().get("PATH", "/usr/bin:/bin"),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
    }
    env |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date} if date else {}
    options = ("-c", "core.logAllRefUpdates=false", "-c", "gc.auto=0", "-c", "safe.directory=*")
    out = await run(("git", *options, "-C", str(repo), *args), f"git {args[0]} in the task's repository", env=env)
    return out.decode().strip()


def copy_embedded(name: str, repo: Path) -> None:
    """Lay out the tree of an embedded task. Its files end in ``.txt`` so that they are data to every tool of ours."""
    root = importlib.resources.files("polar_env.tasks").joinpath("embedded", name, "repo")
    with importlib.resources.as_file(root) as folder:
        for file in sorted(path for path in folder.rglob("*.txt") if path.is_file()):
            target = repo / file.relative_to(folder).with_suffix("")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())


def write_files(files: Mapping[str, str], repo: Path) -> None:
    """Lay out a tree that its row holds, path -> text. Raises ConfigError for a path out of the repository."""
    for name, text in files.items():
        if not name or name.startswith("/") or {"..", ".git"}.intersection(name.split("/")):
            raise ConfigError(f"polar_source.files names {name!r}: paths are relative to the repository")
        target = repo / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        if text.startswith("#!"):
            target.chmod(0o755)


async def _init(repo: Path) -> None:
    await git(repo, "init", "-q", "-b", "main", "--template=")
    for key, value in (
        ("user.email", "setup@swebench.config"),
        ("user.name", "SWE-bench"),
        ("core.autocrlf", "false"),
        ("commit.gpgsign", "false"),
    ):
        await git(repo, "config", key, value)
    info = repo / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "exclude").write_text("".join(f"{line}\n" for line in EXCLUDE))


async def _first_commit(repo: Path, date: str) -> None:
    await _init(repo)
    # Not -f: what a project's own .gitignore hides (pytest's generated _version.py) would make installing dirty it.
    await git(repo, "add", "-A")
    await git(repo, "commit", "-q", "-m", "sdist", date=date)


async def _fetch_mirror(source: Mapping[str, Any], base_commit: str, repo: Path) -> None:
    """One commit of a local mirror, and nothing else: no later commit may be in the object store (the fix is there)."""
    url = _mirror_url(str(source.get("mirror", "")))
    await _init(repo)
    upload = "git -c safe.directory=* -c uploadpack.allowAnySHA1InWant=true upload-pack"
    await git(repo, "fetch", "-q", "--no-tags", "--depth", "1", "--upload-pack", upload, url, base_commit)
    await git(repo, "reset", "-q", "--hard", "FETCH_HEAD")


def _mirror_url(path: str) -> str:
    mirror = Path(path).expanduser()
    if not path or not mirror.is_dir():
        raise ConfigError(f"polar_source.mirror must be a local git repository; {path!r} is not a directory")
    return mirror.resolve().as_uri()


async def _finish(repo: Path) -> str:
    """Pack, and drop what points elsewhere; the repository knows its two commits and nothing more."""
    await git(repo, "repack", "-adq", "--threads=1")
    for name in ("FETCH_HEAD", "ORIG_HEAD", "COMMIT_EDITMSG", "logs", "hooks", "branches", "description"):
        path = repo / ".git" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if dirty := await git(repo, "status", "--porcelain"):
        raise SandboxError(f"the new repository is not clean: {dirty[:300]}")
    return await git(repo, "rev-parse", "HEAD")


def _unpack(sdist: Path, repo: Path) -> None:
    """Untar without the top folder, links out of the tree, foreign owners or egg-info."""
    with boundary(SandboxError, f"unpacking {sdist.name}"):
        try:
            with tarfile.open(sdist) as tar:
                tar.extractall(repo, filter=_strip_one)  # noqa: S202 - the data filter judges each member
        except tarfile.TarError as error:
            raise SandboxError(f"unpacking {sdist.name}: {error}") from error
        for folder in [path for path in repo.rglob("*.egg-info") if path.is_dir() and not path.is_symlink()]:
            shutil.rmtree(folder, ignore_errors=True)


def _strip_one(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    rest = member.name.lstrip("./").partition("/")[2]
    if not rest:
        return None
    linkname = member.linkname.partition("/")[2] if member.islnk() else member.linkname
    return tarfile.data_filter(member.replace(name=rest, linkname=linkname, deep=False), path)


def _edit(source: Mapping[str, Any], repo: Path) -> None:
    """A recipe's edits (first occurrence on each line, as the benchmark's own) and files it adds."""
    for edit in source.get("edits", ()):
        file = repo / edit["file"]
        lines = file.read_text("utf-8").splitlines(keepends=True)
        file.write_text("".join(line.replace(edit["old"], edit["new"], 1) for line in lines), "utf-8")
    for shim in source.get("shims", ()):
        name, text = _SHIMS[shim]
        target = repo / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        target.chmod(target.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

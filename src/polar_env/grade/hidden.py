"""The files the hidden tests consist of, made on the host and put into a sandbox from outside.

The official script checks them out and applies the test patch inside, where a patch can make both fail: its own tests
run then. Here their content is known before the sandbox exists, and whatever lies in their place is removed first.
"""

import asyncio
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polar_env.config import child_environment
from polar_env.errors import GradeError, SandboxError, boundary
from polar_env.grade.audit import outside
from polar_env.grade.diff import sections
from polar_env.sandbox.sandbox import Sandbox
from polar_env.tasks import WORKDIR, Prepared

_PYTEST = re.compile(r"^(?P<file>[^:]+\.py)::")
_TIMEOUT = 120.0
_PLACE = r"""
set -e
chmod u+rwx . || :
for path do
    rest=$path here=.
    while case $rest in */*) true;; *) false;; esac; do
        here=$here/${rest%%/*} rest=${rest#*/}
        if [ -L "$here" ] || { [ -e "$here" ] && [ ! -d "$here" ]; }; then rm -f -- "$here"; fi
        if [ -d "$here" ]; then chmod u+rwx -- "$here" || :; fi
    done
    rm -rf -- "./$path"
done
find . -type d ! -perm -700 -exec chmod u+rwx -- {} \;
find . -name __pycache__ -prune -exec rm -rf -- {} +
exec tar -xmpf - --no-same-owner
"""
"""Arguments: the paths. Standard input: a tar of what stands there afterwards. Compiled files go, for one that was made
elsewhere would run in a test's stead."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Path below the repository -> content, or ``None`` where no file may stand; and the paths that are executable."""

    files: Mapping[str, bytes | None]
    executable: frozenset[str] = frozenset()


def listed(row: Mapping[str, Any], field: str) -> list[str]:
    """FAIL_TO_PASS or PASS_TO_PASS: a list, or the JSON text of one."""
    value = row[field]
    return json.loads(value) if isinstance(value, str) else list(value)


def touched(row: Mapping[str, Any]) -> frozenset[str]:
    """Paths the test patch names, and those of the row's own test files (``polar_files``)."""
    parts = sections(str(row.get("test_patch", "")).encode())
    patched = (path.decode("utf-8", "surrogateescape") for part in parts for path in part.paths)
    return frozenset(row.get("polar_files", ())).union(patched)


def named(row: Mapping[str, Any]) -> frozenset[str]:
    """Test files by the ids of the listed tests, for ids in pytest's form."""
    ids = [*listed(row, "FAIL_TO_PASS"), *listed(row, "PASS_TO_PASS")]
    return frozenset(match["file"] for test in ids if (match := _PYTEST.match(test)))


async def hidden(prepared: Prepared, sandbox: Sandbox | None = None) -> Hidden:
    """The test files of a task: what the test patch makes of the base tree, and every file its ids name as it is there.

    ``sandbox`` is read when only the image holds the repository, so nothing may have run in it.

    Raises:
        GradeError: the test patch does not fit the task's tree.
    """
    row = prepared.task.row
    paths = touched(row) | named(row)
    if prepared.repo is None:
        assert sandbox is not None
        base: dict[str, bytes] = {}
        for path in sorted(paths):
            with suppress(SandboxError):  # the test patch creates it
                base[path] = await sandbox.read(f"{WORKDIR}/{path}")
    else:
        base = await asyncio.to_thread(_read, prepared.repo, paths)
    made = await asyncio.to_thread(make, base, paths, str(row.get("test_patch", "")).encode())
    own = {path: text.encode() for path, text in row.get("polar_files", {}).items() if text is not None}
    return replace(made, files={**made.files, **own})


def _read(repo: Path, paths: Iterable[str]) -> dict[str, bytes]:
    with boundary(GradeError, f"reading the test files of {repo.name}"):
        return {path: (repo / path).read_bytes() for path in paths if (repo / path).is_file()}


def make(base: Mapping[str, bytes], paths: Iterable[str], test_patch: bytes) -> Hidden:
    """Apply the test patch to the base files. Blocks. Raises GradeError when it does not apply."""
    with tempfile.TemporaryDirectory(prefix="polar-tests-") as folder, boundary(GradeError, "making the hidden tests"):
        root = Path(folder)
        for path, data in base.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        if test_patch.strip():
            _git_apply(root, test_patch)
        files = {path: (root / path).read_bytes() if (root / path).is_file() else None for path in sorted(paths)}
        executable = {path for path, data in files.items() if data is not None and (root / path).stat().st_mode & 0o100}
    return Hidden(files, frozenset(executable))


def _git_apply(folder: Path, patch: bytes) -> None:
    env = {**child_environment(), "GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["git", "apply", "-"], input=patch, cwd=folder, env=env, capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise GradeError(f"the row's test patch does not apply to the task's tree: {words}")


async def place(sandbox: Sandbox, tests: Hidden) -> str:
    """Put the files where they belong; empty when they are there, else why not (only what ran before can be to blame,
    for in a fresh sandbox this succeeds)."""
    done = await sandbox.exec(outside(_PLACE, *tests.files), cwd=WORKDIR, stdin=_tar(tests), timeout=_TIMEOUT)
    if done.code == 0:
        return ""
    return f"the tests could not be put in place: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}"


def _tar(tests: Hidden) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for path, data in tests.files.items():
            if data is not None:
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(data), 0o755 if path in tests.executable else 0o644
                tar.addfile(entry, io.BytesIO(data))
    return held.getvalue()

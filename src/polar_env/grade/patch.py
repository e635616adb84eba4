"""The change a harness left behind, extracted against a baseline the agent never touched.

The agent's own .git, its index, configuration, hooks and attributes are never read: a patch is the difference between
two trees that our git wrote into a directory of our own (design: 19 of 19 behaviours survive this, 3 of 19 a plain
``git diff``).
"""

import asyncio
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path

from polar_env.config import child_environment
from polar_env.errors import HarnessError, SandboxError, boundary
from polar_env.grade.review import MAX_BYTES
from polar_env.sandbox import ExecResult
from polar_env.sandbox.sandbox import Sandbox
from polar_env.tasks import WORKDIR, Prepared


class UnreadableChangeError(HarnessError):
    """The agent left a tree that git cannot read (a name git refuses, a closed directory): its doing, so no patch and
    no mask. Were it ours, an agent could mask its failures."""


TIMEOUT = 300.0
"""Seconds one extraction step may take (sympy: 2 s)."""

_SCRATCH = "/tmp/.polar-git"  # noqa: S108 - in the sandbox, and only after its processes were killed
_JUNK = ("__pycache__", "*.pyc", "*.pyo", "*.egg-info", ".eggs", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".tox",
         ".nox", ".hypothesis", ".coverage", ".venv", "node_modules", "*.so", "*.o", "*.pyd")  # fmt: skip
"""What running, testing and installing leave behind: never part of a change."""
_CONFIG = """[core]
	fileMode = true
	symlinks = true
	bare = false
	autocrlf = false
	safecrlf = false
	ignoreCase = false
	hooksPath = /dev/null
	fsmonitor = false
	excludesFile = /dev/null
	attributesFile = /dev/null
	quotePath = true
	compression = 1
	bigFileThreshold = 8m
[gc]
	auto = 0
"""
"""The whole configuration of our git directory."""
_ATTRIBUTES = "* -text -ident !eol !filter !diff !merge !working-tree-encoding\n"
"""Bytes as they are, whatever the tree's own .gitattributes say."""
_FILES: Mapping[str, str] = {"POLAR_CONFIG": _CONFIG, "POLAR_ATTRIBUTES": _ATTRIBUTES}
_GIT_ENV: Mapping[str, str] = {
    "GIT_DIR": _SCRATCH,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C",
}

_SNAPSHOT = r"""
set -e
env -u GIT_WORK_TREE git init -q --bare "$GIT_DIR"
printf '%s' "$POLAR_CONFIG" > "$GIT_DIR/config"
printf '%s' "$POLAR_ATTRIBUTES" > "$GIT_DIR/info/attributes"
git add -A --force -- .
git write-tree > "$GIT_DIR/polar-baseline"
git repack -adq
rm -rf "$GIT_DIR/hooks"
"""
_HIDE = r"""
for path do
    rm -rf -- "$path"
    if [ -e "$path" ]; then echo "$path is not for the agent and cannot be removed" >&2; exit 9; fi
done
"""
_EXTRACT = r"""
rm -rf "$GIT_DIR"
set -e
mkdir -p "$GIT_DIR"
tar -C "$GIT_DIR" -xf -
not_more() {
    [ "$1" -le "$2" ] || { echo "over $2 $3" >&2; exit 8; }
}
chmod u+rwx "$GIT_WORK_TREE"
own() { find . -maxdepth 200 -path ./.git -prune -o "$@"; }
count() { awk 'END {print NR}'; }
sum() { awk '{n += $1} END {print int(n / '"$1"') + 0}'; }
closed=$(own -type d ! -perm -700 -exec chmod u+rwx {} \; -printf x | head -c 1001 | wc -c)
not_more "$closed" 1000 'closed directories'
not_more "$(own -printf x | head -c 100001 | wc -c)" 100000 'files'
not_more "$(own -printf '%d\n' | awk '$1 > most {most = $1} END {print most + 0}')" 199 'folders deep'
own -name .git -prune -exec rm -rf {} + || :
own -type f ! -perm -400 -exec chmod u+r {} + || :
not_more "$(own -name .gitattributes ! -type f -printf x | wc -c)" 0 '.gitattributes that are no files'
base=$(cat "$GIT_DIR/polar-baseline") || exit 9
theirs=$(git ls-tree -r -l "$base") || exit 9
sized() {
    printf '%s\n' "$theirs" | awk -v name="$1" -F '\t' '($2 ~ name) == '"$2"' {split($1, word, " "); print word[4]}'
}
rules=$(own -name .gitattributes -printf '%s\n' | sum 1)
not_more "$rules" $(($(sized '(^|/)[.]gitattributes"?$' 1 | sum 1) + 4096)) 'bytes of .gitattributes'
sizes() {
    own \( -name node_modules -o -name .venv \) -prune -o \( -type f -o -type l \) \
        ! -name '*.so' ! -name '*.o' -printf '%s\n'
}
measured=$(sizes)
known=$(sized '(^|/)(node_modules|[.]venv)/' 0)
not_more "$(printf '%s\n' "$measured" | count)" $(($(printf '%s\n' "$known" | count) + 20000)) 'files'
not_more "$(printf '%s\n' "$measured" | sum 1048576)" $(($(printf '%s\n' "$known" | sum 1048576) + 256)) MiB
for name in build dist; do
    git cat-file -e "$base:$name" 2>/dev/null || set -- "$@" ":(exclude,top)$name"
done
git add -A --force -- . "$@"
tree=$(git write-tree)
diff() {
    git diff-tree -p -r --binary --full-index --no-ext-diff --no-textconv --no-renames --no-color \
        --no-indent-heuristic --src-prefix=a/ --dst-prefix=b/ "$base" "$tree" || echo $? > "$GIT_DIR/polar-code"
}
diff | head -c "$POLAR_MOST"
[ ! -e "$GIT_DIR/polar-code" ] || [ "$(cat "$GIT_DIR/polar-code")" = 141 ]
"""
"""Reads the baseline's tar from standard input; its arguments are the paths to leave out; prints the patch.

What the agent left is measured first: a sparse file of 200 GB, a million directories, a FIFO where git looks for
attributes would use up the time of this script, which masks, and an agent must not be able to mask its failures (a busy
machine reads 256 MiB of noise in 20,000 files in a minute). Its .git, which git add passes by, is not walked through.
The largest repository of SWE-bench has 20,000 files of 300 MB. A patch is cut (SIGPIPE: 141) long after it is too large
to be graded."""
_OURS = 9
"""Exit code of that script when the baseline, which is ours, is broken; everything else is the tree the agent left."""
_MOST = 2 * MAX_BYTES
"""Bytes of a patch that are read: none this long is graded."""
_LEFT_OUT = tuple(f":(exclude,glob)**/{name}{below}" for name in _JUNK for below in ("", "/**"))


@lru_cache(maxsize=8)
def _baseline_of(repo: Path) -> bytes:
    """A tar of a bare git directory that holds the tree of ``repo`` as it is, ignored files included."""
    with tempfile.TemporaryDirectory(prefix="polar-base-") as folder:
        git_dir = Path(folder, "git")
        env = {**_GIT_ENV, "GIT_DIR": os.fspath(git_dir), "GIT_WORK_TREE": os.fspath(repo)}
        env |= {**_FILES, "PATH": child_environment().get("PATH", os.defpath)}
        with boundary(SandboxError, f"taking the baseline of {repo.name}"):
            done = subprocess.run(
                ["sh", "-c", _SNAPSHOT], cwd=repo, env=env, capture_output=True, timeout=TIMEOUT, check=False
            )
        if done.returncode:
            raise SandboxError(f"taking the baseline of {repo.name}: {done.stderr.decode('utf-8', 'replace')[-500:]}")
        return _tar(git_dir)


def _tar(folder: Path) -> bytes:
    held = BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        tar.add(folder, arcname=".")
    return held.getvalue()


async def snapshot(sandbox: Sandbox, workdir: str = WORKDIR, hide: Iterable[str] = ()) -> bytes:
    """The baseline of a repository that only the image holds, at ``workdir``: call it before the agent starts.

    ``hide`` are paths that the agent may not see. They are removed first, so that none of it is in a patch.

    Raises:
        SandboxError: git is missing in the image, or failed, or a path cannot be removed.
    """
    script = f'{_HIDE}{_SNAPSHOT}tar -C "$GIT_DIR" -cf - .\nrm -rf "$GIT_DIR"'
    return (await _run(sandbox, script, *hide, env=_FILES, at=workdir, limit=1 << 31)).stdout


async def extract(sandbox: Sandbox, prepared: Prepared, baseline: bytes | None = None) -> bytes:
    """The agent's change as a patch (bytes, ``git apply`` format, binary files included); empty when there is none.

    Call it after ``sandbox.kill()``: the files must not move. Committed, staged, untracked and ignored files count;
    what tests and builds leave behind does not. ``baseline`` is a ``snapshot``, needed when ``prepared.repo`` is None.

    Raises:
        SandboxError: the sandbox failed, or it took too long; says nothing about the change.
        UnreadableChangeError: git cannot read what the agent left.
    """
    if baseline is None:
        if prepared.repo is None:
            raise SandboxError("the repository is in the image: take grade.patch.snapshot() before the agent starts")
        baseline = await asyncio.to_thread(_baseline_of, prepared.repo)
    at, most = prepared.workdir, {"POLAR_MOST": str(_MOST)}
    done = await _run(sandbox, _EXTRACT, *_LEFT_OUT, stdin=baseline, at=at, env=most, limit=2 * _MOST)
    return done.stdout


async def _run(
    sandbox: Sandbox,
    script: str,
    *words: str,
    limit: int,
    at: str,
    stdin: bytes = b"",
    env: Mapping[str, str] = _GIT_ENV,
) -> ExecResult:
    argv = ["sh", "-c", script, "polar", *words]
    inside = {**_GIT_ENV, **env, "GIT_WORK_TREE": at}
    done = await sandbox.exec(argv, env=inside, cwd=at, stdin=stdin, timeout=TIMEOUT, output_limit=limit)
    if done.code != 0:
        why = "it took too long" if done.timed_out else done.stderr.decode("utf-8", "replace")[-500:].strip()
        ours = done.timed_out or done.code == _OURS
        raise (SandboxError if ours else UnreadableChangeError)(f"extracting the patch: {why}")
    return done

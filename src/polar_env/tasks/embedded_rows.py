"""Tasks of our own as dataset rows: small repositories with a real bug, an issue, hidden tests and a fix.

``embedded/<name>/`` holds ``task.json``, ``issue.md``, ``gold.patch``, ``test.patch`` and ``repo/``; every file under
``repo/`` ends in ``.txt`` so that linters, type checkers and the architecture test see data, not code of this package.
"""

import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources.abc import Traversable
from typing import Any

REQUIREMENTS = (
    "iniconfig==2.1.0",
    "packaging==25.0",
    "pluggy==1.6.0",
    "pygments==2.19.2",
    "pytest==8.4.2",
    "setuptools==80.9.0",
    "wheel==0.45.1",
)
"""Pins of every embedded task's environment, for any Python >= 3.11."""

INSTALL = "python -m pip install -e ."


@cache
def embedded_rows() -> tuple[dict[str, Any], ...]:
    """The embedded tasks in SWE-bench's row form (v5 fields), with a ``polar_source`` each."""
    return tuple(_row(folder) for folder in sorted(_root().iterdir(), key=lambda f: f.name) if folder.is_dir())


def tree_digest(name: str) -> str:
    """SHA-1 (hex, 40) over the names and bytes of an embedded repository; stands where a row has its base commit."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path, body in _walk(_root().joinpath(name, "repo"), ""):
        digest.update(f"{path}\0{len(body)}\0".encode() + body)
    return digest.hexdigest()


def eval_script(base_commit: str, test_patch: str, test_files: list[str]) -> str:
    """An eval script in the form of SWE-bench's own: same steps, same markers, so one grading path serves both."""
    files = " ".join(test_files)
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            "source /opt/miniconda3/bin/activate",
            "conda activate testbed",
            "cd /testbed",
            "git config --global --add safe.directory /testbed",
            "git status",
            "git show",
            f"git -c core.fileMode=false diff {base_commit}",
            INSTALL,
            f"git checkout {base_commit} {files}",
            f"git apply -v - <<'EOF_114329324912'\n{test_patch}\nEOF_114329324912",
            ": '>>>>> Start Test Output'",
            f"pytest -rA {files}",
            ": '>>>>> End Test Output'",
            f"git checkout {base_commit} {files}",
            "",
        ]
    )


def _row(folder: Traversable) -> dict[str, Any]:
    facts = json.loads(folder.joinpath("task.json").read_text("utf-8"))
    test_patch = folder.joinpath("test.patch").read_text("utf-8")
    base = tree_digest(folder.name)
    tests = re.findall(r"^--- a/(.+)$", test_patch, re.MULTILINE)
    return {
        "instance_id": facts["instance_id"],
        "repo": facts["repo"],
        "version": facts["version"],
        "base_commit": base,
        "patch": folder.joinpath("gold.patch").read_text("utf-8"),
        "test_patch": test_patch,
        "problem_statement": folder.joinpath("issue.md").read_text("utf-8"),
        "hints_text": "",
        "created_at": "2026-01-01T00:00:00Z",
        "FAIL_TO_PASS": json.dumps(facts["FAIL_TO_PASS"]),
        "PASS_TO_PASS": json.dumps(facts["PASS_TO_PASS"]),
        "eval_script": eval_script(base, test_patch, tests),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "image": "",
        "polar_source": {
            "kind": "embedded",
            "path": folder.name,
            "base_date": "2026-01-01T00:00:00",
            "requirements": list(REQUIREMENTS),
            "install": INSTALL,
        },
    }


def _root() -> Traversable:
    return importlib.resources.files("polar_env.tasks").joinpath("embedded")


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for item in sorted(folder.iterdir(), key=lambda f: f.name):
        if item.is_dir():
            yield from _walk(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".txt"):
            yield f"{prefix}{item.name}", item.read_bytes()

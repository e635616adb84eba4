"""One small repository with a bug, as a row of each shape: your own, SWE-Gym's, R2E-Gym's."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.tasks import Prepared
from polar_env.tasks.prepare import eval_rewrites
from polar_env.tasks.rows import task_of
from sandbox_helpers import git_repo, prepared_of

CODE = "def half(n):\n    return n / 2\n\n\ndef double(n):\n    return n * 2\n"
SEEN = "import gadget\n\n\ndef test_double():\n    assert gadget.double(2) == 4\n"
TESTS = (
    f"{SEEN}\n\ndef test_half():\n    assert gadget.half(5) == 2\n\n\n"
    "class TestBoth:\n    def test_back(self):\n        assert gadget.double(gadget.half(6)) == 6\n"
)
FIX = (
    "diff --git a/gadget.py b/gadget.py\nindex 1111111..2222222 100644\n--- a/gadget.py\n+++ b/gadget.py\n"
    "@@ -1,5 +1,5 @@\n def half(n):\n-    return n / 2\n+    return n // 2\n \n \n def double(n):\n"
)
"""The right fix."""
OTHER_FIX = FIX.replace("n // 2", "int(n / 2)")
TEST_PATCH = (
    "diff --git a/tests/test_gadget.py b/tests/test_gadget.py\n--- a/tests/test_gadget.py\n+++ b/tests/test_gadget.py\n"
    "@@ -3,3 +3,7 @@ import gadget\n \n def test_double():\n     assert gadget.double(2) == 4\n+\n+\n"
    "+def test_half():\n+    assert gadget.half(5) == 2\n"
)
IDS = ["tests/test_gadget.py::test_half"], ["tests/test_gadget.py::test_double"]
FILES = {"gadget.py": CODE, "tests/test_gadget.py": SEEN}
PYTEST = "python -m pytest -rA -p no:cacheprovider"


def own_row(**fields: Any) -> dict[str, Any]:
    """A row of kind tests_pass; a field set to ``...`` is left out."""
    row = {
        "instance_id": "own__gadget-1",
        "problem_statement": "half(5) must be 2.",
        "test_command": f"{PYTEST} tests",
        "tests": [*IDS[0], *IDS[1]],
        "test_files": {"tests/test_gadget.py": TESTS},
        "patch": FIX,
        "polar_source": {"kind": "files", "files": FILES},
    } | fields
    return {key: value for key, value in row.items() if value is not ...}


def swegym_row(**fields: Any) -> dict[str, Any]:
    """A row as SWE-Gym has them: eleven fields, lists as lists."""
    row = {
        "instance_id": "getmoto__moto-7023",
        "hints_text": "",
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "created_at": "2023-11-13 21:37:46",
        "problem_statement": "half(5) must be 2.",
        "repo": "getmoto/moto",
        "base_commit": "a" * 40,
        "version": "4.2",
        "PASS_TO_PASS": IDS[1],
        "FAIL_TO_PASS": IDS[0],
    } | fields
    return {key: value for key, value in row.items() if value is not ...}


def r2e_log(**statuses: str) -> str:
    """A run as R2E-Gym stores it: the first file's tests, under pytest."""
    lines = [f"{told} r2e_tests/test_1.py::{name.replace('__', '::')}" for name, told in statuses.items()]
    return "\n".join(["collected 3 items", "=== short test summary info ===", *lines, "=== 3 tests in 0.1s ==="])


def r2e_row(**fields: Any) -> dict[str, Any]:
    """A row as R2E-Gym-Subset has them (the columns that are read, and one that is not)."""
    ran = {
        "test_file_names": ["test_1.py"],
        "test_file_codes": [TESTS],
        "old_commit_res_stdout": r2e_log(test_double="PASSED", test_half="FAILED", TestBoth__test_back="PASSED"),
        "new_commit_res_stdout": r2e_log(test_double="PASSED", test_half="PASSED", TestBoth__test_back="PASSED"),
    }
    row = {
        "repo_name": "pillow",
        "docker_image": "namanjain12/pillow_final:4bc3bd6a",
        "commit_hash": "4bc3bd6a" * 5,
        "parsed_commit_content": json.dumps(commit_of(FIX)),
        "execution_result_content": json.dumps(ran),
        "modified_files": ["gadget.py"],
        "problem_statement": "Consider this.\n[ISSUE]\nhalf(5) must be 2.\n[/ISSUE]\nThanks.",
        "expected_output_json": json.dumps(
            {"test_double": "PASSED", "test_half": "PASSED", "TestBoth.test_back": "PASSED"}
        ),
    } | fields
    return {key: value for key, value in row.items() if value is not ...}


def commit_of(patch: str) -> dict[str, Any]:
    """A git patch as R2E-Gym's ``ParsedCommit`` stores it."""
    return {"old_commit_hash": "b" * 40, "new_commit_hash": "c" * 40, "commit_message": "fix", "commit_date": "2020",
            "file_diffs": [_file(part) for part in re.split(r"(?m)^(?=diff --git )", patch) if part]}  # fmt: skip


def _file(part: str) -> dict[str, Any]:
    head, *hunks = re.split(r"(?m)^(?=@@ )", part)
    lines = head.splitlines()
    path = lines[0].rpartition(" b/")[2]
    index = next((re.match(r"index (\w+)\.\.(\w+) ?(\d*)", line) for line in lines if line.startswith("index ")), None)
    misc = next((line for line in lines if line.startswith(("new file", "deleted file"))), None)
    ends = {line[:3]: {"path": line[4:]} for line in lines if line.startswith(("--- ", "+++ "))}
    return {
        "header": {"file": {"path": path}, "misc_line": misc},
        "index_line": index and {"old_commit_hash": index[1], "new_commit_hash": index[2], "mode": index[3]},
        "minus_file": ends.get("---"),
        "plus_file": ends.get("+++"),
        "hunks": [_hunk(hunk) for hunk in hunks],
    }


def _hunk(text: str) -> dict[str, Any]:
    first, *lines = text.removesuffix("\n").split("\n")
    match = re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(.*)", first)
    assert match
    numbers = [None if number is None else int(number) for number in match.groups()[:4]]
    kinds = {" ": "context", "+": "added", "-": "deleted", "\\": "note"}
    content = [{"type": kinds[line[0]], "content": line[2:] if line[0] == "\\" else line[1:]} for line in lines]
    return {
        "descriptor": {
            "old_range": {"start": numbers[0], "length": numbers[1]},
            "new_range": {"start": numbers[2], "length": numbers[3]},
            "section": match[5],
        },
        "line_group": {"all_lines": content},
    }


def ready(folder: Path, row: Mapping[str, Any], files: Mapping[str, str] = FILES) -> Prepared:
    """The row's task on a real repository, with this test run's own Python and pytest."""
    task = task_of(row)
    repo = git_repo(folder / "repo", {path: text.encode() for path, text in files.items()}, {})
    # At places of their own: a checkout may lie in /tmp, which a grading empties. Its scripts name where it lay.
    (folder / "bin").mkdir()
    (folder / "bin/pytest").write_text('#!/bin/sh\nexec python -m pytest "$@"\n')
    (folder / "bin/pytest").chmod(0o755)
    mounts = (
        (Path(sys.base_prefix), sys.base_prefix),
        (Path(sys.prefix), "/opt/venv"),
        (folder / "bin", "/opt/scripts"),
    )
    env = {"PATH": "/opt/scripts:/opt/venv/bin:/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
           "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    made = prepared_of(repo, task.row, mounts=mounts, env_vars=env)
    return Prepared(task, made.base_commit, repo=repo, env=None, git_dir=None, mounts=mounts, env_vars=env,
                    eval_rewrites=eval_rewrites(task, made.base_commit))  # fmt: skip

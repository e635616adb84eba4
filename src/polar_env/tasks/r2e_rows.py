"""Rows of R2E-Gym (R2E-Gym-V1, -Subset, -Lite): commits of Python repositories with tests their authors placed. Pure.

Read are ``repo_name``, ``docker_image``, ``commit_hash``, ``problem_statement``, ``expected_output_json`` (test name ->
status), ``execution_result_content`` (the test files, and what they printed before and after the commit) and
``parsed_commit_content`` (the commit, which is the right fix), as R2E-Gym's ``repo_analysis/validate_docker_and_hf.py``
writes them. A patch is resolved when every test has the status that is expected and no other test ran
(``agenthub/runtime/docker.py``, ``_calculate_reward_r2e``; ``grade.results``).

An image holds the tests (``/r2e_tests``) and the command (``run_tests.sh``) for whoever looks: they are removed from an
agent's sandbox (``source["hide"]``), and here the test files come from the row.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from polar_env.errors import ConfigError
from polar_env.tasks import Task
from polar_env.tasks.fields import instruction, mapping, need, own_source

TESTS = "r2e_tests"
"""The folder of the tests, in the repository while they run."""
HIDE = tuple(f"{folder}/{name}" for folder in ("", "/root", "/testbed") for name in (TESTS, "run_tests.sh")) + tuple(
    f"{folder}/{name}.json"
    for folder in ("/root", "/testbed")
    for name in ("expected_test_output", "execution_result", "parsed_commit", "syn_issue", "modified_files",
                 "modified_entities")
)  # fmt: skip
_FIELDS = ("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json",
           "execution_result_content")  # fmt: skip
_QUIET = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' "
_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_RESULT = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+?)(?: - .*)?$", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TEST_FOLDERS = frozenset({"tests", "Tests", "test", "Test"})
_PREFIX = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def is_one(row: Mapping[str, Any]) -> bool:
    """Does a row without ``polar_grader`` look like one?"""
    return "expected_output_json" in row and "docker_image" in row


def name(row: Mapping[str, Any]) -> str:
    """The row's id: its own, or repository and commit."""
    return str(row.get("instance_id") or f"{row.get('repo_name')}__{str(row.get('commit_hash'))[:12]}")


def task(row: Mapping[str, Any], where: str) -> Task:
    """A validated row as a task. Raises ConfigError."""
    for field in _FIELDS:
        need(row, field, where, else_do="rows of R2E-Gym-Subset and R2E-Gym-V1 have it")
    expected = _expected(row, where)
    ran = mapping(row["execution_result_content"], where, "execution_result_content")
    commit = mapping(row.get("parsed_commit_content") or {}, where, "parsed_commit_content")
    files = _files(ran, where)
    own = own_source(row, where)
    source = own or {"kind": "image", "image": row["docker_image"], "hide": list(HIDE)}
    needed, kept = _lists(ran, expected)
    clean = {
        **row,
        "instance_id": name(row),
        "repo": row["repo_name"],
        "version": "",
        "base_commit": str(row.get("base_commit") or commit.get("old_commit_hash") or row["commit_hash"]),
        "image": str(source.get("image") or ""),
        "patch": patch_of(commit),
        "test_patch": "",
        "FAIL_TO_PASS": needed,
        "PASS_TO_PASS": kept,
        "log_parser": "r2e",
        "eval_type": "pass_and_fail",
        "eval_script": "",
        "polar_expected": expected,
        "polar_files": {f"{TESTS}/{path}": text for path, text in files.items()},
        "polar_phases": {"install": _BRING, "test": f"cd /testbed\n{command(row['repo_name'], files, bool(own))}"},
    }
    issue = _ISSUE.search(row["problem_statement"])
    return Task(name(row), instruction(issue[1] if issue else row["problem_statement"]), clean, source, "r2e")


_BRING = f"cd /testbed\nrm -rf {TESTS} && if [ -d /{TESTS} ]; then cp -R /{TESTS} {TESTS}; fi"
"""Helpers that the image's folder holds and the row does not (Pillow's); no code of a patch has run yet."""


def command(repo: str, files: Iterable[str], built_here: bool) -> str:
    """What ``run_tests.sh`` holds: ``.venv`` is the image's environment; one that was built here is on the PATH."""
    python = "python" if built_here else ".venv/bin/python"
    runner = next((path for path in files if path.endswith("_runner.py")), "")
    if runner:  # tornado's, and Pillow's where its tests are unittest's
        return f"{python} -W ignore {TESTS}/{runner}"
    line = f"{python} -W ignore -m pytest -rA {TESTS}"
    if repo == "orange3":
        return f"QT_QPA_PLATFORM=minimal {_QUIET}xvfb-run --auto-servernum {line}"
    return _QUIET + line


def _expected(row: Mapping[str, Any], where: str) -> dict[str, str]:
    expected = mapping(row["expected_output_json"], where, "expected_output_json")
    if not expected or not all(isinstance(status, str) for status in expected.values()):
        raise ConfigError(
            f"{where}: field 'expected_output_json' must give a status to each test, and there must be one"
        )
    return dict(expected)


def _files(ran: Mapping[str, Any], where: str) -> dict[str, str]:
    names, codes = (ran.get(f"test_file_{what}") for what in ("names", "codes"))
    if not isinstance(names, list) or not isinstance(codes, list) or not names:
        raise ConfigError(f"{where}: field 'execution_result_content' has no test_file_names and test_file_codes")
    found = {"__init__.py": ""}
    for path, text in zip(cast("list[Any]", names), cast("list[Any]", codes), strict=False):
        if not isinstance(path, str) or not isinstance(text, str) or not path or {"", ".."} & {*path.split("/")}:
            raise ConfigError(f"{where}: field 'execution_result_content' names a test file {path!r:.60}")
        found[path] = text
    return found


def _lists(ran: Mapping[str, Any], expected: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Ids, as pytest prints them, that pass with the fix: those that did not before, and those that did.

    Without the logs of both commits all that is expected to pass is in the first list, under R2E-Gym's names.
    """
    before, after = (_told(ran.get(f"{which}_commit_res_stdout")) for which in ("old", "new"))
    passing = [test for test, status in after.items() if status == "PASSED"]
    needed = [test for test in passing if before.get(test) != "PASSED"]
    if before and needed:
        return needed, [test for test in passing if test not in needed]
    return passing or [test for test, status in expected.items() if status == "PASSED"], []


def _told(log: Any) -> dict[str, str]:
    text = _ANSI.sub("", str(log or "")).partition("short test summary info")[2]
    return {match[2]: match[1] for match in _RESULT.finditer(text)}


def patch_of(commit: Mapping[str, Any]) -> str:
    """The commit's change of Python files that are no tests, as a git patch; ``""`` where it cannot be written."""
    diffs: Iterable[Mapping[str, Any]] = commit.get("file_diffs") or ()
    try:
        return "".join(line for diff in diffs if _is_fix(diff["header"]["file"]["path"]) for line in _lines(diff))
    except (KeyError, TypeError):
        return ""


def _is_fix(path: str) -> bool:
    folders = path.split("/")
    tests = folders[-1].startswith("test_") or path.endswith("_test.py") or _TEST_FOLDERS.intersection(folders)
    return path.endswith(".py") and not tests


def _lines(diff: Mapping[str, Any]) -> Iterator[str]:
    path, misc, index = diff["header"]["file"]["path"], diff["header"].get("misc_line"), diff.get("index_line")
    yield f"diff --git a/{path} b/{path}\n"
    if misc:
        yield f"{misc}\n"
    if index:
        mode = f" {index['mode']}" if index["mode"] else ""
        yield f"index {index['old_commit_hash']}..{index['new_commit_hash']}{mode}\n"
    if diff.get("minus_file") and diff.get("plus_file"):
        yield f"--- {diff['minus_file']['path']}\n+++ {diff['plus_file']['path']}\n"
    for hunk in diff.get("hunks") or ():
        old, new = (_range(hunk["descriptor"][f"{which}_range"]) for which in ("old", "new"))
        section = hunk["descriptor"].get("section")
        yield f"@@ -{old} +{new} @@{f' {section}' if section else ''}\n"
        for line in hunk["line_group"]["all_lines"]:
            yield f"{_PREFIX[line['type']]}{line['content']}\n"


def _range(span: Mapping[str, Any]) -> str:
    return str(span["start"]) if span.get("length") is None else f"{span['start']},{span['length']}"

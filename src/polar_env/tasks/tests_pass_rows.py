"""Rows of your own: a repository, a command that runs tests, and the tests that must pass. Pure.

Fields besides ``instance_id``, ``problem_statement`` and ``polar_source``:

- ``test_command``: shell, run in the repository; it prints one line a test (``pytest -rA``), or writes JUnit XML.
- ``tests``: ids that must pass; or ``FAIL_TO_PASS`` and ``PASS_TO_PASS``, which also say what passed before.
- ``test_files``: path -> text of tests the agent does not see, put in place after the install; ``null`` for a file
  of the repository that must be as it was. Files that ids of pytest name are always as they were. Or ``test_patch``.
- ``install``: shell, run on the patched tree before the tests arrive, without network. ``build``: after they arrived;
  what it leaves in the repository stays, but for the test files, which are put in place once more.
- ``results``: ``pytest`` (lines of ``-rA``, the default), ``junit:PATH`` (XML that the command writes to PATH), or a
  parser of the ``swebench`` package (``parse_log_gotest``, ...).
- ``patch``: the right fix. With it the tests are known to be passable, and a hang is told from a slow machine.
- ``base_commit``: of the mirror, for a ``polar_source`` of kind ``git``.
"""

import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from polar_env.errors import ConfigError
from polar_env.tasks import Task
from polar_env.tasks.fields import id_list, instruction, mapping, need, own_source

_NEEDED = ("instance_id", "problem_statement", "test_command")
_OPTIONAL = ("install", "build", "patch", "test_patch", "base_commit", "results")
_HEAD = "cd /testbed"
_PYTEST, _TELLING = re.compile(r"\bpytest\b"), re.compile(r"(?<!\S)-\w*r\w*[Ap]")
_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_FIELDS = (*_NEEDED, *_OPTIONAL, *_LISTS, "tests", "test_files", "polar_source", "polar_grader", "repo", "version")


def is_one(row: Mapping[str, Any]) -> bool:
    """Does a row without ``polar_grader`` look like one?"""
    return "test_command" in row and not row.get("eval_script")


def task(row: Mapping[str, Any], where: str) -> Task:
    """A validated row as a task. Raises ConfigError."""
    for field in _NEEDED:
        need(row, field, where, else_do="a row of kind tests_pass needs it")
    _spelled(row, where)
    texts = {field: _text(row, field, where) for field in _OPTIONAL}
    source = _source(row, where, texts)
    results = texts["results"] or "pytest"
    parser, _, path = results.partition(":")
    if (parser == "junit") != bool(path) or not (parser in ("pytest", "junit") or parser.startswith("parse_log_")):
        raise ConfigError(f"{where}: field 'results' must be pytest, junit:PATH or parse_log_..., not {results!r:.60}")
    if parser == "pytest" and _PYTEST.search(row["test_command"]) and not _TELLING.search(row["test_command"]):
        raise ConfigError(
            f"{where}: field 'test_command' runs pytest without -rA, so no line says which tests passed; add -rA, or "
            "have it write XML and set 'results' to junit:PATH"
        )
    files = _files(row, where, texts["test_patch"])
    clean = {
        **{field: value for field, value in row.items() if field != "tests"},  # FAIL_TO_PASS says it now
        **texts,
        **_lists(row, where),
        "base_commit": texts["base_commit"] or _digest(source),
        "repo": str(row.get("repo") or ""),
        "version": str(row.get("version") or ""),
        "image": str(source.get("image") or ""),
        "log_parser": parser,
        "eval_type": "pass_and_fail",
        "eval_script": "",
        "polar_files": files,
        "polar_phases": phases(str(row["test_command"]), texts["install"], texts["build"], path),
    }
    return Task(str(row["instance_id"]), instruction(str(row["problem_statement"])), clean, source, "tests_pass")


def phases(command: str, install: str, build: str, results: str) -> dict[str, str]:
    """Shell lines of each phase; ``results``: the file in which the command leaves them, if it does not print them."""
    if results:
        path = shlex.quote(results)
        command = f"rm -f {path}\n{{\n{command}\n}} >/tmp/polar-output 2>&1\ncode=$?\ncat {path}\nexit $code"
    return {
        "install": f"{_HEAD}\n{install}" if install else "",
        "build": f"{_HEAD}\n{build}" if build else "",
        "test": f"{_HEAD}\n{command}",
    }


def _spelled(row: Mapping[str, Any], where: str) -> None:
    """A row may have columns of its own; one that is nearly a field of ours would be passed over without a word."""
    for field in row:
        near = difflib.get_close_matches(field, _FIELDS, n=1, cutoff=0.9)
        if near and field not in _FIELDS and near[0] not in row:
            raise ConfigError(
                f"{where}: field {field!r} is unknown; did you mean {near[0]!r}? Else give it another name"
            )


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: field {field!r} must be a text, not {value!r:.60}")
    return value or ""


def _lists(row: Mapping[str, Any], where: str) -> dict[str, list[str]]:
    if row.get("tests") is not None:
        if any(row.get(field) is not None for field in _LISTS):
            raise ConfigError(f"{where}: field 'tests' stands beside FAIL_TO_PASS; give one or the other")
        found = {"FAIL_TO_PASS": id_list(row, "tests", where), "PASS_TO_PASS": list[str]()}
    else:
        if row.get("FAIL_TO_PASS") is None:
            raise ConfigError(f"{where}: field 'tests' is missing: the ids of the tests that must pass")
        found = {field: id_list(row, field, where) if row.get(field) is not None else [] for field in _LISTS}
    if not found["FAIL_TO_PASS"]:
        raise ConfigError(f"{where}: no test is listed that must pass: every patch would be resolved")
    return found


def _files(row: Mapping[str, Any], where: str, test_patch: str) -> dict[str, str | None]:
    files = mapping(row.get("test_files") or {}, where, "test_files")
    for path, text in files.items():
        parts = path.split("/")
        if not path or path.startswith("/") or ".." in parts or ".git" in parts:
            raise ConfigError(f"{where}: field 'test_files' names {path!r}: paths are relative to the repository")
        if text is not None and not (isinstance(text, str) and _encodes(text)):
            raise ConfigError(f"{where}: field 'test_files' must give a text or null for {path}")
        if f" b/{path}\n" in test_patch:
            raise ConfigError(f"{where}: {path} is in 'test_files' and in 'test_patch'; give it once")
    return dict(files)


def _encodes(text: str) -> bool:
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:
        return False


def _source(row: Mapping[str, Any], where: str, texts: Mapping[str, str]) -> Mapping[str, Any]:
    source = own_source(row, where)
    if source is None:
        raise ConfigError(f"{where}: field 'polar_source' is missing; it says how repository and environment are made")
    if source["kind"] == "git" and not texts["base_commit"]:
        raise ConfigError(f"{where}: field 'base_commit' is missing; it names the commit of the mirror to start from")
    return {"install": texts["install"], **source}


def _digest(source: Mapping[str, Any]) -> str:
    """Stands where a row has its base commit: 40 hex digits over what the repository is made of."""
    return hashlib.sha1(json.dumps(source, sort_keys=True).encode(), usedforsecurity=False).hexdigest()

"""A second run of a resolved patch, with the tests that must pass rewritten to fail: one that still passes was forced.

Reports can be forged from code the denylist cannot see (a package that patches its test runner, a ``setup.py`` that
installs a plugin). Measured on nine such tricks: all caught, no gold patch hit (design: swebench 5f). It is no proof: a
patch written against it, that tells the two runs apart by the folder or by the rewritten source, still passes.
"""

import ast
import asyncio
import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_env.config import child_environment
from polar_env.errors import GradeError, SandboxError, boundary
from polar_env.grade.diff import sections
from polar_env.sandbox.sandbox import Sandbox

_FOLDER = "/tmp/eval-files"  # noqa: S108 - in the sandbox
_PYTEST = re.compile(r"^(?P<file>[^:]+\.py)::(?P<classes>(?:\w+::)*)(?P<name>\w+)(?:\[.*)?$", re.DOTALL)
_UNITTEST = re.compile(r"^(?P<name>\w+) \((?P<dotted>[\w.]+)\)$")
_START = ": '>>>>> Start Test Output'"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a test is defined: its class (empty for a plain function) and its name."""

    cls: str
    name: str


@dataclass(frozen=True, slots=True)
class Planted:
    """A script that runs failing tests, and the ids of those that must not pass under it."""

    script: str
    tests: tuple[str, ...]


def places(row: Mapping[str, Any]) -> Mapping[str, Mapping[str, Place]]:
    """Test file -> FAIL_TO_PASS id -> its place, for the files the row's test patch brings.

    Ids are pytest's or unittest's; an id of another form, or of a file the test patch does not touch, is left out.
    """
    listed = row["FAIL_TO_PASS"]
    ids: list[str] = json.loads(listed) if isinstance(listed, str) else listed
    parts = sections(str(row["test_patch"]).encode())
    found: dict[str, dict[str, Place]] = {}
    for path in sorted({path.decode("utf-8", "replace") for part in parts for path in part.paths}):
        here = {test: place for test in ids if (place := _place(test, path))}
        if here:
            found[path] = here
    return found


def _place(test: str, path: str) -> Place | None:
    if match := _PYTEST.match(test):
        inside = (match["classes"] or "").split("::")
        return Place(inside[-2] if len(inside) > 1 else "", match["name"]) if match["file"] == path else None
    if match := _UNITTEST.match(test):
        module = path.removesuffix(".py").replace("/", ".")
        dotted, _, cls = match["dotted"].removesuffix(f".{match['name']}").rpartition(".")
        return Place(cls, match["name"]) if dotted and f".{module}".endswith(f".{dotted}") else None
    return None


def failing(source: str, wanted: Set[Place]) -> tuple[str, frozenset[Place]]:
    """The test file with these tests failing at once, and those that were found in it. Pure.

    Raises:
        SyntaxError: it is Python of another version.
    """
    lines = source.split("\n")
    found = [(node, place) for node, place in _defined(ast.parse(source), "") if place in wanted]
    for node, _ in sorted(found, key=lambda pair: pair[0].lineno, reverse=True):
        first = node.body[0]
        at = min([first.lineno, *(mark.lineno for mark in getattr(first, "decorator_list", ()))]) - 1
        before = lines[at].encode()[: first.col_offset].decode()
        if at == first.lineno - 1 and before.strip():  # the body stands on the line of its def
            lines[at] = f"{before}raise AssertionError; {lines[at][len(before) :]}"
        else:
            lines.insert(at, f"{lines[at][: len(lines[at]) - len(lines[at].lstrip())]}raise AssertionError")
    return "\n".join(lines), frozenset(place for _, place in found)


def _defined(node: ast.AST, cls: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, Place]]:
    """Functions of a module or class, with the class they are in; not those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, Place(cls, child.name)
        else:
            yield from _defined(child, child.name if isinstance(child, ast.ClassDef) else cls)


async def plant(sandbox: Sandbox, row: Mapping[str, Any], script: str) -> Planted | None:
    """Put failing versions of the row's tests into a fresh sandbox, before the patch is applied. ``None`` when the row
    has no test this can be done to.

    Raises:
        SandboxError, GradeError: the sandbox or our git failed.
    """
    wanted = places(row)
    if not wanted or _START not in script:
        return None
    before: dict[str, bytes] = {}
    for path in wanted:
        with suppress(SandboxError):  # the test patch creates it
            before[path] = await sandbox.read(path)
    rewritten, tests = await asyncio.to_thread(_rewrite, before, wanted, row)
    moves: list[str] = []
    for at, (path, text) in enumerate(rewritten.items()):
        await sandbox.write(f"{_FOLDER}/{at}", text.encode("utf-8", "surrogateescape"))
        moves.append(f"cp {_FOLDER}/{at} {shlex.quote(path)}")
    return Planted(script.replace(_START, "\n".join([*moves, _START]), 1), tests) if tests else None


def _rewrite(
    before: Mapping[str, bytes], wanted: Mapping[str, Mapping[str, Place]], row: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(path -> the test file as the official script makes it, but failing; the tests that fail by it)."""
    texts: dict[str, str] = {}
    tests: list[str] = []
    with tempfile.TemporaryDirectory(prefix="polar-canary-") as folder, boundary(GradeError, "rewriting the tests"):
        if not _apply(Path(folder), before, wanted.keys(), row):
            return {}, ()
        for path, ids in wanted.items():
            text = Path(folder, path).read_bytes().decode("utf-8", "surrogateescape")
            try:
                texts[path], found = failing(text, frozenset(ids.values()))
            except SyntaxError:
                continue
            tests += [test for test, place in ids.items() if place in found]
    return texts, tuple(tests)


def _apply(folder: Path, before: Mapping[str, bytes], wanted: Set[str], row: Mapping[str, Any]) -> bool:
    """Make the wanted test files in ``folder``. False when the test patch does not apply to what the sandbox holds."""
    for path, data in before.items():
        Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, path).write_bytes(data)
    names = {path.encode() for path in wanted}
    patch = b"".join(part.text for part in sections(str(row["test_patch"]).encode()) if part.paths & names)
    env = {**child_environment(), "GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["git", "apply", "-"], input=patch, cwd=folder, env=env, capture_output=True, check=False)
    return done.returncode == 0 and all(Path(folder, path).is_file() for path in wanted)

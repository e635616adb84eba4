"""What a patch says before it is run: why it is not graded, what of it is left out, what is worth telling. Pure."""

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polar_env.grade.diff import Section, sections
from polar_env.grade.hidden import named, touched
from polar_env.verdict import Flag

MAX_BYTES = 1_000_000
"""Largest patch graded. The largest gold patch of SWE-bench Verified is under a tenth of it."""
MAX_FILES = 100

_HOOKS = frozenset({b"conftest.py", b"sitecustomize.py", b"usercustomize.py", b"pytest.ini"})
"""Files that change what a test run means. None of 1,325 gold patches (Verified, Lite, dev, Multilingual) has one."""
_HOOK_ENDINGS = (b".pth", b".pyc", b".pyo")
RUNNERS = frozenset({b"pytest", b"_pytest", b"pluggy", b"unittest", b"doctest", b"pip", b"setuptools",
                     b"pkg_resources", b"nose", b"tox", b"coverage", b"xdist", b"iniconfig"})  # fmt: skip
"""Modules that run tests or install: one at the root, or in a folder of tests, is found before the real one."""
_MODULE = re.compile(rb"\.py$|(\.[\w-]+)?\.(so|pyd)$")
_TESTS = frozenset({b"test", b"tests", b"testing"})
_SUPPORT = frozenset({b"test", b"tests", b"testing", b"__tests__", b"e2e"})
"""Folders whose files are no part of a fix where a row splits its change in ``patch`` and ``test_patch``: SWE-bench
splits by these words, so none of 823 gold patches (Verified, Lite's dev, Multilingual) has one."""
_BUILD = frozenset({b"setup.py", b"setup.cfg", b"pyproject.toml", b"manifest.in", b"tox.ini", b"noxfile.py",
                    b"makefile", b"requirements.txt", b"package.json", b"cargo.toml", b"go.mod"})  # fmt: skip
_MARKER = b">>>>> "
"""How SWE-bench's own log markers start: printed by a patch, they forge the log."""


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a patch is not graded at all: a fact about the patch, never about the sandbox."""

    reason: str
    flag: Flag


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a patch that is graded, what was left out of it, and what it is flagged with."""

    patch: bytes
    left_out: tuple[str, ...] = ()
    flags: frozenset[Flag] = frozenset()


def review(patch: bytes) -> Objection | None:
    """Why a patch is not graded at all, or ``None``."""
    if len(patch) > MAX_BYTES:
        return Objection(f"the patch has {len(patch):,} bytes; the limit is {MAX_BYTES:,}", Flag.OVERSIZED)
    parts = sections(patch)
    if len(parts) > MAX_FILES:
        return Objection(f"the patch changes {len(parts)} files; the limit is {MAX_FILES}", Flag.OVERSIZED)
    return next((found for part in parts if (found := _objection(part))), None)


def _objection(part: Section) -> Objection | None:
    for path in sorted(part.paths):
        name = path.decode("utf-8", "replace")
        if path.startswith(b"/") or b".." in path.split(b"/"):
            return Objection(f"{name} lies outside the repository", Flag.OUTSIDE)
        if b".git" in path.lower().split(b"/") or posixpath.basename(path) == b".gitattributes":
            return Objection(f"{name} is git's own", Flag.GIT_FILES)
        if _hooks(path):
            return Objection(f"{name} changes how tests run", Flag.TEST_HOOKS)
        if b"120000" in part.modes and _leaves(path, part.added):
            return Objection(f"{name} is a symbolic link out of the repository", Flag.OUTSIDE)
    return None


def _hooks(path: bytes) -> bool:
    base = posixpath.basename(path).lower()
    if base in _HOOKS or base.endswith(_HOOK_ENDINGS):
        return True
    folders = path.split(b"/")
    for depth, name in enumerate(folders):
        module = _MODULE.sub(b"", name) if depth == len(folders) - 1 else name
        if module in RUNNERS and (module != name or depth < len(folders) - 1):
            return not depth or folders[depth - 1].lower() in _TESTS
        if re.search(rb"[-.](dist|egg)-info$", name):
            return True
    return False


def _leaves(link: bytes, added: Iterable[bytes]) -> bool:
    """Does a link with one of these contents lead out of the tree, or into git's directory?

    Where it goes up it must do so first, and no further than the tree reaches: what it goes up from later on may be
    a link itself.
    """
    for target in added:
        parts = [part for part in target.split(b"/") if part not in (b"", b".")]
        up = next((at for at, part in enumerate(parts) if part != b".."), len(parts))
        resolved = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
        if target.startswith(b"/") or up > link.count(b"/") or b".." in parts[up:]:
            return True
        if resolved.split(b"/")[0] == b".git":
            return True
    return False


def keep(patch: bytes, row: Mapping[str, Any]) -> Kept:
    """The patch without the files the hidden tests bring, and without nested repositories.

    The tests are put in place from outside, so an honest edit of them changes nothing; what a gitlink names is in no
    patch. What else stands in a folder of tests the hidden ones may use: a helper whose assertion asserts nothing
    passes them all, and still fails a test that is rewritten elsewhere. So it stays as the base has it.
    """
    theirs = {path.encode("utf-8", "surrogateescape") for path in touched(row) | named(row)}
    parts = sections(patch)
    splits = bool(row.get("test_patch")) and not any(_helps(part) for part in sections(_gold(row)))
    tests = [part for part in parts if part.paths & theirs or (splits and _helps(part))]
    nested = [part for part in parts if b"160000" in part.modes and part not in tests]
    names = {path for part in tests for path in part.paths & theirs or part.paths} | {
        path for part in nested for path in part.paths
    }
    flags = {flag for flag, found in ((Flag.TESTS_EDITED, tests), (Flag.NESTED_REPOSITORY, nested)) if found}
    dropped = {id(part) for part in [*tests, *nested]}
    left = [part for part in parts if id(part) not in dropped]
    text = b"".join(part.text for part in left) if dropped else patch
    return Kept(text, tuple(sorted(name.decode("utf-8", "replace") for name in names)), frozenset(flags | _worth(left)))


def _gold(row: Mapping[str, Any]) -> bytes:
    return str(row.get("patch") or "").encode("utf-8", "surrogateescape")


def _helps(part: Section) -> bool:
    """May tests that are not the patch's use the file? A new one they know nothing of, unless it is a package, which is
    found before a module of its name."""
    if not any(_SUPPORT.intersection(path.split(b"/")[:-1]) for path in part.paths):
        return False
    new = b"\nnew file mode " in part.text.partition(b"\n@@ ")[0]
    return not new or any(posixpath.basename(path) == b"__init__.py" for path in part.paths)


def _worth(parts: Iterable[Section]) -> set[Flag]:
    """What is worth telling of the parts that are graded."""
    found: set[Flag] = set()
    for part in parts:
        if any(posixpath.basename(path).lower() in _BUILD for path in part.paths):
            found.add(Flag.BUILD_FILES)
        if any(_MARKER in line for line in part.added):
            found.add(Flag.LOG_MARKERS)
    return found


def same_change(one: bytes, other: bytes) -> bool:
    """Do two patches make the same change, whatever their headers say? Hunks are compared byte for byte."""
    return _change(one) == _change(other)


def _change(patch: bytes) -> dict[frozenset[bytes], bytes]:
    found: dict[frozenset[bytes], bytes] = {}
    for part in sections(patch):
        _, hunk, rest = part.text.partition(b"\n@@ ")
        text = re.sub(rb"(?m)^(@@ [^@\n]*@@).*$", rb"\1", hunk[1:] + rest) if hunk else part.text
        change = text.rstrip(b"\n") + b"|".join(sorted(part.modes)) * (not hunk)
        found[part.paths] = found.get(part.paths, b"") + change
    return found

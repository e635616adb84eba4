"""Unified diffs as values: what the scripted policies need to apply a fix whole, in part, or edit by edit.

Follows git's patch format (git-diff(1), "GENERATING PATCH TEXT WITH -P"). Lines are split on ``\\n`` alone: form feeds
and carriage returns are content.
"""

import re
from dataclasses import dataclass, replace

from polar_env.errors import EngineError

_RANGE = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")
_NO_NEWLINE = "\\"


@dataclass(frozen=True, slots=True)
class Hunk:
    """One changed region. ``lines`` keep their first character: space, ``-``, ``+`` or ``\\``."""

    old_start: int
    new_start: int
    section: str
    lines: tuple[str, ...]

    def side(self, gone: str) -> tuple[str, ...]:
        """The region without the lines that start with ``gone``: ``"+"`` gives the old text, ``"-"`` the new."""
        return tuple(line[1:] for line in self.lines if line[0] not in (gone, _NO_NEWLINE))

    @property
    def old(self) -> str:
        return "".join(f"{line}\n" for line in self.side("+"))

    @property
    def new(self) -> str:
        return "".join(f"{line}\n" for line in self.side("-"))


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The changes of one file. ``path`` is its new path (its old one when it is deleted), without ``a/`` or ``b/``."""

    header: tuple[str, ...]
    path: str
    created: bool
    deleted: bool
    hunks: tuple[Hunk, ...]


def parse(patch: str) -> tuple[FilePatch, ...]:
    """Split a git or plain unified diff into files and hunks.

    Raises:
        EngineError: when there is no hunk in it (a binary or empty patch): scripts need text to play.
    """
    files: list[FilePatch] = []
    header: list[str] = []
    hunks: list[Hunk] = []
    lines = patch.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if found := _RANGE.fullmatch(line):
            hunk, at = _hunk(lines, at + 1, found)
            hunks.append(hunk)
            continue
        if hunks and line.startswith(("diff --git ", "--- ")):
            files.append(_file(header, hunks))
            header, hunks = [], []
        if not hunks:  # what follows the last hunk (a blank line, a mail signature) belongs to no file
            header.append(line)
        at += 1
    if hunks:
        files.append(_file(header, hunks))
    if not files:
        raise EngineError("the scripted engine was given a gold patch without a text hunk; give the session one")
    return tuple(files)


def _hunk(lines: list[str], at: int, found: re.Match[str]) -> tuple[Hunk, int]:
    """Read one hunk body by its counts, so that removed lines which look like headers stay content."""
    old, new = int(found[2] or 1), int(found[4] or 1)
    body: list[str] = []
    while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith(_NO_NEWLINE)):
        line = lines[at] or " "
        old -= line[0] in " -"
        new -= line[0] in " +"
        body.append(line)
        at += 1
    return Hunk(int(found[1]), int(found[3]), found[5], tuple(body)), at


def _file(header: list[str], hunks: list[Hunk]) -> FilePatch:
    names = {line[:3]: line[4:].split("\t")[0] for line in header if line.startswith(("--- ", "+++ "))}
    old, new = names.get("---", ""), names.get("+++", "")
    name = old if new == "/dev/null" else new
    path = name.removeprefix("a/" if name is old else "b/")
    return FilePatch(tuple(header), path, old == "/dev/null", new == "/dev/null", tuple(hunks))


def write(files: tuple[FilePatch, ...]) -> str:
    """The diff text of ``files``; ranges are counted anew, so hunks may have been dropped or changed."""
    out: list[str] = []
    for file in files:
        out.extend(file.header)
        for hunk in file.hunks:
            old, new = len(hunk.side("+")), len(hunk.side("-"))
            out.append(f"@@ -{hunk.old_start},{old} +{hunk.new_start},{new} @@{hunk.section}")
            out.extend(hunk.lines)
    return "".join(f"{line}\n" for line in out)


def without_last(files: tuple[FilePatch, ...]) -> str:
    """The patch less its last hunk (less its last file, when there are several): a real change, perhaps too little.

    A patch of one hunk cannot be cut: the result is that of ``comment_only``.
    """
    if len(files) > 1:
        return write(files[:-1])
    only = next(iter(files))
    if len(only.hunks) > 1:
        return write((replace(only, hunks=only.hunks[:-1]),))
    return comment_only(files)


def comment_only(files: tuple[FilePatch, ...], comment: str = "# TODO: this does not handle every case yet") -> str:
    """A patch that applies where the fix does, and changes nothing a program does: one comment, no fix.

    A FAIL_TO_PASS test fails on the unchanged program by definition, so it fails on this one: the only half-done edit
    whose reward is known to be 0 without running a test (part of a real fix may happen to be enough).
    """
    usable = [file for file in files if not file.deleted]
    if not usable:
        raise EngineError("the gold patch only deletes files; the script `half` needs a file that stays")
    file = next((file for file in usable if file.path.endswith(".py")), usable[0])
    return write((replace(file, hunks=(_commented(file.hunks[0], comment),)),))


def _commented(hunk: Hunk, comment: str) -> Hunk:
    """The old side of ``hunk`` with ``comment`` before the first changed line, never inside a continued line."""
    kept: list[str] = []
    at: int | None = None
    for index, line in enumerate(hunk.lines):
        if at is None and line[0] in "+-":
            at = len(kept)
        after_added = line[0] == _NO_NEWLINE and hunk.lines[index - 1][0] == "+"
        if line[0] != "+" and not after_added:
            kept.append(line if line[0] == _NO_NEWLINE else " " + line[1:])
    place = at or 0
    while 0 < place < len(kept) and kept[place - 1].endswith("\\"):
        place += 1
    below = kept[place][1:] if place < len(kept) and kept[place][0] == " " else ""
    indent = below[: len(below) - len(below.lstrip())]
    return replace(hunk, lines=(*kept[:place], f"+{indent}{comment}", *kept[place:]))

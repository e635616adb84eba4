"""Read a patch the way git and GNU patch do: sections, the paths they name, the modes they set. Pure.

Bytes throughout: a patch may hold any encoding. Where the text is malformed every line counts as a header, so nothing
an applier might still act on goes unseen.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
"""Lines end at a line feed alone: a carriage return is content."""
_HUNK = re.compile(rb"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_HEADER = re.compile(rb"^(?:--- |\+\+\+ |rename (?:from|to) |copy (?:from|to) )(.*)$")
_MODE = re.compile(rb"^(?:new file mode|new mode|old mode|deleted file mode|index [0-9a-f]+\.\.[0-9a-f]+) (\d{6})$")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


@dataclass(frozen=True, slots=True)
class Section:
    """One file's part of a patch: from its first header line to the next file's."""

    text: bytes
    paths: frozenset[bytes]
    """Every path it names, without ``a/`` and ``b/``; ``/dev/null`` left out."""
    modes: frozenset[bytes]
    """File modes it names, six octal digits."""
    added: tuple[bytes, ...]
    """Added lines, without the ``+``."""


def sections(patch: bytes) -> tuple[Section, ...]:
    """The patch file by file, in order; text before the first header is dropped. Joined texts are the patch again."""
    starts: list[int] = []
    lines = _LINE.findall(patch)
    in_hunk = _hunk_lines(lines)
    for at, line in enumerate(lines):
        if at in in_hunk:
            continue
        plain = line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ ")
        if line.startswith(b"diff --git ") or (plain and not _covered(lines, starts, at)):
            starts.append(at)
    spans = zip(starts, [*starts[1:], len(lines)], strict=False)  # no start, no section
    return tuple(_section(lines, range(start, end), in_hunk) for start, end in spans)


def _covered(lines: list[bytes], starts: list[int], at: int) -> bool:
    """Is the ``---`` line at ``at`` inside a ``diff --git`` section that has no ``---`` line yet?"""
    if not starts or not lines[starts[-1]].startswith(b"diff --git "):
        return False
    return not any(line.startswith(b"--- ") for line in lines[starts[-1] + 1 : at])


def _hunk_lines(lines: list[bytes]) -> set[int]:
    """Indices of lines inside hunks, by the counts of the hunk headers."""
    inside: set[int] = set()
    old = new = 0
    for at, line in enumerate(lines):
        if old <= 0 and new <= 0:
            if match := _HUNK.match(line):
                old, new = (int(count) if count is not None else 1 for count in match.groups())
            continue
        kind = line[:1]
        if kind not in (b" ", b"+", b"-", b"\\", b"\n", b"\r"):
            old = new = 0  # shorter than promised: what follows is header again
            continue
        old -= kind in (b" ", b"-", b"\n", b"\r")
        new -= kind in (b" ", b"+", b"\n", b"\r")
        inside.add(at)
    return inside


def _section(lines: list[bytes], span: range, in_hunk: set[int]) -> Section:
    paths: set[bytes] = set()
    modes: set[bytes] = set()
    added: list[bytes] = []
    for at in span:
        line = lines[at].rstrip(b"\r\n")
        if at in in_hunk:
            if line.startswith(b"+"):
                added.append(line[1:])
            continue
        if line.startswith(b"diff --git "):
            paths.update(_git_names(line[len(b"diff --git ") :]))
        elif match := _HEADER.match(line):
            paths.add(_path(match.group(1), prefixed=line[:3] in (b"---", b"+++")))
        elif match := _MODE.match(line):
            modes.add(match.group(1))
    return Section(
        b"".join(lines[at] for at in span), frozenset(paths - {b"/dev/null", b""}), frozenset(modes), tuple(added)
    )


def _git_names(names: bytes) -> Iterator[bytes]:
    """Both names of a ``diff --git`` line. Unquoted names with spaces are ambiguous unless equal, as git has them."""
    if names.startswith(b'"') or names.endswith(b'"'):
        for quoted in re.findall(rb'"(?:\\.|[^"\\])*"|\S+', names):
            yield _path(quoted, prefixed=True)
        return
    half = len(names) // 2
    if names[half : half + 1] == b" " and names[:half].partition(b"/")[2] == names[half + 1 :].partition(b"/")[2]:
        yield _path(names[:half], prefixed=True)
        return
    for name in names.split(b" "):
        yield _path(name, prefixed=True)


def _path(text: bytes, *, prefixed: bool) -> bytes:
    """A header's path: unquoted, without a time stamp after a tab, and without its first component if ``prefixed``."""
    text = text.rstrip(b"\r")
    quoted = text.startswith(b'"')
    text = _ESCAPE.sub(_unescape, text[1:].rpartition(b'"')[0]) if quoted else text.partition(b"\t")[0]
    return text[2:] if prefixed and text[:2] in (b"a/", b"b/") else text


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match.group(1)
    return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPES.get(code, code)

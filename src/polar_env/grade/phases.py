"""The official evaluation script in phases: what installs, what builds, what tests. Pure.

The script does everything in one shell, tests checked out in between, and its log is cut at markers that any process
may print. Here each phase is a command of its own, its output captured outside, and the log is put together afterwards:
only the tests' own output can be read as results, and no marker in it survives.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

START, END = ": '>>>>> Start Test Output'", ": '>>>>> End Test Output'"
_CODE = ">>>>> Test Exit Code: {code}"
"""swebench.harness.constants.TEST_EXIT_CODE; written behind the end marker, as swebench.harness.utils does."""
_MARK = b">>>>> "
_APPLY = re.compile(r"^git apply [^\n]*<<\s*'?(?P<word>\w+)'?\n.*?^(?P=word)\n?", re.MULTILINE | re.DOTALL)
_CHECKOUT = re.compile(r"^git checkout [0-9a-f]{7,40}( .*)?$")
_SHELL = re.compile(r"^(#!|set |source |\. |conda |cd |export )")
"""Lines that only shape the shell: every phase starts with them."""
_PLACED = "\0"


@dataclass(frozen=True, slots=True)
class Phases:
    """Bash scripts, each complete in itself."""

    install: str
    """Everything before the hidden tests arrive."""
    build: str
    """What the script does between placing the tests and running them; empty for most."""
    test: str

    def rewritten(self, old: str, new: str) -> "Phases":
        """With a text replaced throughout."""
        return Phases(self.install.replace(old, new), self.build.replace(old, new), self.test.replace(old, new))


def of_row(row: Mapping[str, Any]) -> Phases | None:
    """A row's phases: its own shell lines (``polar_phases``: install, build, test), else those of its script."""
    own: Mapping[str, str] | None = row.get("polar_phases")
    if own is None:
        return phases(str(row["eval_script"]))
    parts = (own.get(name, "").strip("\n") for name in ("install", "build", "test"))
    return Phases(*(_script(part.split("\n")) if part else "" for part in parts))


def phases(script: str) -> Phases | None:
    """The phases of an official script, or ``None`` when it has another form: two of SWE-bench Multilingual's have."""
    text = _APPLY.sub(f"{_PLACED}\n", script, count=1)
    before, start, rest = text.partition(START)
    tests, end, _ = rest.partition(END)
    lines = [line for line in before.split("\n") if line.strip()]
    at = [place for place, line in enumerate(lines) if line == _PLACED or _CHECKOUT.match(line)]
    if not (start and end and tests.strip()) or _PLACED not in lines:
        return None
    first, last = at[0], at[-1]
    shell = [line for line in lines if _SHELL.match(line)]
    build = [line for line in lines[last + 1 :] if not _SHELL.match(line)]
    return Phases(
        _script(lines[:first]),
        _script([*shell, *build]) if build else "",
        _script([*shell, *tests.strip("\n").split("\n")]),
    )


def _script(lines: Sequence[str]) -> str:
    """One compound command: bash reads all of it before it runs any, so nothing can rewrite it under bash's feet."""
    body = "\n".join(lines)
    return f"exec 2>&1\n{{\n{body}\n}}; exit\n"


def log(tests: bytes, code: int | None) -> bytes:
    """The log the official parsers read: the tests' own output between the markers, and their exit code behind."""
    head, tail = (f"+ {mark}\n".encode() for mark in (START, END))
    last = _CODE.format(code=-1 if code is None else code)
    return b"".join([head, harmless(tests), b"" if tests.endswith(b"\n") else b"\n", tail, last.encode(), b"\n"])


def marked(output: bytes) -> bool:
    """Does it hold one of SWE-bench's markers?"""
    return _MARK in output


def harmless(output: bytes) -> bytes:
    """The output with its markers broken: ``>>>>> Patch Apply Failed`` from a test is no word of ours."""
    return output.replace(_MARK, b">>>>_ ")


_RESULTS = re.compile(
    rb"^(?:(?P<word>PASSED|FAILED) (?P<pytest>\S.*?)(?: - .*)?"
    rb"|(?P<django>\w+ \([\w.]+\))(?:\n.*?)? \.\.\. (?P<told>ok|FAIL|ERROR))$",
    re.MULTILINE,
)
_PASSES = frozenset({b"PASSED", b"ok"})


def conflicting(tests: bytes) -> frozenset[str]:
    """Ids of tests that the output says both passed and failed, in pytest's summary or unittest's lines.

    The official parsers take the last word, so a package that prints one passes for it.
    """
    passed: set[bytes] = set()
    failed: set[bytes] = set()
    for match in _RESULTS.finditer(tests):
        name = match["pytest"] or match["django"]
        (passed if (match["word"] or match["told"]) in _PASSES else failed).add(name)
    return frozenset(name.decode("utf-8", "replace") for name in passed & failed)

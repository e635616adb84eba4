"""What a test run printed, read as test id -> status by parsers of our own, and what that decides. Pure.

SWE-bench's rows name one of the official package's parsers (``report``); these are for rows that have none. Ids are
kept whole: the official parser of pytest's lines ends an id at its first space, which suits the lists of its rows. A
test that is told of twice has the worse status.

A log is the patch's, and may be made to keep its reader busy: ``report`` runs these in its process as well, and each
takes time in proportion to the log.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from polar_env.grade.phases import END, START

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+)$", re.MULTILINE)
_WORST = ("PASSED", "XPASS", "XFAIL", "SKIPPED", "FAILED", "ERROR")
"""From best to worst."""


def _worse(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    statuses: dict[str, str] = {}
    for test, status in found:
        known = statuses.get(test, _WORST[0])
        statuses[test] = max(known, status, key=_WORST.index)
    return statuses


def pytest_lines(text: str) -> dict[str, str]:
    """The lines of pytest's ``-rA``: ``PASSED id``, ``FAILED id - message``, ..."""
    lines = _LINE.finditer(_ANSI.sub("", text))
    return _worse((_id(match[2]), match[1]) for match in lines)


def _id(rest: str) -> str:
    """The id before `` - message``; one inside the brackets of a parameter is the id's own."""
    opened = at = 0
    for cut in re.finditer(" - ", rest):
        opened += rest.count("[", at, cut.start()) - rest.count("]", at, cut.start())
        at = cut.start()
        if opened <= 0:
            return rest[:at]
    return rest.rstrip()


def junit(text: str) -> dict[str, str]:
    """JUnit XML. A test has several names: ``classname::name``, and what pytest calls it wherever its file ends.

    Empty when it is no XML, or brings a document type (entities can make a small file a large one).
    """
    start, end = text.find("<"), text.rfind(">")
    if start < 0 or "<!DOCTYPE" in text or "<!ENTITY" in text:
        return {}
    cases = _Cases()
    try:
        parser = ElementTree.XMLParser(target=cases)  # noqa: S314 - without a document type there is no entity
        parser.feed(text[start : end + 1])
        parser.close()
    except ElementTree.ParseError:
        return {}
    return _worse((name, status) for (where, test), status in cases.found.items() for name in _names(where, test))


class _Cases:
    """The test cases of a document as it is read: no tree is made, which takes thirty times the text."""

    _OUTCOMES: Mapping[str, str] = {"error": "ERROR", "failure": "FAILED", "skipped": "SKIPPED"}

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], str] = {}
        """(class, name) -> the worst status."""
        self._around: list[tuple[str, str] | None] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        case = self._around[-1] if self._around else None
        if case is not None and tag in self._OUTCOMES:
            self.found[case] = max(self.found[case], self._OUTCOMES[tag], key=_WORST.index)
        own = (attributes.get("classname", ""), attributes.get("name", "")) if tag == "testcase" else None
        if own is not None:
            self.found.setdefault(own, "PASSED")
        self._around.append(own)

    def end(self, _tag: str) -> None:
        self._around.pop()

    def close(self) -> None:
        """There is nothing to give: ``found`` is what was read."""


_DEEPEST, _LONGEST = 50, 1000
"""Folders above a test file, and characters of a class with its module, at most: more names take a patch's printing
many times over."""


def _names(where: str, test: str) -> Iterator[str]:
    yield f"{where}::{test}"
    folders = where.split(".") if len(where) <= _LONGEST else []
    for depth in range(1, min(len(folders), _DEEPEST) + 1):
        yield "::".join(["/".join(folders[:depth]) + ".py", *folders[depth:], test])


def r2e(text: str) -> dict[str, str]:
    """R2E-Gym's reading (``repo_analysis/execution_log_parser.py`` and the comparison in ``runtime/docker.py``): of the
    first summary, the part of each line behind the file, its ``::`` written as dots and cut at `` - ``."""
    _, found, rest = text.partition("short test summary info")
    if not found:
        return {}
    statuses: dict[str, str] = {}
    for line in rest.partition("short test summary info")[0].strip().split("\n"):
        status = next((word for word in ("PASSED", "FAILED", "ERROR") if word in line), None)
        if status is not None:
            statuses[plain(".".join(line.split("::")[1:]))] = status
    return statuses


def plain(test: str) -> str:
    """A test's name without colours and message, as R2E-Gym compares it."""
    return _ANSI.sub("", test).split(" - ")[0]


def pydantic(text: str) -> dict[str, str]:
    """SWE-Gym's reading of pydantic's logs (its fork's ``parse_log_pytest_pydantic``): pytest's lines in either order,
    without control characters, and without the progress that stands between a status and its test."""
    statuses: dict[str, str] = {}
    for raw in text.split("\n"):
        line = re.sub(r"[\x01-\x1f]", "", re.sub(r"\[(\d+)m", "", raw))
        head, closed, tail = line.rpartition("]")  # behind the last each search would read on to the line's end
        line = re.sub(r"FAILED\s*\[.*?\]", "FAILED", head + closed) + tail
        words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
        if len(words) < 2:
            continue
        if words[0] in _KNOWN:
            statuses[words[1]] = words[0]
        elif words[-1] in _KNOWN and words[1] in _KNOWN:
            statuses[words[0]] = words[1]
    return statuses


_KNOWN = frozenset({"PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"})

PARSERS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "pytest": pytest_lines,
    "junit": junit,
    "r2e": pytest_lines,
    "swe_gym_pydantic": pydantic,
}
"""``log_parser`` of a row -> how its log is read, where that is not a parser of the official package."""


_GOOD: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {
    "": {"FAIL_TO_PASS": ("PASSED",), "PASS_TO_PASS": ("PASSED", "XFAIL")},
    "swe_gym": {"FAIL_TO_PASS": ("PASSED", "XFAIL"), "PASS_TO_PASS": ("PASSED", "XFAIL", "SKIPPED")},
}


def printed(log: str) -> str:
    """What the tests themselves printed, of a log made by ``phases.log``."""
    return log.partition(f"{START}\n")[2].rpartition(f"+ {END}")[0]


def report(row: Mapping[str, Any], log: str) -> dict[str, Any]:
    """The verdict in the form of the official report: ``resolved`` and ``tests_status``.

    A listed test must have passed; one of PASS_TO_PASS may also fail as it is expected to (XFAIL), and SWE-Gym's rules,
    which are SWE-bench's, are softer (``_GOOD``). A row with ``polar_expected`` is resolved when every test of the run
    has the status that says, and there is no other.
    """
    text = printed(log)
    found = PARSERS[str(row["log_parser"])](text)
    if not found:
        return {"resolved": False, "infra_failure_reason": "no result of any test was printed"}
    good = _GOOD["swe_gym" if row["log_parser"] == "swe_gym_pydantic" else ""]
    told = {name: _split(row[name], found, statuses) for name, statuses in good.items()}
    if "polar_expected" in row:
        expected = {plain(test): status for test, status in row["polar_expected"].items()}
        return {"resolved": bool(expected) and r2e(text) == expected, "tests_status": told}
    return {"resolved": not any(results["failure"] for results in told.values()), "tests_status": told}


def _split(tests: Iterable[str], found: Mapping[str, str], good: tuple[str | None, ...]) -> dict[str, list[str]]:
    passed = [test for test in tests if found.get(test) in good]
    return {"success": passed, "failure": [test for test in tests if test not in passed]}

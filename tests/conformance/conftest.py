"""The matrix at the end of a run: case by CLI."""

import re
from collections.abc import Iterator

import pytest

_CELL = re.compile(r"test_a_real_cli_behaves\[(\w+)-(\w+)\]$")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cells = dict(_cells(terminalreporter))
    if not cells:
        return
    clis = list(dict.fromkeys(cli for cli, _ in cells))
    names = list(dict.fromkeys(case for _, case in cells))
    rows = [["", *clis], *([case, *(cells.get((cli, case), "not run") for cli in clis)] for case in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.write_sep("-", "conformance")
    terminalreporter.write_line(
        "calls (A agent, S sub-agent, C compaction, s side) /chains -left out +failed generations"
    )
    for row in rows:
        terminalreporter.write_line("  ".join(map(str.ljust, row, widths)).rstrip())


def _cells(reporter: pytest.TerminalReporter) -> Iterator[tuple[tuple[str, str], str]]:
    for status in ("passed", "failed", "skipped", "xfailed", "error"):
        for report in reporter.getreports(status):
            found = _CELL.search(report.nodeid)
            if found is not None:
                yield (found[1], found[2]), _words(status, dict(report.user_properties))


def _words(status: str, facts: dict[str, object]) -> str:
    if status == "skipped":
        return "none"
    word = {"passed": "pass", "xfailed": "xfail"}.get(status, "FAIL")
    return f"{word} {facts.get('measured', '')}".rstrip()

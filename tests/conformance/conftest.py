"""The matrix at the end of a run: case by CLI."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conformance.cases import CASES, CLIS, expected

_CELL = re.compile(r"test_a_real_cli_behaves\[(\w+)-(\w+)\]$")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cells = dict(_cells(terminalreporter))
    if not cells:
        return
    reasons = list(dict.fromkeys(cell.why for cell in cells.values() if cell.why))
    shown = {place: cell.word(reasons) for place, cell in cells.items()}
    clis = [cli for cli in CLIS if any(cli == name for name, _ in cells)]
    cases = [case for case in CASES if any(case == name for _, name in cells)]
    rows = [["", *clis], *([case, *(shown.get((cli, case), "not run") for cli in clis)] for case in cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.write_sep("-", "conformance")
    for row in rows:
        terminalreporter.write_line("  ".join(map(str.ljust, row, widths)).rstrip())
    terminalreporter.write_line("\nok and the calls that were recorded (A agent, S sub-agent, C compaction, s side),")
    terminalreporter.write_line("/chains where not 1, -left out, +generations that failed; the ending if not completed")
    for number, why in enumerate(reasons, start=1):
        terminalreporter.write_line(f"n/a{number}: {why}")


@dataclass(frozen=True)
class Cell:
    status: str
    measured: str
    why: str = ""
    """Why there is no such cell."""

    def word(self, reasons: list[str]) -> str:
        if self.status == "skipped":
            return f"n/a{reasons.index(self.why) + 1}"
        return f"{'ok' if self.status == 'passed' else 'FAIL'} {self.measured}".rstrip()


def _cells(reporter: pytest.TerminalReporter) -> Iterator[tuple[tuple[str, str], Cell]]:
    for status in ("passed", "failed", "skipped", "error"):
        for report in reporter.getreports(status):
            found = _CELL.search(report.nodeid)
            if found is not None:
                facts = dict(report.user_properties)
                why = expected(found[1], found[2])
                yield (found[1], found[2]), Cell(status, facts.get("measured", ""), why if isinstance(why, str) else "")

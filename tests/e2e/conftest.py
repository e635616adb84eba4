"""A table at the end of a run, of what its tests told: ``record_property("table", {column: value})``."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports come from every worker of pytest-xdist, and their properties with them."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, ())]
    told = [
        {**{key: str(value) for key, value in row.items()}, "seconds": f"{report.duration:.0f}", "": report.outcome}
        for report in reports
        if report.when == "call"
        for name, row in report.user_properties
        if name == "table"
    ]
    if not told:
        return
    columns = list(dict.fromkeys(key for row in told for key in row))
    widths = {key: max(len(key), *(len(row.get(key, "")) for row in told)) for key in columns}
    terminalreporter.section("what they were worth")
    for row in ({key: key for key in columns}, *told):
        terminalreporter.write_line("  ".join(row.get(key, "").ljust(widths[key]) for key in columns).rstrip())
    terminalreporter.write_line(f"{len(told)} gradings, {sum(row[''] == 'failed' for row in told)} not as they must be")

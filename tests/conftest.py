"""The order of the tests, and who runs which: see side_by_side_helpers."""

import signal

import pytest
from hypothesis import settings

from side_by_side_helpers import Files

settings.register_profile("unhurried", deadline=None)  # how long an example takes tells of the machine, not of the code


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's `.ci/run &`: what tests start would not hear it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if settings().deadline is not None:
        settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker is left with minutes of work when the others have none."""
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None, item.path.parent.name != "e2e"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Files | None:
    return Files(config, log) if config.getoption("dist") == "loadfile" else None

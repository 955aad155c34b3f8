"""Tests for which there is no time left are skipped, and the summary says how many they are.

    TEST_MINUTES=25 TEST_ORDER=$(git rev-parse HEAD) python -m pytest -p tests.time_limit tests

Files run in an order that is drawn from `TEST_ORDER`, so that what one commit has no time for runs
with another. A test that has begun is let end.
"""

import hashlib
import os
import time
from typing import Any

import pytest

REASON = "no time was left for it"
END = "OPEN_INSTRUCT_TESTS_END_AT_S"
"""Workers of pytest inherit it from the process that starts them."""


def pytest_configure() -> None:
    limit_s = 60 * float(os.environ["TEST_MINUTES"])
    os.environ.setdefault(END, str(time.time() + limit_s))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seed = os.environ.get("TEST_ORDER", "")

    def draw_place(item: pytest.Item) -> str:
        file = item.nodeid.partition("::")[0]
        return hashlib.sha256(f"{seed} {file}".encode()).hexdigest()

    items.sort(key=draw_place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of the test, which may take minutes."""
    if time.time() > float(os.environ[END]):
        pytest.skip(REASON)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", ())
        if REASON in str(report.longrepr)
    ]
    if skipped:
        files = sorted({report.nodeid.partition("::")[0] for report in skipped})
        terminalreporter.section(f"no time was left for {len(skipped)} tests, in", yellow=True)
        for file in files:
            terminalreporter.write_line(file)

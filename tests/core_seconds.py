"""Core-seconds of each test and folder, with all that a test starts: forked ranks, Ray, vLLM.

    python -m pytest -p tests.core_seconds tests/ranks

A worker of pytest adopts the orphans of its descendants, so that a process counts where its parent is gone too: what a
test has used is how far the sum over the worker's tree, of the living and of what they have reaped, has grown.
"""

import ctypes
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PR_SET_CHILD_SUBREAPER = 36
NUM_SHOWN = 40
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_spent: Counter[str] = Counter()


def pytest_configure() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def tree_core_seconds() -> float:
    """Of this process and all below it, by clock ticks of 10 ms."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    tree = [os.getpid()]
    for pid in tree:
        tree += children[pid]
    return sum(ticks.get(pid, 0) for pid in tree) / TICKS_PER_S


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = tree_core_seconds()
    item.user_properties.append(("core_seconds_before", before))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown":
        before = dict(item.user_properties)["core_seconds_before"]
        report.user_properties = [("core_seconds", tree_core_seconds() - float(before))]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "core_seconds":
            _spent[report.nodeid] += float(value)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    by_file: Counter[str] = Counter()
    by_folder: Counter[str] = Counter()
    for test, seconds in _spent.items():
        file = test.partition("::")[0]
        by_file[file] += seconds
        by_folder["/".join(file.split("/")[:2])] += seconds
    for title, counts in (("folder", by_folder), ("file", by_file), ("test", _spent)):
        terminalreporter.section(f"core-seconds by {title}")
        for name, seconds in counts.most_common(NUM_SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
    terminalreporter.write_line(f"{sum(by_folder.values()):8.1f}  in all")

"""Core-seconds of each test and folder, with all that a test starts: forked ranks, Ray, vLLM.

    python -m pytest -p tests.core_seconds tests/ranks

A worker of pytest adopts the orphans of its descendants, and looks at its whole tree four times a
second: a process counts with what it had used when it was last seen. Parents cannot be asked, as
Ray's raylet reaps without counting.
"""

import ctypes
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PR_SET_CHILD_SUBREAPER = 36
SAMPLES_EVERY_S = 0.25
NUM_SHOWN = 40
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_ticks: dict[tuple[int, int], int] = {}
"""By process and the moment of its start: what it has used, without its children."""
_sampling = threading.Lock()
_spent: Counter[str] = Counter()


def pytest_configure() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    threading.Thread(target=_sample_for_ever, daemon=True).start()


def _sample_for_ever() -> None:
    while True:
        tree_core_seconds()
        threading.Event().wait(SAMPLES_EVERY_S)


def tree_core_seconds() -> float:
    """Of this process and all that were ever seen below it, by clock ticks of 10 ms."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    found: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        found[pid] = int(fields[19]), int(fields[11]) + int(fields[12])
    tree = [os.getpid()]
    for pid in tree:
        tree += children[pid]
    with _sampling:
        for pid in tree:
            start, ticks = found[pid]
            _ticks[pid, start] = ticks
        return sum(_ticks.values()) / TICKS_PER_S


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = tree_core_seconds()
    item.user_properties.append(("core_seconds_before", before))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
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

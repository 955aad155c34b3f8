"""Tests for which no time is left are skipped by name, and no others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = ("test_first.py", "test_second.py", "test_third.py", "test_fourth.py")


def run_tests(folder: Path, *, minutes: str, order: str = "") -> str:
    for file in FILES:
        (folder / file).write_text("def test_nothing():\n    pass\n")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TEST_MINUTES": minutes}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.time_limit", "-c", os.devnull]
    return subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env={**environment, "TEST_ORDER": order},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("minutes", "outcome"), [("5", "4 passed"), ("0", "4 skipped")], ids=["in time", "too late"]
)
def test_tests_without_time_are_skipped_and_their_files_named(
    tmp_path: Path, minutes: str, outcome: str
) -> None:
    output = run_tests(tmp_path, minutes=minutes)
    _, _, named = output.partition("no time was left for 4 tests")
    assert outcome in output
    assert {file for file in FILES if file in named} == ({*FILES} if minutes == "0" else set())


def test_order_of_files_is_drawn_from_the_commit(tmp_path: Path) -> None:
    orders = {
        commit: re.findall(r"^(\w+\.py)::", run_tests(tmp_path, minutes="5", order=commit), re.M)
        for commit in ("a", "b", "c")
    }
    assert all(sorted(order) == sorted(FILES) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) > 1

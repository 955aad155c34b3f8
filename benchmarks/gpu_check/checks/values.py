"""`pytest -m gpu`: what is computed on the GPU against what is computed on the CPU."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from harness import REPOSITORY

from gpu_check.findings import Findings


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    report = work / "tests.xml"
    # Not pyproject's strict options: they want plugins of pytest that only our own tests need.
    words = [
        "-q",
        "-m",
        "gpu",
        "-o",
        "addopts=--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    words += ["--basetemp", str(work / "tests")]
    # Tests/conftest.py.
    environment = os.environ | ({"REHEARSE_GPU_TESTS": "1"} if rehearse else {})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/gpu"], cwd=REPOSITORY, env=environment
    )
    rows = (
        []
        if not report.exists()
        else [row_of(case) for case in ElementTree.parse(report).iter("testcase")]
    )
    findings.table("Tests", rows)
    states = [row["state"] for row in rows]
    findings.headline = f"{states.count('passed')} of {len(rows)} tests passed"
    for row in rows:
        findings.require(row["state"] == "passed", f"{row['test']}: {row['state']}: {row['why']}")
    findings.require(done.returncode == 0, f"pytest ended with code {done.returncode}")


def row_of(case: ElementTree.Element) -> dict[str, object]:
    """Of one test: its name, how it ended, why where it did not pass, and how long it took."""
    ends = {
        child.tag: child.get("message", "")
        for child in case
        if child.tag in ("failure", "error", "skipped")
    }
    state, why = next(iter(ends.items()), ("passed", ""))
    why = why.partition("\n")[0][:200]
    return {
        "test": case.get("name"),
        "state": state,
        "seconds": float(case.get("time", 0)),
        "why": why,
    }

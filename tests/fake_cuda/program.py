"""Runs a program on the pretended device, in a process of its own: it alone has the hooks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def skip_without_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++ (apt-get install g++) to build the hooks of the pretended device")


def results_of(module: str, *words: str) -> dict[str, Any]:
    """The JSON object in the last line that `python -m module` prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=REPOSITORY,
        # What DeepSpeed is told in this process, which pretends nothing, is not for that one.
        env={name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,  # below that of a test; an idle machine takes a minute
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # DeepSpeed prints before
    return found

"""`pids.json`: which processes a run consists of, for people and scripts; it exists while the run lives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from open_instruct.whole_file import replace_text


def write_pids(path: Path, *, driver: int, learners: Sequence[int], engines: Sequence[int]) -> None:
    """Write or replace the file in one step, so that a reader never meets half of it. Learners are in rank order."""
    replace_text(path, json.dumps({"driver": driver, "learners": list(learners), "engines": list(engines)}) + "\n")


def remove_pids(path: Path) -> None:
    """The run has ended."""
    path.unlink(missing_ok=True)

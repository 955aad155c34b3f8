"""One row of metrics a step: to `metrics.jsonl`, to the trackers asked for, and in one line for people."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from open_instruct.metric_table import followed
from open_instruct.run.alarms import GrowthWatch, SlownessWatch
from open_instruct.run.run_directory import rows_of
from open_instruct.whole_file import replace_text

log = logging.getLogger(__name__)

UNCOMPILED = (
    "since step {step} a function runs uncompiled, slower and without --activation_memory_budget: the compiler made "
    "too many versions of it. run.log says of which and why; --no_compile_model, with --activation_checkpointing full "
    "where memory is short, runs all of them so"
)


class Tracker(Protocol):
    """Takes metrics beside the file: a run of wandb or trackio, or an object with the same methods."""

    def log(self, row: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


class MetricsLog:
    """Append-only rows of JSON, one a step, which go to the trackers too. One process of a run writes them.

    :param warn: called with each warning that follows from a row's numbers.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = (), warn: Callable[[str], None] = log.warning) -> None:
        self.path = path
        self.trackers = trackers
        self.warn = warn
        self._num_uncompiled = 0.0
        self._growth = GrowthWatch()
        self._slowness = SlownessWatch()

    def keep_until(self, step: int) -> None:
        """Drop the rows after `step`, which a resumed run writes again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        if self.path.exists():
            replace_text(self.path, "".join(f"{json.dumps(row)}\n" for row in kept))
        self._growth = GrowthWatch()
        for row in kept:
            self._growth.after_step(row)

    def rows(self) -> list[dict[str, Any]]:
        """The rows written so far, without lines that a crash cut short or a disk damaged."""
        return list(rows_of(self.path))

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row. A number that JSON cannot say, the norm of a gradient that was left out, is null.

        :param row: with the number of the step as `step`.
        """
        json_row = {
            name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()
        }
        with self.path.open("a") as file:
            file.write(json.dumps(json_row, allow_nan=False) + "\n")
        for tracker in self.trackers:
            tracker.log(dict(row), step=int(row["step"]))
        for warning in (self._growth.after_step(row), *self._slowness.after_step(row)):
            if warning:
                self.warn(f"after step {row['step']} {warning}")
        if (num_uncompiled := row.get("uncompiled_functions", 0.0)) > self._num_uncompiled:
            self._num_uncompiled = num_uncompiled
            self.warn(UNCOMPILED.format(step=row["step"]))

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.finish()


def step_words(row: Mapping[str, float]) -> str:
    """The numbers that a person follows, in one line."""
    # Before the first update every pair is a tie, so the accuracy means nothing.
    ties = {"rewards/accuracy"} if row.get("rewards/margin") == 0 else set()
    return "  ".join(entry.words.format(row[entry.name]) for entry in followed() if entry.name in row.keys() - ties)

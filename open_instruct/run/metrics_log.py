"""Writes each step's row of metrics to `metrics.jsonl`, the terminal and trackers."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.training import LearnerConfig
from open_instruct.core.files import replace_text
from open_instruct.core.metrics import list_console_metrics
from open_instruct.run.alarms import GrowthWatch, SlownessWatch, write_warning
from open_instruct.run.opening import Run
from open_instruct.run.run_directory import read_rows
from open_instruct.run.trackers import Tracker, build_trackers

log = logging.getLogger(__name__)


class MetricsLog:
    """A file of JSON rows, one a step, which go to trackers too; one process writes it.

    :param warn: called with each warning that follows from a row's numbers.
    """

    def __init__(
        self,
        path: Path,
        trackers: Sequence[Tracker] = (),
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.path = path
        self.trackers = trackers
        self.warn = warn
        self._num_uncompiled = 0.0
        self._growth = GrowthWatch()
        self._slowness = SlownessWatch()

    def keep_until(self, step: int) -> None:
        """Drop the rows after `step`, which a resumed run writes again."""
        rows = [row for row in self.rows() if row["step"] <= step]
        if self.path.exists():
            replace_text(self.path, "".join(f"{json.dumps(row)}\n" for row in rows))
        self._growth = GrowthWatch()
        for row in rows:
            self._growth.after_step(row)

    def rows(self) -> list[dict[str, Any]]:
        """The rows written so far, without lines that a crash cut short or a disk damaged."""
        return list(read_rows(self.path))

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row; a number that JSON lacks, such as NaN, is null.

        :param row: with the number of the step as `step`.
        """
        json_row = dict(row)
        for name, value in row.items():
            if isinstance(value, float) and not isfinite(value):
                json_row[name] = None
        with self.path.open("a") as file:
            file.write(json.dumps(json_row, allow_nan=False) + "\n")
        for tracker in self.trackers:
            tracker.log(dict(row), step=int(row["step"]))
        for warning in (self._growth.after_step(row), *self._slowness.after_step(row)):
            if warning:
                self.warn(f"after step {row['step']} {warning}")
        num_uncompiled = row.get("uncompiled_functions", 0.0)
        if num_uncompiled > self._num_uncompiled:
            self._num_uncompiled = num_uncompiled
            self.warn(write_warning("uncompiled", row["step"]))

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.finish()


def describe_step(row: Mapping[str, float]) -> str:
    """The numbers that a person follows, in one line."""
    # Before the first update every pair is a tie, so the accuracy means nothing.
    all_are_ties = row.get("rewards/margin") == 0
    words = []
    for entry in list_console_metrics():
        means_nothing = all_are_ties and entry.name == "rewards/accuracy"
        if entry.name in row and not means_nothing:
            words.append(entry.words.format(row[entry.name]))
    return "  ".join(words)


@contextmanager
def log_steps(
    run: Run,
    config: LearnerConfig,
    *,
    first_step: int,
    num_steps: int,
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yield a function for the number and metrics of every step; rank 0 writes and shows them.

    Rows after `first_step` that an earlier start left are dropped, as they are written again.
    """
    if run.process.rank != 0:
        yield lambda step, row: None
        return
    trackers = build_trackers(
        config.logging, folder=run.directory.path, config=as_flat_dict(config)
    )
    with (
        closing(MetricsLog(run.directory.metrics, trackers, run.console.warn)) as log,
        run.console.training(first_step=first_step, num_steps=num_steps) as show,
    ):
        log.keep_until(first_step)

        def on_step(step: int, row: Mapping[str, float]) -> None:
            log.write({"step": step} | dict(row))
            show(step, describe_step(row))

        yield on_step

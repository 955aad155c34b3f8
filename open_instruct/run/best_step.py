"""`--keep_best`: the step with the best value of a metric, and `best.json`, which names it to people and to scripts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from open_instruct.metric_table import entry_of
from open_instruct.run.run_directory import RunDirectory, is_number
from open_instruct.whole_file import replace_text


@dataclass(frozen=True, slots=True, kw_only=True)
class BestStep:
    """The best of the steps that were compared: `BestStep(step=40, metric="eval/loss", value=1.25)`."""

    step: int
    metric: str
    value: float

    def __str__(self) -> str:
        return f"step {self.step}, the best by {self.metric} ({self.value:.6g})"


def better_step(best: BestStep | None, step: int, row: Mapping[str, Any], *, metric: str) -> BestStep | None:
    """`step`, or the `best` before it where that is as good, or where `row` has no finite value of the metric."""
    value = row.get(metric)
    if value is None or not is_number(value):  # which NaN and infinity are not
        return best
    if best is not None and not entry_of(metric).improves(value, best.value):
        return best
    return BestStep(step=step, metric=metric, value=float(value))


def write_best_step(directory: RunDirectory, best: BestStep | None) -> None:
    """Write `best.json`, or remove it where there is none."""
    if best is None:
        directory.best.unlink(missing_ok=True)
    else:
        replace_text(directory.best, json.dumps(asdict(best)) + "\n")


def read_best_step(directory: RunDirectory) -> BestStep | None:
    """What `best.json` says; None where there is none that can be read."""
    try:
        return BestStep(**json.loads(directory.best.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None

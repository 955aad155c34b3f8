"""Columns of numbers for a page: few enough points to draw, and as many digits as one can see."""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from open_instruct.metric_table import entry_of, in_order
from open_instruct.run.run_directory import is_number

# A curve is drawn some 700 pixels wide at most.
MAX_POINTS = 4000


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of metrics as columns: `step`, `columns` and `constants` by name, and `steps_in_a_point`.

    Each point is the mean of `steps_in_a_point` steps. Columns are in the order of the table of metrics. Where a row
    has no number the value is None; a column without any number is left out. A number that is the same at all of
    several steps is a constant.

    Example: `{"step": 1, "loss": 0.5}` and `{"step": 2}` give
    `{"step": [1, 2], "columns": {"loss": [0.5, None]}, "constants": {}, "steps_in_a_point": 1}`.
    """
    size = max(1, -(-len(rows) // MAX_POINTS))
    points = [rows[start : start + size] for start in range(0, len(rows), size)]
    names = {name for row in rows for name, value in row.items() if is_number(value) and entry_of(name).drawn}
    series: dict[str, Any] = {"step": [point[-1]["step"] for point in points], "columns": {}, "constants": {}}
    for name in in_order(names - {"step"}):
        values = [mean_of([row.get(name) for row in point]) for point in points]
        if len(values) > 1 and len(set(values)) == 1:
            series["constants"][name] = values[0]
        else:
            series["columns"][name] = values
    return series | {"steps_in_a_point": size}


def mean_of(values: Sequence[Any]) -> float | None:
    """The mean of the numbers in `values`, to six digits; None without any."""
    numbers = [value for value in values if is_number(value)]
    return rounded(fsum(numbers) / len(numbers)) if numbers else None


def rounded(value: float) -> float:
    return float(f"{value:.6g}")

"""Columns of numbers for a page: few enough points to draw, and as many digits as one can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from open_instruct.metric_table import entry_of, in_order
from open_instruct.run.run_directory import is_number

# A curve is drawn some 700 pixels wide at most.
MAX_POINTS = 4000


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`step`, by name the `columns` in the order of the table of metrics, the `constants`, and how many steps
    a point averages.

    A place where a row has no number is None; a column that has none anywhere is left out. One that is the same at
    all of several steps is a constant.

    Example: `{"step": 1, "loss": 0.5}` and `{"step": 2}` give
    `{"step": [1, 2], "columns": {"loss": [0.5, None]}, "constants": {}, "steps_in_a_point": 1}`.
    """
    size = max(1, -(-len(rows) // MAX_POINTS))
    starts = range(0, len(rows), size)
    names = {name for row in rows for name, value in row.items() if is_number(value) and entry_of(name).drawn}
    columns = {
        name: [mean_of([row.get(name) for row in rows[start : start + size]]) for start in starts]
        for name in in_order(names - {"step"})
    }
    constants = {name: values[0] for name, values in columns.items() if len(values) > 1 and len(set(values)) == 1}
    return {
        "step": [rows[min(start + size, len(rows)) - 1]["step"] for start in starts],
        "columns": {name: values for name, values in columns.items() if name not in constants},
        "constants": constants,
        "steps_in_a_point": size,
    }


def mean_of(values: Sequence[Any]) -> float | None:
    """Of the numbers among them, to six digits; None where there is none."""
    numbers = [value for value in values if is_number(value)]
    return rounded(fsum(numbers) / len(numbers)) if numbers else None


def rounded(value: float) -> float:
    return float(f"{value:.6g}")

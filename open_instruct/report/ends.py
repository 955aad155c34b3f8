"""The values with which a metric began and ended, as every page and line gives them."""

from collections.abc import Sequence
from math import fsum
from typing import Any

from open_instruct.run.run_directory import is_number

Rows = Sequence[dict[str, Any]]

# A page compares the mean of the first fifth of the steps with that of the last: one step alone is
# chance.
NUM_PARTS = 5
# Of the largest margin of a run: below it lies rounding.
SMALL_SHARE = 0.01


def step_ends(rows: Rows, name: str) -> tuple[float, float] | None:
    """The first and the last value of a metric; None if no row has it."""
    values = _find_values(rows, name)
    if not values:
        return None
    return _round(values[0]), _round(values[-1])


def mean_ends(rows: Rows, name: str) -> tuple[float, float] | None:
    """The means of a metric over the first and last fifth of the steps; None if no row has it."""
    values = _find_values(rows, name)
    if not values:
        return None
    size = count_steps_of_mean(values)
    return _round(fsum(values[:size]) / size), _round(fsum(values[-size:]) / size)


def count_steps_of_mean(rows: Sequence[Any]) -> int:
    return max(1, len(rows) // NUM_PARTS)


def describe_ends(ends: dict[str, tuple[float, float] | None]) -> str:
    """Begin and end of each metric, such as `loss 0.6931 -> 0.4, reward 0 -> 1`."""
    words = []
    for name, pair in ends.items():
        if pair:
            words.append(f"{name.removeprefix('eval/')} {pair[0]:.4g} -> {pair[1]:.4g}")
    return ", ".join(words)


def _find_values(rows: Rows, name: str) -> list[float]:
    """The numbers of a metric in order.

    In its first step a policy is its own reference: both replies of a pair have the reward 0, and
    the share of pairs whose chosen reply has the higher one means nothing.
    """
    if name == "rewards/accuracy" and len(rows) > 1 and _begins_as_reference(rows):
        rows = rows[1:]
    return [row[name] for row in rows if is_number(row.get(name))]


def _begins_as_reference(rows: Rows) -> bool:
    margins = [row.get("rewards/margin") for row in rows]
    sizes = [abs(margin) for margin in margins if margin is not None and is_number(margin)]
    return is_number(margins[0]) and sizes[0] <= SMALL_SHARE * max(sizes)


def _round(value: float) -> float:
    """Round away the noise around 0, and -0."""
    return round(value, 6) + 0.0

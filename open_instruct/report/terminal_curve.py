"""A curve drawn with blocks in the terminal: a column a value, a line eight levels."""

import math
from collections.abc import Iterator, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
LEVELS = len(BLOCKS) - 1


def draw_curve(
    values: Sequence[float],
    *,
    width: int = 60,
    height: int = 8,
    title: str = "",
) -> str:
    """Draw `values`, evenly spaced from left to right, as lines of text.

    The axis on the left names the largest and the smallest value. More values than columns are
    averaged; fewer are as many columns wide as there are. Values that are not finite leave a gap.

    Args:
        values: what to draw, in order.
        width: characters of the longest line, the axis included.
        height: lines of the plot; the title is one more.
        title: a line above the plot; none if empty.

    Returns:
        Lines joined by newlines, without one at the end.

    Example::

        >>> print(draw_curve([0.0, 1.0, 2.0, 3.0], width=11, height=2, title="up"))
        up
        3 ┤    ▃▃██
        0 ┤▁▁▆▆████
    """
    assert height >= 1, "a plot has at least one line"
    lines = [title] if title else []
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "\n".join([*lines, "(no values)"])
    low = min(finite)
    high = max(finite)
    label_of_line = {height - 1: f"{low:.3g}", 0: f"{high:.3g}"}
    margin = max(map(len, label_of_line.values()))
    num_columns = max(1, width - margin - len(" ┤"))
    means = _means(values, num_columns)
    levels = [_level(mean, low, high, height * LEVELS) for mean in means]
    for line in range(height):
        below = (height - 1 - line) * LEVELS
        blocks = "".join(BLOCKS[min(LEVELS, max(0, level - below))] for level in levels)
        lines.append(f"{label_of_line.get(line, ''):>{margin}} ┤{blocks}".rstrip())
    return "\n".join(lines)


def _means(values: Sequence[float], num_columns: int) -> Iterator[float]:
    """Yields the mean of the finite values in each column, or NaN if there are none."""
    for column in range(num_columns):
        start = column * len(values) // num_columns
        stop = (column + 1) * len(values) // num_columns
        finite = [value for value in values[start : max(stop, start + 1)] if math.isfinite(value)]
        if finite:
            yield math.fsum(finite) / len(finite)
        else:
            yield math.nan


def _level(
    value: float,
    low: float,
    high: float,
    num_levels: int,
) -> int:
    """The height of a value, from 1 to `num_levels`, or 0 for a gap.

    A flat curve is half as high as the plot.
    """
    if not math.isfinite(value):
        return 0
    share = 0.5
    if high > low:
        share = (value - low) / (high - low)
    return 1 + round(share * (num_levels - 1))

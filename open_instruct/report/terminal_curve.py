"""A curve drawn in the terminal, in braille dots: each character is two dots wide and four high."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLANK = 0x2800
# Bit of each dot of a braille character, by its row (from the top) and its column.
DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
DOTS_HIGH, DOTS_WIDE = len(DOT_BITS), len(DOT_BITS[0])


def draw_curve(values: Sequence[float], *, width: int = 60, height: int = 8, title: str = "") -> str:
    """`values`, evenly spaced from left to right, as lines of text.

    The axis on the left names the largest and the smallest value. More values than dots are averaged;
    fewer are joined by straight lines. Values that are not finite leave a gap.

    Args:
        values: what to draw, in order.
        width: characters of the longest line, the axis included.
        height: lines of the plot; the title is one more.
        title: a line above the plot; none if empty.

    Returns:
        Lines joined by newlines, without one at the end.

    Example::

        >>> print(draw_curve([0.0, 1.0], width=10, height=2, title="up"))
        up
        1 ┤   ⢀⡠⠔⠊
        0 ┤⡠⠔⠊⠁
    """
    assert height >= 1, "a plot has at least one line"
    heading = [title] if title else []
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "\n".join([*heading, "(no values)"])
    low, high = min(finite), max(finite)
    label_of_line = {height - 1: f"{low:.3g}", 0: f"{high:.3g}"}
    margin = max(len(label) for label in label_of_line.values())
    columns = max(1, width - margin - len(" ┤"))

    levels = [_level(value, low, high, DOTS_HIGH * height) for value in _resample(values, DOTS_WIDE * columns)]
    lines = _dots(levels, columns, height)
    return "\n".join(
        heading + [f"{label_of_line.get(index, ''):>{margin}} ┤{line}".rstrip() for index, line in enumerate(lines)]
    )


def _resample(values: Sequence[float], num_points: int) -> list[float]:
    """`num_points` values over the same range: means of neighbours, or points between neighbours."""
    count = len(values)
    if count > num_points:
        edges = [index * count // num_points for index in range(num_points + 1)]
        return [_mean(values[start:stop]) for start, stop in itertools.pairwise(edges)]
    if count == 1 or num_points == 1:
        return [_mean(values)] * num_points
    points = []
    for index in range(num_points):
        position = index * (count - 1) / (num_points - 1)
        left = int(position)
        share = position - left
        # A point that falls on a value takes it alone: its neighbour may not be finite.
        points.append(values[left] if share == 0 else (1 - share) * values[left] + share * values[left + 1])
    return points


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _level(value: float, low: float, high: float, num_levels: int) -> int | None:
    """Height of a value in dots from the bottom; None for a gap. A flat curve runs through the middle."""
    if not math.isfinite(value):
        return None
    share = (value - low) / (high - low) if high > low else 0.5
    return round(share * (num_levels - 1))


def _dots(levels: Sequence[int | None], columns: int, height: int) -> list[str]:
    """Lines of braille: one dot a column, and a vertical run of dots where two columns lie further apart."""
    cells = [[0] * columns for _ in range(height)]
    previous: int | None = None
    for x, level in enumerate(levels):
        if level is None:
            previous = None
            continue
        start = level if previous is None else previous + (level > previous) - (level < previous)
        for y in range(min(start, level), max(start, level) + 1):
            row_from_top = DOTS_HIGH * height - 1 - y
            cells[row_from_top // DOTS_HIGH][x // DOTS_WIDE] |= DOT_BITS[row_from_top % DOTS_HIGH][x % DOTS_WIDE]
        previous = level
    return ["".join(chr(BLANK + bits) if bits else " " for bits in line) for line in cells]

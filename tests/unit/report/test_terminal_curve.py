"""Curves drawn in the terminal."""

import doctest
import math
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.report import terminal_curve as curves
from open_instruct.report.terminal_curve import draw_curve

NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


def plot_of(drawing: str) -> list[str]:
    return [line.partition("┤")[2] for line in drawing.splitlines() if "┤" in line]


def levels_of(drawing: str) -> list[int]:
    """How high every column is, in eighths of a line."""
    lines = [[curves.BLOCKS.index(block) for block in line] for line in plot_of(drawing)]
    return [sum(column) for column in zip_longest(*lines, fillvalue=0)]


def test_example_in_the_docstring() -> None:
    assert doctest.testmod(curves).failed == 0


def test_straight_line_rises_evenly() -> None:
    # Eight columns (after the label and " ┤") of eight levels.
    assert levels_of(draw_curve(list(map(float, range(8))), width=11, height=1)) == list(
        range(1, 9)
    )


def test_blocks_stand_on_each_other() -> None:
    assert plot_of(draw_curve([0.0, 0.0, 7.0, 7.0], width=7, height=2)) == ["  ██", "▁▁██"]


def test_largest_and_smallest_are_named_at_top_and_bottom() -> None:
    title, top, middle, bottom = draw_curve(
        [0.6931, 0.5, 0.25], width=30, height=3, title="loss"
    ).splitlines()
    assert title == "loss"
    assert top.startswith("0.693 ┤")
    assert middle.startswith("      ┤")
    assert bottom.startswith(" 0.25 ┤")


def test_flat_curve_is_a_level_line() -> None:
    levels = levels_of(draw_curve([2.0] * 9, width=13, height=2))
    assert len(levels) == 13 - len("2 ┤") and len(set(levels)) == 1


def test_values_that_are_not_finite_leave_a_gap() -> None:
    assert levels_of(draw_curve([0.0, math.nan, math.inf, 3.0], width=7, height=1)) == [1, 0, 0, 8]


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_terminal_curve_says_when_it_has_nothing_to_draw(values: list[float]) -> None:
    assert draw_curve(values, title="loss") == "loss\n(no values)"


def test_more_values_than_columns_are_averaged() -> None:
    many = [value for value in (0.0, 2.0, 6.0, 8.0) for _ in range(100)]
    assert levels_of(draw_curve([*many, 0.0, 8.0] * 2, width=7, height=1)) == [2, 7, 2, 7]


@given(values=st.lists(NUMBERS, max_size=200), width=st.integers(20, 90), height=st.integers(1, 12))
def test_terminal_curve_fits_for_any_values(values: list[float], width: int, height: int) -> None:
    lines = draw_curve(values, width=width, height=height, title="any").splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) == (height + 1 if any(map(math.isfinite, values)) else 2)

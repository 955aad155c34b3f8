"""Curves drawn in the terminal."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.report import terminal_curve as curves
from open_instruct.report.terminal_curve import draw_curve

NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


def plot_of(drawing: str) -> list[str]:
    return [line.partition("┤")[2] for line in drawing.splitlines() if "┤" in line]


def dots_of(drawing: str) -> set[tuple[int, int]]:
    """(x from the left, y from the bottom) of every dot set."""
    lines = plot_of(drawing)
    return {
        (2 * column + x, 4 * (len(lines) - row) - 1 - y)
        for row, line in enumerate(lines)
        for column, character in enumerate(line)
        for y, bits in enumerate(curves.DOT_BITS)
        for x, bit in enumerate(bits)
        if character != " " and (ord(character) - curves.BLANK) & bit
    }


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(curves).failed == 0


def test_a_straight_line_is_a_diagonal_of_dots() -> None:
    # Two columns of characters (after the label and " ┤") by one line: four dots either way.
    assert dots_of(draw_curve([0.0, 1.0, 2.0, 3.0], width=5, height=1)) == {(0, 0), (1, 1), (2, 2), (3, 3)}


def test_a_jump_is_joined_by_a_vertical_run() -> None:
    dots = dots_of(draw_curve([0.0, 0.0, 7.0, 7.0], width=5, height=2))
    assert dots == {(0, 0), (1, 0), (3, 7)} | {(2, y) for y in range(1, 8)}


def test_largest_and_smallest_are_named_at_top_and_bottom() -> None:
    title, top, middle, bottom = draw_curve([0.6931, 0.5, 0.25], width=30, height=3, title="loss").splitlines()
    assert title == "loss"
    assert top.startswith("0.693 ┤")
    assert middle.startswith("      ┤")
    assert bottom.startswith(" 0.25 ┤")


def test_a_flat_curve_is_a_level_line() -> None:
    dots = dots_of(draw_curve([2.0] * 9, width=13, height=2))
    assert len({y for _, y in dots}) == 1
    assert {x for x, _ in dots} == set(range(2 * (13 - len("2 ┤"))))


def test_values_that_are_not_finite_leave_a_gap() -> None:
    dots = dots_of(draw_curve([0.0, math.nan, math.inf, 3.0], width=5, height=1))
    assert dots == {(0, 0), (3, 3)}


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_nothing_to_draw_says_so(values: list[float]) -> None:
    assert draw_curve(values, title="loss") == "loss\n(no values)"


def test_more_values_than_dots_are_averaged() -> None:
    many = [value for value in (0.0, 1.0, 2.0, 3.0) for _ in range(100)]
    assert dots_of(draw_curve(many, width=5, height=1)) == {(0, 0), (1, 1), (2, 2), (3, 3)}


@given(values=st.lists(NUMBERS, max_size=200), width=st.integers(20, 90), height=st.integers(1, 12))
def test_it_fits_whatever_the_values(values: list[float], width: int, height: int) -> None:
    lines = draw_curve(values, width=width, height=height, title="any").splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) == (height + 1 if any(map(math.isfinite, values)) else 2)

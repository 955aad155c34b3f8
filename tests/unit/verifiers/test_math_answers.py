"""Answers of mathematics as MATH and its kin write them: which are the same, and which only look so."""

import json
from pathlib import Path

import pytest

from open_instruct.verifiers.answers import MAX_CHARACTERS, are_equal

PAIRS = json.loads(Path(__file__).with_name("math_answers.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("one", "other"), PAIRS["same"])
def test_same_answer_written_in_two_ways(one: str, other: str) -> None:
    assert are_equal(one, other)
    assert are_equal(other, one)


@pytest.mark.parametrize(("one", "other"), PAIRS["different"])
def test_different_answers(one: str, other: str) -> None:
    assert not are_equal(one, other)
    assert not are_equal(other, one)


@pytest.mark.parametrize("text", ["", " ", "$$"])
def test_empty_text_is_no_answer(text: str) -> None:
    assert not are_equal(text, text)


def test_long_answers_are_compared_as_text() -> None:
    terms = " + ".join(["x"] * MAX_CHARACTERS)
    assert are_equal(terms, terms.replace(" + ", "  +  "))
    assert not are_equal(terms, f"{MAX_CHARACTERS}x")

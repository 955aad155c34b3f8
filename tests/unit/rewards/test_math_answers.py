"""Answers of mathematics as MATH and its kin write them: which are the same, and which only look
so.

math_pairs.json has kind, completion, ground truth, and whether that is right, judged by hand before
any was tried.
"""

import json
from pathlib import Path

import pytest

from open_instruct.rewards.answers import Math
from open_instruct.rewards.mathematics.answers import MAX_CHARACTERS, are_equal
from open_instruct.rewards.mathematics.text import RULES, Rule

JUDGED = json.loads(Path(__file__).with_name("math_pairs.json").read_text(encoding="utf-8"))
PAIRS = json.loads(Path(__file__).with_name("math_answers.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("one", "other"), PAIRS["same"])
def test_same_answer_written_in_two_ways(one: str, other: str) -> None:
    assert are_equal(one, other)
    assert are_equal(other, one)


@pytest.mark.parametrize(("one", "other"), PAIRS["different"])
def test_different_answers(one: str, other: str) -> None:
    assert not are_equal(one, other)
    assert not are_equal(other, one)


@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in JUDGED}))
def test_completions_are_judged_as_by_hand(kind: str) -> None:
    judged = [
        (completion, truth, is_right)
        for each, completion, truth, is_right in JUDGED
        if each == kind
    ]
    scores = [
        (completion, truth, Math().score(completion, truth) == 1.0)
        for completion, truth, _ in judged
    ]
    assert scores == judged


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.example)
def test_rules_do_what_their_example_says(rule: Rule) -> None:
    before, after = rule.example.split(" -> ")
    assert rule.apply(before).split() == after.split()


@pytest.mark.parametrize("text", ["", " ", "$$"])
def test_empty_text_is_no_answer(text: str) -> None:
    assert not are_equal(text, text)


def test_long_answers_are_compared_as_text() -> None:
    terms = " + ".join(["x"] * MAX_CHARACTERS)
    assert are_equal(terms, terms.replace(" + ", "  +  "))
    assert not are_equal(terms, f"{MAX_CHARACTERS}x")

"""Answers that are texts and numbers: which are the same, and which only lose what tells them
apart.
"""

from decimal import Decimal
from typing import Any

import pytest

from open_instruct.config.policy_sections import RewardSection
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.words import (
    find_last_number,
    find_tagged_answer,
    have_same_words,
    split_words,
)

VERIFIERS = known_verifiers(RewardSection())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Eiffel Tower!", ["eiffel", "tower"]),
        ("(A)", ["a"]),
        ("the A", ["a"]),
        ("the", ["the"]),
        ("...", []),
        ("", []),
        ("It is 1.5.", ["it", "is", "1.5"]),
        ("x = -5", ["x", "-5"]),
        ("\u22125", ["-5"]),
        ("$1,250!", ["1250"]),
        ("1,00,000", ["100000"]),
        ("(3,4)", ["3,4"]),
        (".5", [".5"]),
        ("1/2 of it", ["1/2", "of", "it"]),
        ("4:30", ["4:30"]),
        ("well-known", ["wellknown"]),
        ("**Paris**", ["paris"]),
        ("covid-19", ["covid19"]),
    ],
)
def test_words_keep_what_tells_numbers_apart(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("", "A"),
        ("the", "a"),
        ("", ""),
        ("...", "!"),
        ("1.5", "15"),
        ("5", "-5"),
        ("1/2", "12"),
        ("(1,2)", "12"),
    ],
)
def test_words_of_different_answers_differ(text: str, other: str) -> None:
    assert not have_same_words(text, other)
    assert not have_same_words(other, text)


def test_signs_alone_are_compared_as_they_are() -> None:
    assert have_same_words(" + ", "+")
    assert not have_same_words("+", "-")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so x = \u22125", "-5"),
        ("\u20135", "-5"),
        ("7\u22125", "5"),
        ("7-5", "5"),
        ("it lost -$1,250.50", "-1250.50"),
        ("1\u202f250 apples", "1250"),
        ("12{,}000", "12000"),
        ("10\\,000", "10000"),
        ("1,00,000", "100000"),
        ("[3,4]", "4"),
        ("3 + 4 = 7\n#### 42\nI used 3 steps.", "42"),
        ("#### $42 for 2 shirts", "42"),
        ("#### **42**", "42"),
        ("#### 1. Add\n3 + 4 = 7\n#### 2. Double\nIt is 14", "14"),
        ("72.", "72"),
        (".5", ".5"),
    ],
)
def test_the_last_number_is_read_as_it_is_written(text: str, number: str) -> None:
    assert find_last_number(text) == Decimal(number)


@pytest.mark.parametrize(
    ("completion", "judged"),
    [
        ("<think>a</think>\n<answer> Paris </answer>", "Paris"),
        ("<answer>1</answer> no, <answer>2</answer>.", "2"),
        ("<ANSWER>1</ANSWER>", "1"),
        ("<answer>1 of <answer>2</answer>", "2"),
        ("<answer>cut", "cut"),
        ("<answer></answer>", ""),
        ("none", "none"),
    ],
)
def test_what_stands_between_the_last_tags_is_judged(completion: str, judged: str) -> None:
    assert find_tagged_answer(completion) == judged


@pytest.mark.parametrize(
    ("name", "answer", "truth"),
    [
        ("string_matcher", "Paris", "Paris"),
        ("string_f1", "Paris", "Paris"),
        ("flan", "Paris", "Paris"),
        ("puzzle", "Paris", "Paris"),
        ("gsm8k", "42", "42"),
        ("math", "42", "42"),
        ("math", "\\boxed{42}", "42"),
        ("code", "def add(a, b): return a + b", ["assert add(1, 2) == 3"]),
        ("ifeval", "hello there", {"func_name": "validate_lowercase"}),
        ("ifeval", '"hello"', {"func_name": "validate_quotation"}),
    ],
)
def test_answers_in_tags_are_judged_as_those_without(name: str, answer: str, truth: Any) -> None:
    verifier = VERIFIERS[name]
    for completion in (f"<answer>{answer}</answer>", f"3 of 4: <answer>{answer}</answer>", answer):
        assert verifier.score(completion, truth) == 1.0 or name == "code", completion


@pytest.mark.parametrize(
    ("name", "truths"),
    [
        ("gsm8k", ["", "forty-two", "see the solution", "####"]),
        ("string_matcher", ["", " ", [], ["x", ""]]),
        ("string_f1", ["", []]),
        ("flan", [""]),
        ("puzzle", [""]),
        ("re_search", ["[]", '[""]']),
        ("re_search_f1", ["[]"]),
        ("math", ["", " ", "$$", "\\boxed{}"]),
        ("strict_math", [""]),
    ],
)
def test_a_truth_that_nothing_equals_is_refused(name: str, truths: list[Any]) -> None:
    for truth in truths:
        with pytest.raises(ValueError):
            VERIFIERS[name].check_ground_truth(truth)


@pytest.mark.parametrize(
    ("name", "truth", "answer", "score"),
    [
        ("string_matcher", 42.0, "42", 1.0),
        ("string_matcher", [7, 42.0], "42", 1.0),
        ("string_matcher", 42.0, "420", 0.0),
        ("string_matcher", "1.50", "1.5", 0.0),
        ("string_f1", 42.0, "42", 1.0),
        ("flan", 0.00001, "The answer is: 0.00001", 1.0),
        ("puzzle", 2.5, "2.5", 1.0),
        ("re_search", 3.0, "<finish>3</finish>", 1.0),
        ("gsm8k", 1e16, "10000000000000000", 1.0),
        ("gsm8k", 1e16, "16", 0.0),
        ("math", 1e22, "\\boxed{10^{22}}", 1.0),
    ],
)
def test_number_of_a_table_is_the_number_that_people_write(
    name: str, truth: Any, answer: str, score: float
) -> None:
    VERIFIERS[name].check_ground_truth(truth)
    assert VERIFIERS[name].score(answer, truth) == score


@pytest.mark.parametrize(
    "truth",
    [
        [{"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}],
        [{"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}],
        "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
        ["[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [{'num_words': None}]}]"],
        '[{"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}]',
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ],
)
def test_rows_of_ifeval_are_read_in_each_of_their_forms(truth: Any) -> None:
    ifeval = VERIFIERS["ifeval"]
    ifeval.check_ground_truth(truth)
    assert [ifeval.score(text, truth) for text in ("no comma", "one, comma")] == [1.0, 0.0]

"""Constraints of IFEval: for each a text that follows it and one that does not, and the rows they
come from.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from open_instruct.config.policy_sections import RewardSection
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.rewards.constraints import RELATIONS, count_sentences, has_postscript
from open_instruct.rewards.ifeval import SUITES, IFEval, parse_constraints
from open_instruct.rewards.registry import known_verifiers

# For each constraint: its name, its arguments, texts that follow it, and texts that do not.
CASES = json.loads(Path(__file__).with_name("ifeval_cases.json").read_text(encoding="utf-8"))
# As published rows have it: all arguments of all constraints, null where they do not belong.
NULLS = dict.fromkeys(
    ["N", "quantifier", "end_phrase", "keyword_list", "word", "letter", "i", "options"]
)


def score(text: str, ground_truth: Any) -> float:
    return known_verifiers(RewardSection())["ifeval"].score(text, ground_truth)


def ifeval(name: str, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    return {"instruction_id_list": [name], "kwargs": [kwargs]}


@pytest.mark.parametrize(("name", "arguments", "follow", "break_"), CASES["ifeval"])
def test_instructions_of_ifeval(
    name: str, arguments: dict[str, Any], follow: list[str], break_: list[str]
) -> None:
    truth = ifeval(name, NULLS | arguments)
    assert [text for text in follow if score(text, truth) != 1.0] == []
    assert [text for text in break_ if score(text, truth) != 0.0] == []


@pytest.mark.parametrize(("name", "arguments", "follow", "break_"), CASES["rlvr_ifeval"])
def test_functions_of_rlvr_ifeval(
    name: str, arguments: dict[str, Any], follow: list[str], break_: list[str]
) -> None:
    truth = json.dumps(NULLS | arguments | {"func_name": name})
    assert [text for text in follow if score(text, truth) != 1.0] == []
    assert [text for text in break_ if score(text, truth) != 0.0] == []


def test_every_constraint_is_tried() -> None:
    for suite, language in (
        ("ifeval", "language:response_language"),
        ("rlvr_ifeval", "validate_response_language"),
    ):
        assert {name for name, *_ in CASES[suite]} | {language} == SUITES[suite].keys()
        assert len(SUITES[suite]) == 25


@pytest.mark.parametrize(
    ("relation", "holds"),
    [
        ("at least", [False, True, True]),
        ("at most", [True, True, False]),
        ("less than", [True, False, False]),
        ("exactly", [False, True, False]),
        ("around", [True, True, True]),
    ],
)
def test_relations_at_their_border(relation: str, holds: list[bool]) -> None:
    assert [RELATIONS[relation](number, 4) for number in (3, 4, 5)] == holds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("No full stop", 1),
        ("One. Two! Three?", 3),
        ("Wait... what?! Yes.", 3),
        ('He said "Go." Then he left.', 2),
        ("Dr. J. R. Smith paid 3.50 for e.g. tea vs. milk.", 1),
        ("Is it? No. It is not.", 3),
        ("a.b c", 1),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_score_is_the_share_of_constraints() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase", "detectable_format:title"]
    truth = {"instruction_id_list": names, "kwargs": [{}, None, {"num_words": None}]}
    assert score("a <<b>>", truth) == 1.0
    assert score("A <<b>>", truth) == pytest.approx(2 / 3)
    assert score("A, b", truth) == 0.0


def test_empty_text_follows_nothing_and_spaces_around_one_do_not_count() -> None:
    assert score(" \n", ifeval("punctuation:no_comma", {})) == 0.0
    assert score('\n"a"\n', ifeval("startend:quotation", {})) == 1.0


def test_language(monkeypatch: pytest.MonkeyPatch) -> None:
    class LangDetectException(Exception):
        pass

    def detect(text: str) -> str:
        if text == "?":
            raise LangDetectException
        return "zh-cn" if text == "你好" else "en"

    fake = ModuleType("langdetect")
    vars(fake).update(
        DetectorFactory=SimpleNamespace(), LangDetectException=LangDetectException, detect=detect
    )
    fake.__spec__ = importlib.util.spec_from_loader("langdetect", None)
    monkeypatch.setitem(sys.modules, "langdetect", fake)
    for truth in (
        ifeval("language:response_language", {"language": "zh"}),
        {"func_name": "validate_response_language", "language": "zh"},
    ):
        assert [score(text, truth) for text in ("你好", "hello", "?")] == [1.0, 0.0, 0.0]


def test_language_without_langdetect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"'language:response_language' needs langdetect; install it"
    ):
        parse_constraints(ifeval("language:response_language", {"language": "fr"}))


@pytest.mark.parametrize(
    ("truth", "told"),
    [
        ("no_comma", "must be an object or its JSON"),
        ([], "must be an object"),
        (5, "must be an object"),
        ({"N": 3}, "must be an object or its JSON, with 'func_name'"),
        ({"instruction_id_list": [], "kwargs": []}, "one entry a constraint"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, "one entry a constraint"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
            "one entry a constraint",
        ),
        (
            ifeval("punctuation:comma", {}),
            "there is no constraint 'punctuation:comma'; known are change_case:",
        ),
        ({"func_name": None}, "there is no constraint None; known are validate_choice"),
        ({"func_name": ["x"]}, "there is no constraint ['x']"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["{}"]},
            "must be an object, not '{}'",
        ),
        ({"func_name": "verify_bullet_points"}, "are 'N', and it has none"),
        ({"func_name": "validate_title", "N": 1}, "are none, and it has 'N'"),
        (
            ifeval("length_constraints:number_words", {"num_words": 3}),
            "'num_words', 'relation', and it has 'num_words'",
        ),
        (
            {"func_name": "validate_word_constraint", "N": 3, "quantifier": "over"},
            "must be one of 'at least'",
        ),
        (
            {"func_name": "verify_bullet_points", "N": "3"},
            "'N' of 'verify_bullet_points' must be a whole number",
        ),
        (
            {"func_name": "verify_bullet_points", "N": 2.5},
            "must be a whole number of at least 0, not 2.5",
        ),
        ('{"func_name": "verify_bullet_points", "N": Infinity}', "must be a whole number"),
        ({"func_name": "verify_bullet_points", "N": True}, "must be a whole number"),
        (
            {"func_name": "validate_paragraphs", "N": 2, "i": 0, "first_word": "a"},
            "of at least 1, not 0",
        ),
        ({"func_name": "verify_keywords", "keyword_list": "a"}, "must be a list of texts"),
        ({"func_name": "verify_keywords", "keyword_list": [""]}, "must be a list of texts"),
        ({"func_name": "validate_end", "end_phrase": " "}, "must be text, not ' '"),
        (
            {"func_name": "verify_letter_frequency", "letter": "ab", "N": 1},
            "must be a single character",
        ),
    ],
)
def test_ground_truths_that_are_not_understood_are_found_with_the_row(
    truth: Any, told: str
) -> None:
    row = {"prompt": "?", "dataset": ["ifeval"], "ground_truth": [truth]}
    with pytest.raises(MalformedRow) as raised:
        parse_prompt_row(row, {"ifeval": IFEval()})
    assert raised.value.kind == "bad_ground_truth"
    assert raised.value.reason.startswith("'ground_truth' for 'ifeval': ")
    assert told in raised.value.reason


def test_json_of_any_depth_is_judged() -> None:
    assert score("[" * 100_000, ifeval("detectable_format:json_format", {})) == 0.0


def test_whole_numbers_may_come_as_floats() -> None:
    assert score("* a\n* b", {"func_name": "verify_bullet_points", "N": 2.0}) == 1.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("piece", ["*** ", "*** .\n", "***", ". "])
def test_postscript_is_sought_once(piece: str) -> None:
    """Many markers with no word behind any of them: each used to look at all that follows."""
    assert not has_postscript(piece * 200_000, marker="***")

"""Constraints of IFEval: for each a text that follows it and one that does not, and the rows they come from."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.verifiers.constraints import RELATIONS, has_postscript, num_sentences
from open_instruct.verifiers.ifeval import IFEVAL, RLVR_IFEVAL, IFEval, parse
from open_instruct.verifiers.registry import known_verifiers

IFEVAL_CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    # instruction, kwargs, texts that follow it, texts that do not
    ("keywords:existence", {"keywords": ["cat", "dog"]}, ["Dogs chase CATS."], ["Dogs bark."]),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        ["cat Cats", "cat cat cat"],
        ["cat"],
    ),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, ["cat"], ["cat cat"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock", "c++"]}, ["rocket c"], ["a ROCK", "in C++."]),
    (
        "keywords:letter_frequency",
        {"letter": "T", "let_frequency": 2, "let_relation": "less than"},
        ["one T"],
        ["tT", "ttt"],
    ),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, ["#a #b"], ["#a"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["A b. C?"], ["A b c."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["A b c."], ["A b. C?"]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***", "one *** two"],
        ["one", "one\n***\n\n***\ntwo", "one\n***\ntwo\n***\nthree"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one, two - three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        ["First.\n\nThen, more.", 'First.\n\n\n"Then"'],
        ["First.\n\nThence.", "Then.\n\nFirst.", "First.\n\nThen.\n\nLast.", "First. Then."],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "then"},
        [],
        ["then", "then\n\nthen"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b]", "[a][b] [c c]"],
        ["[a]", "[a] []", "[a\nb] [c]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Text.\n\nP.S. More", "text (p. s. more)"],
        ["Text.", "Text.\n\nP.S.", "Text. P.P.S. More"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Text. P.P.S. More"], ["Text. P.S. More"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "Two:\n- a\n  - b\n***\n---\n* * *\n**bold** and * no"],
        ["* a", "* a\n* b\n- c"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "I think. My answer is maybe."],
        ["Yes.", "My answer is yes"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b c*", "**a** **b**"],
        ["**a**", "*a\nb* *c*", "* * *a*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2 SECTION3"],
        ["SECTION 1\na", "Section 1\na\nSection 2\nb", "SECTION one SECTION two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[]\n```"],
        ["{'a': 1}", 'Here: {"a": 1}', "[" * 100_000],
    ),
    ("detectable_format:title", {}, ["<<Ode>>\ntext", "x <<A b>>"], ["<Ode>", "<<\nOde>>", "<< >>"]),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******\na\n******\nb\n******"],
        ["a", "a ****** a", "a ****** b ****** c", "a ************ b"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": " Say hi. "}, ["say hi. Hi!"], ["Hi!", "Sure. Say hi. Hi!"]),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions?"},
        ["Done. any questions?", '"Done. Any questions?"'],
        ["Any questions? No."],
    ),
    ("startend:quotation", {}, ['"a"', '"a" b "c"'], ['"a', "a", '"', "'a'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["GO NOW", "I say GPT-4"],
        ["GO now", "WELL-KNOWN"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["GO"],
        ["GO ON"],
    ),
    ("change_case:english_capital", {}, ["YES, 1."], ["YES, one.", "1."]),
    ("change_case:english_lowercase", {}, ["yes, 1."], ["Yes, 1.", "1."]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]
RLVR_CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("verify_keywords", {"keyword_list": ["cat", "dog"]}, ["dog, Cat"], ["dog"]),
    ("verify_keyword_frequency", {"word": "cat", "N": 2}, ["Cat, cat. Cats"], ["cat", "cat cat cat"]),
    ("validate_forbidden_words", {"forbidden_words": ["rock"]}, ["rocket"], ["Rock!"]),
    ("verify_letter_frequency", {"letter": "t", "N": 2}, ["Tt"], ["t", "ttt"]),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at most"}, ["A. B c.", "A c."], ["A c. D e. F g."]),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, ["Ab. Cd.", "A b. C d. E f. G h."], ["Ab."]),
    ("verify_paragraph_count", {"N": 2}, ["one\n* * *\ntwo"], ["one", "one * * * * * * two"]),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, ["a b", "a b c"], ["a"]),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, ["a b", "a"], ["a b c"]),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, ["a " * 18, "a " * 22], ["a " * 17, "a " * 23]),
    ("validate_paragraphs", {"N": 2, "i": 1, "first_word": "so"}, ["So it\n\nis"], ["Soon\n\nis", "so"]),
    ("validate_placeholders", {"N": 1}, ["[a]"], ["a"]),
    (
        "verify_postscript",
        {"postscript_marker": "Before I forget:"},
        ["A. Before I forget: b"],
        ["A. Before I forget:"],
    ),
    ("verify_bullet_points", {"N": 1}, ["a\n* b"], ["a", "* a\n* b"]),
    ("validate_choice", {"options": "yes/no/maybe"}, ["No.", "yes"], ["Nothing", "none"]),
    ("validate_choice", {"options": "I know or I don't know"}, ["I don't know"], ["Who knows"]),
    ("validate_choice", {"options": "a), b), c), d)"}, ["It is b) blue"], ["It is (e)", "b"]),
    ("validate_choice", {"options": ["yes", "a/b"]}, ["a/b"], ["a"]),
    ("validate_highlighted_sections", {"N": 1}, ["*a*"], ["a"]),
    ("validate_sections", {"section_splitter": "Chapter:", "N": 1}, ["Chapter: 1"], ["Chapter 1"]),
    ("validate_json_format", {}, ["[1]"], ["[1"]),
    ("validate_title", {}, ["<<a>>"], ["a"]),
    ("validate_two_responses", {}, ["a ****** b"], ["a b"]),
    ("validate_repeat_prompt", {"original_prompt": "Hi"}, ["hi there"], ["there"]),
    ("validate_end", {"end_phrase": "The end."}, ["a. The end."], ["The end. a"]),
    ("validate_quotation", {}, ['"a"'], ["a"]),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, ["A b", "b"], ["A B"]),
    ("validate_uppercase", {}, ["A"], ["a"]),
    ("validate_lowercase", {}, ["a"], ["A"]),
    ("validate_no_commas", {}, ["a"], [","]),
]
# As published rows have it: all arguments of all constraints, null where they do not belong.
NULLS = dict.fromkeys(["N", "quantifier", "end_phrase", "keyword_list", "word", "letter", "i", "options"])


def score(text: str, ground_truth: Any) -> float:
    return known_verifiers()["ifeval"].score(text, ground_truth)


def ifeval(name: str, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    return {"instruction_id_list": [name], "kwargs": [kwargs]}


@pytest.mark.parametrize(("name", "kwargs", "follow", "break_"), IFEVAL_CASES)
def test_instructions_of_ifeval(name: str, kwargs: dict[str, Any], follow: list[str], break_: list[str]) -> None:
    truth = ifeval(name, NULLS | kwargs)
    assert [text for text in follow if score(text, truth) != 1.0] == []
    assert [text for text in break_ if score(text, truth) != 0.0] == []


@pytest.mark.parametrize(("name", "arguments", "follow", "break_"), RLVR_CASES)
def test_functions_of_rlvr_ifeval(name: str, arguments: dict[str, Any], follow: list[str], break_: list[str]) -> None:
    truth = json.dumps(NULLS | arguments | {"func_name": name})
    assert [text for text in follow if score(text, truth) != 1.0] == []
    assert [text for text in break_ if score(text, truth) != 0.0] == []


def test_every_constraint_is_tried() -> None:
    assert {name for name, *_ in IFEVAL_CASES} | {"language:response_language"} == IFEVAL.keys()
    assert {name for name, *_ in RLVR_CASES} | {"validate_response_language"} == RLVR_IFEVAL.keys()
    assert len(IFEVAL) == len(RLVR_IFEVAL) == 25


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
    assert num_sentences(text) == count


def test_the_score_is_the_share_of_constraints() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase", "detectable_format:title"]
    truth = {"instruction_id_list": names, "kwargs": [{}, None, {"num_words": None}]}
    assert score("a <<b>>", truth) == 1.0
    assert score("A <<b>>", truth) == pytest.approx(2 / 3)
    assert score("A, b", truth) == 0.0


def test_an_empty_text_follows_nothing_and_spaces_around_one_do_not_count() -> None:
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
    vars(fake).update(DetectorFactory=SimpleNamespace(), LangDetectException=LangDetectException, detect=detect)
    fake.__spec__ = importlib.util.spec_from_loader("langdetect", None)
    monkeypatch.setitem(sys.modules, "langdetect", fake)
    for truth in (
        ifeval("language:response_language", {"language": "zh"}),
        {"func_name": "validate_response_language", "language": "zh"},
    ):
        assert [score(text, truth) for text in ("你好", "hello", "?")] == [1.0, 0.0, 0.0]


def test_language_without_langdetect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'language:response_language' needs langdetect; install it"):
        parse(ifeval("language:response_language", {"language": "fr"}))


@pytest.mark.parametrize(
    ("truth", "told"),
    [
        ("no_comma", "it is no JSON"),
        ([], "must be an object"),
        (5, "must be an object"),
        ({"N": 3}, "must be an object with 'func_name'"),
        ({"instruction_id_list": [], "kwargs": []}, "one entry a constraint"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, "one entry a constraint"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "one entry a constraint"),
        (ifeval("punctuation:comma", {}), "there is no constraint 'punctuation:comma'; known are change_case:"),
        ({"func_name": None}, "there is no constraint None; known are validate_choice"),
        ({"func_name": ["x"]}, "there is no constraint ['x']"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["{}"]}, "must be an object, not '{}'"),
        ({"func_name": "verify_bullet_points"}, "are 'N', and it has none"),
        ({"func_name": "validate_title", "N": 1}, "are none, and it has 'N'"),
        (
            ifeval("length_constraints:number_words", {"num_words": 3}),
            "'num_words', 'relation', and it has 'num_words'",
        ),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "over"}, "must be one of 'at least'"),
        ({"func_name": "verify_bullet_points", "N": "3"}, "'N' of 'verify_bullet_points' must be a whole number"),
        ({"func_name": "verify_bullet_points", "N": 2.5}, "must be a whole number of at least 0, not 2.5"),
        ('{"func_name": "verify_bullet_points", "N": Infinity}', "must be a whole number"),
        ({"func_name": "verify_bullet_points", "N": True}, "must be a whole number"),
        ({"func_name": "validate_paragraphs", "N": 2, "i": 0, "first_word": "a"}, "of at least 1, not 0"),
        ({"func_name": "verify_keywords", "keyword_list": "a"}, "must be a list of texts"),
        ({"func_name": "verify_keywords", "keyword_list": [""]}, "must be a list of texts"),
        ({"func_name": "validate_end", "end_phrase": " "}, "must be text, not ' '"),
        ({"func_name": "verify_letter_frequency", "letter": "ab", "N": 1}, "must be a single character"),
    ],
)
def test_ground_truths_that_are_not_understood_are_found_with_the_row(truth: Any, told: str) -> None:
    row = {"prompt": "?", "dataset": ["ifeval"], "ground_truth": [truth]}
    with pytest.raises(MalformedRow) as raised:
        parse_prompt_row(row, {"ifeval": IFEval()})
    assert raised.value.kind == "bad_ground_truth"
    assert raised.value.reason.startswith("'ground_truth' for 'ifeval': ")
    assert told in raised.value.reason


def test_whole_numbers_may_come_as_floats() -> None:
    assert score("* a\n* b", {"func_name": "verify_bullet_points", "N": 2.0}) == 1.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("piece", ["*** ", "*** .\n", "***", ". "])
def test_a_postscript_is_sought_once(piece: str) -> None:
    """Many markers with no word behind any of them: each used to look at all that follows."""
    assert not has_postscript(piece * 200_000, marker="***")

"""Whether a completion follows the constraints of its prompt: the rows of IFEval and of RLVR-IFeval.

The ground truth is an object, or its JSON, in one of two forms::

    {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
     "kwargs": [{}, {"relation": "at least", "num_words": 300}]}
    {"func_name": "verify_bullet_points", "N": 3}

Arguments that are null count as not given, since published rows carry all arguments of all constraints.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from open_instruct.verifiers import constraints as c
from open_instruct.verifiers.verifier import Verifier


class Rule(NamedTuple):
    """A check of `constraints`, and for each argument of a row the name that the check has for it."""

    check: Callable[..., bool]
    arguments: Mapping[str, str] = {}


IFEVAL: dict[str, Rule] = {
    "keywords:existence": Rule(c.has_keywords, {"keywords": "words"}),
    "keywords:frequency": Rule(c.keyword_frequency, {"keyword": "word", "frequency": "count", "relation": "relation"}),
    "keywords:forbidden_words": Rule(c.avoids_words, {"forbidden_words": "words"}),
    "keywords:letter_frequency": Rule(
        c.letter_frequency, {"letter": "letter", "let_frequency": "count", "let_relation": "relation"}
    ),
    "language:response_language": Rule(c.is_in_language, {"language": "language"}),
    "length_constraints:number_sentences": Rule(
        c.number_of_sentences, {"num_sentences": "count", "relation": "relation"}
    ),
    "length_constraints:number_paragraphs": Rule(c.number_of_paragraphs, {"num_paragraphs": "count"}),
    "length_constraints:number_words": Rule(c.number_of_words, {"num_words": "count", "relation": "relation"}),
    "length_constraints:nth_paragraph_first_word": Rule(
        c.nth_paragraph_first_word, {"num_paragraphs": "count", "nth_paragraph": "paragraph", "first_word": "word"}
    ),
    "detectable_content:number_placeholders": Rule(c.number_of_placeholders, {"num_placeholders": "count"}),
    "detectable_content:postscript": Rule(c.has_postscript, {"postscript_marker": "marker"}),
    "detectable_format:number_bullet_lists": Rule(c.number_of_bullets, {"num_bullets": "count"}),
    "detectable_format:constrained_response": Rule(c.has_choice),
    "detectable_format:number_highlighted_sections": Rule(c.number_of_highlights, {"num_highlights": "count"}),
    "detectable_format:multiple_sections": Rule(
        c.number_of_sections, {"section_spliter": "marker", "num_sections": "count"}
    ),
    "detectable_format:json_format": Rule(c.is_json),
    "detectable_format:title": Rule(c.has_title),
    "combination:two_responses": Rule(c.has_two_responses),
    "combination:repeat_prompt": Rule(c.repeats_prompt, {"prompt_to_repeat": "prompt"}),
    "startend:end_checker": Rule(c.ends_with, {"end_phrase": "phrase"}),
    "startend:quotation": Rule(c.is_quoted),
    "change_case:capital_word_frequency": Rule(
        c.capital_word_frequency, {"capital_frequency": "count", "capital_relation": "relation"}
    ),
    "change_case:english_capital": Rule(str.isupper),
    "change_case:english_lowercase": Rule(str.islower),
    "punctuation:no_comma": Rule(c.has_no_comma),
}
RLVR_IFEVAL: dict[str, Rule] = {
    "verify_keywords": Rule(c.has_keywords, {"keyword_list": "words"}),
    "verify_keyword_frequency": Rule(c.word_frequency, {"word": "word", "N": "count"}),
    "validate_forbidden_words": Rule(c.avoids_words, {"forbidden_words": "words"}),
    "verify_letter_frequency": Rule(c.letter_frequency, {"letter": "letter", "N": "count"}),
    "validate_response_language": Rule(c.is_in_language, {"language": "language"}),
    "verify_sentence_constraint": Rule(c.number_of_sentences, {"N": "count", "quantifier": "relation"}),
    "verify_paragraph_count": Rule(c.number_of_paragraphs, {"N": "count"}),
    "validate_word_constraint": Rule(c.number_of_words, {"N": "count", "quantifier": "relation"}),
    "validate_paragraphs": Rule(c.nth_paragraph_first_word, {"N": "count", "i": "paragraph", "first_word": "word"}),
    "validate_placeholders": Rule(c.number_of_placeholders, {"N": "count"}),
    "verify_postscript": Rule(c.has_postscript, {"postscript_marker": "marker"}),
    "verify_bullet_points": Rule(c.number_of_bullets, {"N": "count"}),
    "validate_choice": Rule(c.has_choice, {"options": "options"}),
    "validate_highlighted_sections": Rule(c.number_of_highlights, {"N": "count"}),
    "validate_sections": Rule(c.number_of_sections, {"section_splitter": "marker", "N": "count"}),
    "validate_json_format": Rule(c.is_json),
    "validate_title": Rule(c.has_title),
    "validate_two_responses": Rule(c.has_two_responses),
    "validate_repeat_prompt": Rule(c.repeats_prompt, {"original_prompt": "prompt"}),
    "validate_end": Rule(c.ends_with, {"end_phrase": "phrase"}),
    "validate_quotation": Rule(c.is_quoted),
    "validate_frequency_capital_words": Rule(c.capital_word_frequency, {"N": "count", "quantifier": "relation"}),
    "validate_uppercase": Rule(str.isupper),
    "validate_lowercase": Rule(str.islower),
    "validate_no_commas": Rule(c.has_no_comma),
}


class IFEval(Verifier):
    """The share of the row's constraints that the completion follows; 0 for an empty one."""

    name: ClassVar[str] = "ifeval"

    def check_ground_truth(self, ground_truth: Any) -> None:
        parse(ground_truth)

    def score(self, completion: str, ground_truth: Any) -> float:
        text = completion.strip()
        rules = parse(ground_truth)
        return sum(check(text, **arguments) for check, arguments in rules) / len(rules) if text else 0.0


def parse(ground_truth: Any) -> list[tuple[Callable[..., bool], dict[str, Any]]]:
    """The checks that a ground truth asks for, each with its arguments.

    Raises:
        ValueError: it is of neither form, or a constraint or an argument is not known, missing or of the wrong kind.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON ({error})") from error
    if not isinstance(ground_truth, dict) or not ground_truth.keys() & {"func_name", "instruction_id_list"}:
        raise ValueError(
            "it must be an object with 'func_name' and its arguments, or 'instruction_id_list' and 'kwargs'"
        )
    if "func_name" in ground_truth:
        arguments = {name: value for name, value in ground_truth.items() if name != "func_name"}
        return [_parse_one(RLVR_IFEVAL, ground_truth["func_name"], arguments)]
    ids, kwargs = ground_truth["instruction_id_list"], ground_truth.get("kwargs")
    if not isinstance(ids, list) or not ids or not isinstance(kwargs, list) or len(ids) != len(kwargs):
        raise ValueError("'instruction_id_list' and 'kwargs' must be lists with one entry a constraint, and not empty")
    return [_parse_one(IFEVAL, name, arguments) for name, arguments in zip(ids, kwargs, strict=True)]


def _parse_one(rules: Mapping[str, Rule], name: Any, arguments: Any) -> tuple[Callable[..., bool], dict[str, Any]]:
    if not isinstance(name, str) or name not in rules:
        raise ValueError(f"there is no constraint {name!r}; known are {', '.join(sorted(rules))}")
    check, names = rules[name]
    if not isinstance(arguments, dict | None):
        raise ValueError(f"the arguments of {name!r} must be an object, not {arguments!r}")
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    if given.keys() != names.keys():
        wanted, got = (", ".join(map(repr, keys)) or "none" for keys in (names, given))
        raise ValueError(f"the arguments of {name!r} are {wanted}, and it has {got}")
    if check is c.is_in_language and importlib.util.find_spec("langdetect") is None:
        raise ValueError(f"{name!r} needs langdetect; install it (pip install langdetect), or leave such rows out")
    return check, {names[key]: _value(f"{key!r} of {name!r}", names[key], value) for key, value in given.items()}


def _value(where: str, kind: str, value: Any) -> Any:
    """`value` as the check takes it; `kind` is the check's name for the argument, which says what it must be."""
    match kind:
        case "count" | "paragraph":
            least = 1 if kind == "paragraph" else 0
            if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or value < least:
                raise ValueError(f"{where} must be a whole number of at least {least}, not {value!r}")
            return int(value)
        case "relation":
            if value not in c.RELATIONS:
                raise ValueError(f"{where} must be one of {', '.join(map(repr, c.RELATIONS))}, not {value!r}")
            return value
        case "words" | "options":
            if kind == "options" and isinstance(value, str):
                value = _options(value)
            if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
                raise ValueError(f"{where} must be a list of texts, not {value!r}")
            return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be text, not {value!r}")
    if kind == "letter" and len(value.strip()) != 1:
        raise ValueError(f"{where} must be a single character, not {value!r}")
    return value.strip()


def _options(text: str) -> list[str]:
    """Of "yes/no/maybe", "a), b), c)" or "I know or I don't know", as RLVR-IFeval has them."""
    for separator in ("/", ", ", " or "):
        if separator in text:
            return [option.strip() for option in text.split(separator)]
    return [text]

"""Answers of mathematics: the same expression, however it is written. The library math-verify compares them."""

import logging
import re
from typing import Any, ClassVar

from open_instruct.verifiers.verifier import Verifier

MAX_CHARACTERS = 300
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SAID = re.compile(r"(?:final )?answer(?: is|:)\s*:?\s*([^\n]+)", flags=re.IGNORECASE)
_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")
_DOLLARS = re.compile(r"\$+([^$]+)\$+")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")


class Math(Verifier):
    """1 if the answer and the ground truth are the same expression, tuple, interval, set, matrix, relation or text.

    The answer is the last `\\boxed{…}`; without one what follows the last "answer is", or the last `$…$`. Words, and
    the letter of a choice, are compared as texts, and so is what is longer than 300 characters.
    """

    name: ClassVar[str] = "math"

    def score(self, completion: str, ground_truth: Any) -> float:
        answer = find_answer(completion)
        if answer is None:
            return 0.0
        expected = find_answer(str(ground_truth)) if "\\boxed" in str(ground_truth) else str(ground_truth)
        return float(expected is not None and are_equal(answer, expected))


class StrictMath(Math):
    """The same, of an answer written as "Final Answer: The final answer is … . I hope it is correct."

    Without that sentence the answer is the whole completion.
    """

    name: ClassVar[str] = "strict_math"

    def score(self, completion: str, ground_truth: Any) -> float:
        said = _FINAL.search(completion + "I hope it is correct.")
        return float(are_equal(said[1] if said else completion, str(ground_truth)))


def find_answer(completion: str) -> str | None:
    """The text of the answer, or None if there is none (or its brace is never closed)."""
    boxes = list(_BOXED.finditer(completion))
    if boxes:
        return _up_to_its_brace(completion[boxes[-1].end() :])
    if answers := _SAID.findall(completion):
        return str(answers[-1]).strip().rstrip(".")
    dollars = _DOLLARS.findall(completion)
    return str(dollars[-1]) if dollars else None


def _up_to_its_brace(text: str) -> str | None:
    """The text before the brace that closes the one it stands in; None if there is none."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return None


def are_equal(answer: str, expected: str) -> bool:
    """Whether two answers are equal. Malicious ones may take forever: call it in a process that can be killed."""
    ours = _plain(answer)
    theirs = _plain(expected)
    if not ours or ours == theirs or max(len(ours), len(theirs)) > MAX_CHARACTERS:
        return bool(ours) and ours == theirs
    if ours.replace(" ", "").isalpha() or theirs.replace(" ", "").isalpha():
        return len(ours) > 1 and ours.lower() == theirs.lower()  # one letter may be a variable

    from math_verify import verify

    return verify(_value(expected), _value(answer), float_rounding=12, numeric_precision=60, timeout_seconds=None)


def _plain(text: str) -> str:
    """The text without the commands that stand around words, and without what stands around one letter."""
    text = " ".join(_WORDS.sub(r"\1", text).replace("$", "").split()).rstrip(".")
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)


def _value(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # It says at every call that there is no time limit: the process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # LaTeX alone is read by a grammar. Plain expressions would be evaluated as Python.
    read_as = [LatexExtractionConfig(boxed_match_priority=0)]
    text = text.replace("\\degree", "").replace("\\boxed", "")  # a second box would be read in place of the first
    return parse(f"\\boxed{{{text}}}", read_as, fallback_mode="no_fallback", parsing_timeout=None)

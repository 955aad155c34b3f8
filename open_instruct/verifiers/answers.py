"""Verifiers that compare answers: texts and numbers, fast and in the caller's process, and expressions of mathematics.

These are the same however they are written. The library math-verify compares them.
"""

import logging
import re
import string
from collections import Counter
from decimal import Decimal
from typing import Any, ClassVar, Literal

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.verifiers.verifier import Verifier
from open_instruct.wording import json_or_text

# A minus directly after a letter or a digit is a subtraction.
_NUMBER = re.compile(r"(?:(?<![^\W_])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_FINISHED = re.compile(r"<finish>(.*?)</finish>", flags=re.IGNORECASE | re.DOTALL)
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)
MAX_CHARACTERS = 300  # of an expression
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SAID = re.compile(r"(?:final )?answer(?: is|:)\s*:?\s*([^\n]+)", flags=re.IGNORECASE)
_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")
_DOLLARS = re.compile(r"\$+([^$]+)\$+")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")


class GSM8K(Verifier):
    """1 if the last number of the completion equals the last number of the ground truth.

    Thousands separators, a leading $ and a trailing % or full stop do not count; 72.0 equals 72.
    """

    name: ClassVar[str] = "gsm8k"
    isolated: ClassVar[bool] = False

    def score(self, completion: str, ground_truth: Any) -> float:
        expected = last_number(str(ground_truth))
        return float(expected is not None and last_number(completion) == expected)


class StringMatcher(Verifier):
    """1 if the answer is the ground truth, or one of a list of them, but for case, articles, punctuation and spaces.

    The answer is what follows the last "Answer:" on its line; without one, the whole completion.
    """

    name: ClassVar[str] = "string_matcher"
    isolated: ClassVar[bool] = False

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(is_one_of(answer_of(completion), ground_truth))


class Flan(StringMatcher):
    """The same of what follows the last "The answer is: "; without it, of the whole completion."""

    name: ClassVar[str] = "flan"

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(is_one_of(completion.rpartition("The answer is: ")[2], ground_truth))


class Puzzle(StringMatcher):
    """The same of the whole completion, without the tags of `<answer>…</answer>`."""

    name: ClassVar[str] = "puzzle"

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(is_one_of(completion.replace("<answer>", "").replace("</answer>", ""), ground_truth))


class StringF1(Verifier):
    """Harmonic mean of precision and recall over words, the best over a list of ground truths.

    As SQuAD counts it (Rajpurkar et al., arXiv 1606.05250, section 6.1).
    """

    name: ClassVar[str] = "string_f1"
    isolated: ClassVar[bool] = False

    def score(self, completion: str, ground_truth: Any) -> float:
        given = words_of(answer_of(completion))
        accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
        return max((_f1(given, words_of(str(truth))) for truth in accepted), default=0.0)


class ReSearch(StringMatcher):
    """The same of what stands in the first `<finish>…</finish>`; a list may be written as JSON."""

    name: ClassVar[str] = "re_search"

    def score(self, completion: str, ground_truth: Any) -> float:
        found = _FINISHED.search(completion)
        return float(found is not None and bool(found[1].strip()) and is_one_of(found[1], listed(ground_truth)))


class ReSearchF1(StringMatcher):
    """F1 of the words in the last `<finish>…</finish>`, 0.1 where none is right (Chen et al., arXiv 2503.19470)."""

    name: ClassVar[str] = "re_search_f1"

    def score(self, completion: str, ground_truth: Any) -> float:
        answer = completion.rpartition("<finish>")[2].partition("</finish>")[0]
        if not answer or answer == completion:
            return 0.0
        return max(_f1(words_of(answer), words_of(str(truth))) for truth in listed(ground_truth)) or 0.1


class MaxLength(Verifier):
    """1 for as many tokens as the ground truth says, and less for each off, 0 at --max_length_verifier_max_length."""

    name: ClassVar[str] = "max_length"
    isolated: ClassVar[bool] = False
    sees_thinking: ClassVar[bool] = True
    reads: ClassVar[Literal["text", "token_ids"]] = "token_ids"

    def configure(self, flags: RewardSection) -> None:
        self._most_off = flags.max_length_verifier_max_length

    def check_ground_truth(self, ground_truth: Any) -> None:
        float(ground_truth)

    def score(self, completion: Any, ground_truth: Any) -> float:
        return max(0.0, 1 - abs(len(completion) - float(ground_truth)) / self._most_off)


class UpToMaxLength(MaxLength):
    """The same, but 1 for fewer tokens too."""

    name: ClassVar[str] = "up_to_max_length"

    def score(self, completion: Any, ground_truth: Any) -> float:
        return 1.0 if len(completion) < float(ground_truth) else super().score(completion, ground_truth)


class Passthrough(Verifier):
    """0 for every completion: for rows whose reward comes from elsewhere, such as the format alone."""

    name: ClassVar[str] = "passthrough"
    isolated: ClassVar[bool] = False

    def score(self, completion: str, ground_truth: Any) -> float:
        return 0.0


class R1Format(Verifier):
    """1 for `<think>…</think><answer>…</answer>`: what `--apply_r1_style_format_reward` asks for."""

    name: ClassVar[str] = "r1_format"
    sees_thinking: ClassVar[bool] = True

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(has_r1_format(completion))


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


def has_r1_format(text: str) -> bool:
    """Whether a completion is `<think>…</think><answer>…</answer>`; the first tag may be part of the prompt."""
    thought, _, answer = text.strip().removeprefix("<think>").partition("</think>")
    answer = answer.lstrip()
    return "<think>" not in thought and answer.startswith("<answer>") and answer.endswith("</answer>")


def is_one_of(text: str, accepted: Any) -> bool:
    """Whether a text has the words of the one that is accepted, or of one of a list."""
    texts = accepted if isinstance(accepted, list) else [accepted]
    return words_of(text) in [words_of(str(each)) for each in texts]


def listed(ground_truth: Any) -> list[Any]:
    """A ground truth as a list, which may be written as JSON."""
    truths = json_or_text(ground_truth)
    return truths if isinstance(truths, list) else [truths]


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, or None: "7-2" ends in 2.

    Example: `last_number("that is $1,250.50 in all.") == Decimal("1250.50")`.
    """
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def answer_of(completion: str) -> str:
    """The rest of the line behind the last "Answer:" (in any case), or the whole completion."""
    answers = re.findall(r"answer:[ \t]*([^\n]*)", completion, flags=re.IGNORECASE)
    return answers[-1] if answers else completion


def words_of(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def _f1(given: list[str], expected: list[str]) -> float:
    if not given or not expected:
        return float(given == expected)
    num_shared = sum((Counter(given) & Counter(expected)).values())
    if num_shared == 0:
        return 0.0
    precision = num_shared / len(given)
    recall = num_shared / len(expected)
    return 2 * precision * recall / (precision + recall)


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


MATCHERS = (StringMatcher, Flan, Puzzle, ReSearch, ReSearchF1, StringF1)
ALL: tuple[type[Verifier], ...] = (GSM8K, *MATCHERS, MaxLength, UpToMaxLength, Passthrough, R1Format, Math, StrictMath)

"""Verifiers that compare answers: numbers, texts, lengths, and expressions of mathematics.

Expressions are the same however they are written. Where a completion has `<answer>…</answer>`, what
stands between the last of these tags is judged.
"""

import math
import re
from decimal import Decimal
from typing import Any, ClassVar, Literal

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.text import json_or_text
from open_instruct.rewards.math_finder import find_answer, find_answers, find_readings
from open_instruct.rewards.mathematics.answers import are_equal
from open_instruct.rewards.mathematics.text import clean
from open_instruct.rewards.verifier import Verifier
from open_instruct.rewards.words import (
    compute_f1,
    find_last_number,
    find_tagged_answer,
    have_same_words,
    split_words,
)

_FINISHED = re.compile(r"<finish>(.*?)</finish>", flags=re.IGNORECASE | re.DOTALL)
_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")


class AnswerVerifier(Verifier):
    """Compares the answer of a completion with a ground truth.

    Of a list of ground truths each is right, and the best score counts.
    """

    def list_truths(self, ground_truth: Any) -> list[Any]:
        """The ground truths in one of them or in a list of them."""
        return ground_truth if isinstance(ground_truth, list) else [ground_truth]

    def check_ground_truth(self, ground_truth: Any) -> None:
        truths = self.list_truths(ground_truth)
        if not truths:
            raise ValueError("it is an empty list, so no answer equals it")
        for truth in truths:
            if not isinstance(truth, str | int | float):
                raise ValueError(
                    f"it must be a text or a number, or a list of these, and has {truth!r:.60}"
                )
            self.check_truth(write_truth(truth))

    def check_truth(self, truth: str) -> None:
        """Refuse a ground truth that no answer could equal.

        Raises:
            ValueError: with the reason.
        """
        if not truth.strip():
            raise ValueError("it is empty, so no answer equals it")

    def score(self, completion: str, ground_truth: Any) -> float:
        truths = map(write_truth, self.list_truths(ground_truth))
        scores = [self.compare(completion, truth) for truth in truths]
        return max(scores, default=0.0)

    def compare(self, completion: str, truth: str) -> float:
        """The score of a completion by one ground truth."""
        raise NotImplementedError


def write_truth(truth: Any) -> str:
    """A ground truth as text: of a number, as people write it.

    Tables often have whole numbers as floats.

    Example: `write_truth(42.0) == "42"`, `write_truth(1e16) == "10000000000000000"`.
    """
    if isinstance(truth, float) and math.isfinite(truth):
        return f"{Decimal(repr(truth)).normalize():f}"
    return str(truth)


class GSM8K(AnswerVerifier):
    """1 if the last number of the completion equals the last number of the ground truth.

    Of either, the number behind a last "####" comes first. Thousands separators, a leading $ and a
    trailing % or full stop do not count; 72.0 equals 72. Minus signs and dashes directly before a
    number are its sign.
    """

    name: ClassVar[str] = "gsm8k"
    isolated: ClassVar[bool] = False

    def check_truth(self, truth: str) -> None:
        if find_last_number(truth) is None:
            raise ValueError("it has no number, so no answer equals it")

    def compare(self, completion: str, truth: str) -> float:
        expected = find_last_number(truth)
        if expected is None:
            return 0.0
        return float(find_last_number(find_tagged_answer(completion)) == expected)


class StringMatcher(AnswerVerifier):
    """1 if the answer is the ground truth.

    Case, articles, punctuation and spaces do not count. The answer is what follows the last
    "Answer:" on its line; without one, the whole completion. Signs and points of numbers count.
    """

    name: ClassVar[str] = "string_matcher"
    isolated: ClassVar[bool] = False

    def compare(self, completion: str, truth: str) -> float:
        return float(have_same_words(find_stated_answer(completion), truth))


class Flan(StringMatcher):
    """As `StringMatcher`, of what follows the last "The answer is: ", if that is there."""

    name: ClassVar[str] = "flan"

    def compare(self, completion: str, truth: str) -> float:
        _, _, answer = find_tagged_answer(completion).rpartition("The answer is: ")
        return float(have_same_words(answer, truth))


class Puzzle(StringMatcher):
    """As `StringMatcher`, of the whole completion, or of what `<answer>…</answer>` has."""

    name: ClassVar[str] = "puzzle"

    def compare(self, completion: str, truth: str) -> float:
        return float(have_same_words(find_tagged_answer(completion), truth))


class StringF1(AnswerVerifier):
    """Harmonic mean of precision and recall over words.

    As SQuAD counts it (Rajpurkar et al., arXiv 1606.05250, section 6.1).
    """

    name: ClassVar[str] = "string_f1"
    isolated: ClassVar[bool] = False

    def compare(self, completion: str, truth: str) -> float:
        words = split_words(find_stated_answer(completion))
        return compute_f1(words, split_words(truth))


class ReSearch(StringMatcher):
    """As `StringMatcher`, of the first `<finish>…</finish>`; a list may be written as JSON."""

    name: ClassVar[str] = "re_search"

    def list_truths(self, ground_truth: Any) -> list[Any]:
        truths = json_or_text(ground_truth)
        if isinstance(truths, list):
            return truths
        # A number stays as it is written: 1.50 is not 1.5.
        return [truths if isinstance(truths, str) else ground_truth]

    def compare(self, completion: str, truth: str) -> float:
        match = _FINISHED.search(completion)
        if match is None or not match[1].strip():
            return 0.0
        return float(have_same_words(match[1], truth))


class ReSearchF1(ReSearch):
    """F1 of the words in the last `<finish>…</finish>`, 0.1 where none is right.

    As Chen et al. have it (arXiv 2503.19470).
    """

    name: ClassVar[str] = "re_search_f1"

    def compare(self, completion: str, truth: str) -> float:
        _, _, answer = completion.rpartition("<finish>")
        answer, _, _ = answer.partition("</finish>")
        if not answer or answer == completion:
            return 0.0
        return compute_f1(split_words(answer), split_words(truth)) or 0.1


class MaxLength(Verifier):
    """1 for as many tokens as the ground truth says, and less for each more or fewer.

    It is 0 where --max_length_verifier_max_length or more are too many, or missing.
    """

    name: ClassVar[str] = "max_length"
    isolated: ClassVar[bool] = False
    sees_thinking: ClassVar[bool] = True
    reads: ClassVar[Literal["text", "token_ids"]] = "token_ids"

    def configure(self, flags: RewardSection) -> None:
        self._max_difference = flags.max_length_verifier_max_length

    def check_ground_truth(self, ground_truth: Any) -> None:
        try:
            is_length = 0 <= float(ground_truth) < math.inf
        except (TypeError, ValueError):
            is_length = False
        if not is_length:
            raise ValueError(f"it must be a number of tokens, and is {ground_truth!r:.60}")

    def score(self, completion: Any, ground_truth: Any) -> float:
        difference = abs(len(completion) - float(ground_truth))
        return max(0.0, 1 - difference / self._max_difference)


class UpToMaxLength(MaxLength):
    """As `MaxLength`, but 1 for fewer tokens too."""

    name: ClassVar[str] = "up_to_max_length"

    def score(self, completion: Any, ground_truth: Any) -> float:
        if len(completion) < float(ground_truth):
            return 1.0
        return super().score(completion, ground_truth)


class Passthrough(Verifier):
    """0 for every completion: for rows whose reward is that of the format alone, for one."""

    name: ClassVar[str] = "passthrough"
    isolated: ClassVar[bool] = False

    @property
    def needs_ground_truth(self) -> bool:
        return False

    def score(self, completion: str, ground_truth: Any) -> float:
        return 0.0


class R1Format(Verifier):
    """1 for `<think>…</think><answer>…</answer>`, as `--apply_r1_style_format_reward` wants it."""

    name: ClassVar[str] = "r1_format"
    sees_thinking: ClassVar[bool] = True

    @property
    def needs_ground_truth(self) -> bool:
        return False

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(has_r1_format(completion))


class Math(AnswerVerifier):
    """1 if the answer and the ground truth are the same in mathematics.

    They may be expressions, tuples, intervals, sets, matrices, relations or texts. Where a
    completion says its answer is in math_finder.py; what counts as the same in
    mathematics/answers.py.
    """

    name: ClassVar[str] = "math"

    def check_truth(self, truth: str) -> None:
        if not clean(_find_truth(truth)):
            raise ValueError("it is empty, so no answer equals it")

    def compare(self, completion: str, truth: str) -> float:
        answers = find_answers(completion)
        expected = _find_truth(truth)
        if not answers or not answers[-1].strip():
            return 0.0
        is_right = any(are_equal(reading, expected) for reading in find_readings(completion))
        if not is_right and len(answers) > 1:  # a box for each entry of a list
            is_right = are_equal(", ".join(answers), expected)
        return float(is_right)


def _find_truth(truth: str) -> str:
    """The answer that a ground truth says, which may be a whole solution."""
    if "\\boxed" in truth:
        return find_answer(truth) or ""
    return truth


class StrictMath(Math):
    """As `Math`, of what "Final Answer: The final answer is … . I hope it is correct." says.

    Without that sentence the answer is the whole completion.
    """

    name: ClassVar[str] = "strict_math"

    def compare(self, completion: str, truth: str) -> float:
        completion = find_tagged_answer(completion)
        final = _FINAL.search(completion + "I hope it is correct.")
        answer = completion
        if final is not None:
            answer = final[1]
        return float(are_equal(answer, truth))


def has_r1_format(text: str) -> bool:
    """Whether a completion is `<think>…</think><answer>…</answer>`.

    The first tag may be part of the prompt.
    """
    thought, _, answer = text.strip().removeprefix("<think>").partition("</think>")
    if "<think>" in thought:
        return False
    return answer.lstrip().startswith("<answer>") and answer.endswith("</answer>")


def find_stated_answer(completion: str) -> str:
    """The rest of the line behind the last "Answer:", in any case; else the whole answer."""
    completion = find_tagged_answer(completion)
    answers = re.findall(r"answer:[ \t]*([^\n]*)", completion, flags=re.IGNORECASE)
    if not answers:
        return completion
    last: str = answers[-1]
    return last


MATCHERS = (StringMatcher, Flan, Puzzle, ReSearch, ReSearchF1, StringF1)
ALL: tuple[type[Verifier], ...] = (
    GSM8K,
    *MATCHERS,
    MaxLength,
    UpToMaxLength,
    Passthrough,
    R1Format,
    Math,
    StrictMath,
)

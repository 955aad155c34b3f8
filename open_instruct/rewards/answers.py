"""Verifiers that compare answers: texts and numbers, fast and in the caller's process, and
expressions of mathematics.

These are the same however they are written. Where a completion has `<answer>…</answer>`, what
stands between the last of these tags is judged.
"""

import re
from typing import Any, ClassVar, Literal

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.text import json_or_text
from open_instruct.rewards.math_finder import find_answer, find_answers, find_readings
from open_instruct.rewards.mathematics.answers import are_equal
from open_instruct.rewards.mathematics.text import clean
from open_instruct.rewards.verifier import Verifier
from open_instruct.rewards.words import (
    between_answer_tags,
    check_truths,
    f1_of_words,
    is_one_of,
    last_number,
    words_of,
)

_FINISHED = re.compile(r"<finish>(.*?)</finish>", flags=re.IGNORECASE | re.DOTALL)
_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")


class GSM8K(Verifier):
    """1 if the last number of the completion equals the last number of the ground truth.

    Of either, the number behind a last "####" comes first. Thousands separators, a leading $ and a
    trailing % or full stop do not count; 72.0 equals 72. Minus signs and dashes directly before a
    number are its sign.
    """

    name: ClassVar[str] = "gsm8k"
    isolated: ClassVar[bool] = False

    def check_ground_truth(self, ground_truth: Any) -> None:
        if last_number(str(ground_truth)) is None:
            raise ValueError("it has no number, so no answer equals it")

    def score(self, completion: str, ground_truth: Any) -> float:
        expected = last_number(str(ground_truth))
        return float(
            expected is not None and last_number(between_answer_tags(completion)) == expected
        )


class StringMatcher(Verifier):
    """1 if the answer is the ground truth, or one of a list of them, but for case, articles,
    punctuation and spaces.

    The answer is what follows the last "Answer:" on its line; without one, the whole completion.
    Signs and points of numbers count.
    """

    name: ClassVar[str] = "string_matcher"
    isolated: ClassVar[bool] = False

    def check_ground_truth(self, ground_truth: Any) -> None:
        check_truths(ground_truth)

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(is_one_of(answer_of(completion), ground_truth))


class Flan(StringMatcher):
    """The same of what follows the last "The answer is: "; without it, of the whole completion."""

    name: ClassVar[str] = "flan"

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(
            is_one_of(
                between_answer_tags(completion).rpartition("The answer is: ")[2], ground_truth
            )
        )


class Puzzle(StringMatcher):
    """The same of the whole completion, or of what stands between `<answer>` and `</answer>`."""

    name: ClassVar[str] = "puzzle"

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(is_one_of(between_answer_tags(completion), ground_truth))


class StringF1(Verifier):
    """Harmonic mean of precision and recall over words, the best over a list of ground truths.

    As SQuAD counts it (Rajpurkar et al., arXiv 1606.05250, section 6.1).
    """

    name: ClassVar[str] = "string_f1"
    isolated: ClassVar[bool] = False

    def check_ground_truth(self, ground_truth: Any) -> None:
        check_truths(ground_truth)

    def score(self, completion: str, ground_truth: Any) -> float:
        given = words_of(answer_of(completion))
        accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
        return max((f1_of_words(given, words_of(str(truth))) for truth in accepted), default=0.0)


class ReSearch(StringMatcher):
    """The same of what stands in the first `<finish>…</finish>`; a list may be written as JSON."""

    name: ClassVar[str] = "re_search"

    def check_ground_truth(self, ground_truth: Any) -> None:
        check_truths(listed(ground_truth))

    def score(self, completion: str, ground_truth: Any) -> float:
        found = _FINISHED.search(completion)
        return float(
            found is not None
            and bool(found[1].strip())
            and is_one_of(found[1], listed(ground_truth))
        )


class ReSearchF1(ReSearch):
    """F1 of the words in the last `<finish>…</finish>`, 0.1 where none is right (Chen et al., arXiv
    2503.19470).
    """

    name: ClassVar[str] = "re_search_f1"

    def score(self, completion: str, ground_truth: Any) -> float:
        answer = completion.rpartition("<finish>")[2].partition("</finish>")[0]
        if not answer or answer == completion:
            return 0.0
        return (
            max(
                f1_of_words(words_of(answer), words_of(str(truth)))
                for truth in listed(ground_truth)
            )
            or 0.1
        )


class MaxLength(Verifier):
    """1 for as many tokens as the ground truth says, and less for each off, 0 at
    --max_length_verifier_max_length.
    """

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
        return (
            1.0
            if len(completion) < float(ground_truth)
            else super().score(completion, ground_truth)
        )


class Passthrough(Verifier):
    """0 for every completion: for rows whose reward comes from elsewhere, such as the format
    alone.
    """

    name: ClassVar[str] = "passthrough"
    isolated: ClassVar[bool] = False

    def score(self, completion: str, ground_truth: Any) -> float:
        return 0.0


class R1Format(Verifier):
    """1 for `<think>…</think><answer>…</answer>`: what `--apply_r1_style_format_reward` asks
    for.
    """

    name: ClassVar[str] = "r1_format"
    sees_thinking: ClassVar[bool] = True

    def score(self, completion: str, ground_truth: Any) -> float:
        return float(has_r1_format(completion))


class Math(Verifier):
    """1 if the answer and the ground truth are the same expression, tuple, interval, set, matrix,
    relation or text.

    Where a completion says its answer is in math_finder.py; what counts as the same in
    mathematics/answers.py.
    """

    name: ClassVar[str] = "math"

    def check_ground_truth(self, ground_truth: Any) -> None:
        if not clean(_truth_of(ground_truth)):
            raise ValueError("it is empty, so no answer equals it")

    def score(self, completion: str, ground_truth: Any) -> float:
        answers = find_answers(completion)
        expected = _truth_of(ground_truth)
        if not answers or not answers[-1].strip():
            return 0.0
        is_right = any(are_equal(reading, expected) for reading in find_readings(completion))
        if not is_right and len(answers) > 1:  # a box for each entry of a list
            is_right = are_equal(", ".join(answers), expected)
        return float(is_right)


def _truth_of(ground_truth: Any) -> str:
    """The answer that a ground truth says, which may be a whole solution."""
    text = str(ground_truth)
    return (find_answer(text) or "") if "\\boxed" in text else text


class StrictMath(Math):
    """The same, of an answer written as "Final Answer: The final answer is … . I hope it is
    correct."

    Without that sentence the answer is the whole completion.
    """

    name: ClassVar[str] = "strict_math"

    def score(self, completion: str, ground_truth: Any) -> float:
        completion = between_answer_tags(completion)
        said = _FINAL.search(completion + "I hope it is correct.")
        return float(are_equal(said[1] if said else completion, str(ground_truth)))


def has_r1_format(text: str) -> bool:
    """Whether a completion is `<think>…</think><answer>…</answer>`; the first tag may be part of
    the prompt.
    """
    thought, _, answer = text.strip().removeprefix("<think>").partition("</think>")
    answer = answer.lstrip()
    return (
        "<think>" not in thought and answer.startswith("<answer>") and answer.endswith("</answer>")
    )


def listed(ground_truth: Any) -> list[Any]:
    """A ground truth as a list, which may be written as JSON."""
    truths = json_or_text(ground_truth)
    return truths if isinstance(truths, list) else [truths]


def answer_of(completion: str) -> str:
    """The rest of the line behind the last "Answer:" (in any case), or all that is judged of the
    completion.
    """
    completion = between_answer_tags(completion)
    answers = re.findall(r"answer:[ \t]*([^\n]*)", completion, flags=re.IGNORECASE)
    return answers[-1] if answers else completion


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

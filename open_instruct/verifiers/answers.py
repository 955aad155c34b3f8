"""Verifiers that compare texts and numbers, fast and in the caller's process."""

import re
import string
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.verifiers.verifier import Verifier
from open_instruct.wording import json_or_text

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_FINISHED = re.compile(r"<finish>(.*?)</finish>", flags=re.IGNORECASE | re.DOTALL)
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    """The last number in `text`, or None. A minus directly after a digit is a subtraction: "7-2" ends in 2.

    Example: `last_number("that is $1,250.50 in all.") == Decimal("1250.50")`.
    """
    number = None
    for match in _NUMBER.finditer(text):
        word = match.group()
        if word.startswith("-") and match.start() > 0 and text[match.start() - 1].isalnum():
            word = word[1:]
        number = word
    if number is None:
        return None
    try:
        return Decimal(number.replace(",", ""))
    except InvalidOperation:
        return None


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


MATCHERS = (StringMatcher, Flan, Puzzle, ReSearch, ReSearchF1, StringF1)
ALL: tuple[type[Verifier], ...] = (GSM8K, *MATCHERS, MaxLength, UpToMaxLength, Passthrough, R1Format)

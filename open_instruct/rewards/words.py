"""Words and numbers in texts, for verifiers that compare answers as text.

| text | words |
|---|---|
| `The Eiffel Tower!` | eiffel, tower |
| `(A)` | a: an article alone is the answer |
| `-1.5`, `1,250`, `3/4`, `4:30` | -1.5, 1250, 3/4, 4:30: signs between and before digits stay |
| `...` | none, and nothing equals nothing |
"""

import re
import string
from collections import Counter
from decimal import Decimal

_ARTICLES = {"a", "an", "the"}
# The minus sign, and the hyphens and dashes that are written for it.
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"))
_SIGN = f"[{re.escape(string.punctuation)}]"
# Between digits; a minus that is no hyphen; the point of ".5".
_SIGN_OF_NUMBER = rf"(?<=\d){_SIGN}(?=\d)|(?<![^\W_])-(?=\.?\d)|(?<![\w.])\.(?=\d)"
_PUNCTUATION = re.compile(rf"({_SIGN_OF_NUMBER})|{_SIGN}")
# Of 1,250 and of 1,00,000; in LaTeX 1{,}250 and 1\,250; the spaces are those that no line breaks
# at.
_SEPARATOR = re.compile(
    r"(?<=\d)(?:,|\{,\}|\\,|\\!|,\\!|[\u00a0\u2009\u202f'’])(?=(?:\d\d,)*\d{3}(?!\d))"
)
# A minus directly after a letter or a digit is a subtraction.
_NUMBER = re.compile(r"(?:(?<![^\W_])-\$?)?(?:\d+(?:\.\d+)?|\.\d+)")
# Not a heading such as "#### 2. Sum".
_MARKED = re.compile(rf"####[ \t*]*\$?({_NUMBER.pattern})(?![\d.)]*[.):][ \t*]*\w)")
_ANSWER_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_ANSWER_TAG = re.compile(r"<answer>", re.IGNORECASE)


def find_tagged_answer(completion: str) -> str:
    """What stands in the last `<answer>…</answer>`, or behind a tag that is never closed.

    Without a tag it is the whole completion.
    """
    pairs = _ANSWER_TAGS.findall(completion)
    if pairs:
        return str(pairs[-1]).strip()
    tags = list(_ANSWER_TAG.finditer(completion))
    if tags:
        return completion[tags[-1].end() :].strip()
    return completion


def find_last_number(text: str) -> Decimal | None:
    """The last number in `text`, or None: "7-2" ends in 2.

    A number behind a last "####" comes before all others.

    Example: `find_last_number("that is $1,250.50 in all.") == Decimal("1250.50")`.
    """
    text = _SEPARATOR.sub("", text.translate(_DASHES))
    numbers = _MARKED.findall(text) or _NUMBER.findall(text)
    if not numbers:
        return None
    return Decimal(numbers[-1].replace("$", ""))


def split_words(text: str) -> list[str]:
    """Lower-case words without punctuation, and without articles unless there is nothing else.

    Example: `split_words("The answer: -1.5!") == ["answer", "-1.5"]`.
    """
    text = _SEPARATOR.sub("", text.translate(_DASHES).lower())
    words = _PUNCTUATION.sub(r"\1", text).split()
    return [word for word in words if word not in _ARTICLES] or words[-1:]


def have_same_words(text: str, other: str) -> bool:
    """Whether two texts have the same words; signs alone, such as "+", are compared as they are."""
    words = split_words(text)
    if words or split_words(other):
        return words == split_words(other)
    return bool(text.strip()) and text.strip() == other.strip()


def compute_f1(words: list[str], expected: list[str]) -> float:
    """Harmonic mean of precision and recall; 0 where either has no words."""
    num_shared = sum((Counter(words) & Counter(expected)).values())
    if num_shared == 0:
        return 0.0
    precision = num_shared / len(words)
    recall = num_shared / len(expected)
    return 2 * precision * recall / (precision + recall)

"""The value of another suite's setting in our words, by the rule of its table."""

from collections.abc import Sequence
from itertools import chain

from open_instruct.migrate.suites.tables import Rule

# In place of our words where the flag is left out.
LEFT_OUT = "null"


def is_refused(rule: Rule, words: Sequence[str]) -> bool:
    """Whether the value cannot be had."""
    value = " ".join(words).lower()
    return rule.refused is not None and value not in rule.unless and _map_words(rule, words) is None


def _map_words(rule: Rule, words: Sequence[str]) -> list[str] | None:
    """Our words for the value by the rule's list of values: for all of it, or for each word."""
    value = " ".join(words)
    for spelling in (value.lower(), value):
        if spelling in rule.values:
            ours = rule.values[spelling]
            return ours.split() or [ours]
    if words and all(word.lower() in rule.values for word in words):
        return " ".join(rule.values[word.lower()] for word in words).split()
    return None


def translate_words(rule: Rule, words: Sequence[str]) -> list[str]:
    """The value in our words."""
    if rule.form == "commas":
        words = [part for part in ",".join(words).split(",") if part]
    ours = _map_words(rule, words)
    if ours is not None:
        return [word for word in ours if word != LEFT_OUT] or [LEFT_OUT]
    if rule.refused is not None:
        return [LEFT_OUT]  # a value of `unless`, which asks for nothing
    words = [rule.values.get(word, word) for word in words]
    if rule.times is not None:
        return [_multiply(word, rule.times) for word in words]
    if rule.form == "whole":
        return list(chain.from_iterable((word, "1.0") for word in words))
    return list(words)


def _multiply(word: str, factor: float) -> str:
    try:
        return f"{float(word) * factor:g}"
    except ValueError:
        return word


def divide_by_steps(words: Sequence[str], num_steps: float | None) -> str | None:
    """The share of all steps of a number of steps; a number below 1 is a share already."""
    try:
        (number,) = map(float, words)
    except ValueError:
        return None
    if number < 1:
        return f"{number:g}"
    if num_steps is None:
        return None
    return f"{number / num_steps:g}"

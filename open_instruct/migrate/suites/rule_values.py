"""The value of another suite's setting in our words, by the rule of its table."""

from collections.abc import Sequence

from open_instruct.migrate.suites.tables import Rule

LEFT_OUT = "null"  # in place of our words: the flag is left out


def is_refused(rule: Rule, words: Sequence[str]) -> bool:
    """Whether the value cannot be had."""
    value = " ".join(words).lower()
    return rule.refused is not None and value not in rule.unless and _mapped(rule, words) is None


def _mapped(rule: Rule, words: Sequence[str]) -> list[str] | None:
    """Our words for the value by the rule's list of values: for all of it, or for each word."""
    if (
        mapped := rule.values.get(" ".join(words).lower(), rule.values.get(" ".join(words)))
    ) is not None:
        return mapped.split() or [mapped]
    if words and all(word.lower() in rule.values for word in words):
        return [part for word in words for part in rule.values[word.lower()].split()]
    return None


def words_here(rule: Rule, words: Sequence[str]) -> list[str]:
    """The value in our words."""
    if rule.form == "commas":
        words = [part for word in words for part in word.split(",") if part]
    if (mapped := _mapped(rule, words)) is not None:
        return [word for word in mapped if word != LEFT_OUT] or [LEFT_OUT]
    if rule.refused is not None:
        return [LEFT_OUT]  # a value of `unless`, which asks for nothing
    words = [rule.values.get(word, word) for word in words]
    if rule.times is not None:
        return [_multiplied(word, rule.times) for word in words]
    if rule.form == "whole":
        return [part for word in words for part in (word, "1.0")]
    return list(words)


def _multiplied(word: str, factor: float) -> str:
    try:
        return f"{float(word) * factor:g}"
    except ValueError:
        return word


def share_of_steps(words: Sequence[str], num_steps: float | None) -> str | None:
    """The share of all steps that a number of steps is; one below 1 is a share already."""
    try:
        (number,) = map(float, words)
    except ValueError:
        return None
    if number < 1:
        return f"{number:g}"
    return None if num_steps is None else f"{number / num_steps:g}"

"""What becomes here of each flag of the original open-instruct and its lineage, read from
flags.yaml.

The parser and `open-instruct migrate-args` both use it. The latter also knows trainers of other
suites that open-instruct has no counterpart of, from step_launches.yaml.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

EVERY = "every"
NONE_WORD = "none"
LEFT_OUT = "null"  # in place of our spelling of a value: the flag is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the table says of one flag; see the head of flags.yaml.

    Example: `timeout: {as: dist_timeout_s, times: 60}` is::

        Entry(ours="dist_timeout_s", times="60")
    """

    ours: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    times: str = ""
    form: str = ""
    unneeded: str | None = None
    refused: str | None = None
    unless: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a flag with its value: it is translated to `ours` with `words`, left out, or
    refused.

    Example: of `--timeout 30`, which is in minutes::

        Fate(ours="dist_timeout_s", words=["1800"])
    """

    ours: str | None = None
    words: Sequence[str] = ()
    unneeded: str | None = None
    refused: str | None = None


@cache
def upstream_table(section: str = EVERY) -> dict[str, Entry]:
    """The entries of a section of flags.yaml, or of a trainer of another suite, by the name of the
    flag there.
    """
    table = read_table("flags.yaml").get(section) or _other_trainer(section).get("flags", {})
    return {name: _entry(**facts) for names, facts in table.items() for name in names.split(", ")}


def upstream_defaults(trainer: str) -> dict[str, list[str]]:
    """The words of the default of each flag of upstream's `trainer` that has a counterpart here."""
    defaults = _other_trainer(trainer).get("defaults") or read_table("defaults.yaml")[trainer]
    return {name: value.split() for name, value in defaults.items()}


def upstream_behaviours(name: str) -> dict[str, list[str]]:
    """Differences in behaviour that no flag controls, for a command or a trainer of upstream's:
    there, and here.
    """
    return dict(
        _other_trainer(name).get("behaviours")
        or read_table("defaults.yaml")["behaviours"].get(name, {})
    )


def _other_trainer(name: str) -> dict[str, Any]:
    """What is known of a trainer of another suite."""
    return dict(read_table("step_launches.yaml").get(name, {}))


def translate_flag(name: str, words: Sequence[str], flag_names: Collection[str]) -> Fate | None:
    """The fate of upstream's flag `name` in a command with the flags `flag_names`.

    None if upstream has no such flag.
    """
    is_grpo = "total_episodes" in flag_names
    # Special sections stand behind the general one, and win.
    sections = reversed(read_table("flags.yaml"))
    tables = [
        upstream_table(section)
        for section in sections
        if section == EVERY or (section == "grpo") == is_grpo
    ]
    if name in flag_names:  # the same name here; only some values are spelled otherwise
        value = " ".join(words).lower()
        spelled_words = (table[name] for table in tables if name in table)
        return next(
            (
                decide_fate(entry, words)
                for entry in spelled_words
                if entry.ours == name and value in entry.values
            ),
            None,
        )
    for each, its_words in ((name, words), (name.removeprefix("no_"), ["false"])):
        entries = [table[each] for table in tables if each in table]
        usable = [entry for entry in entries if entry.ours is None or entry.ours in flag_names]
        if usable:
            return decide_fate(usable[0], its_words)
    return None


def decide_fate(entry: Entry, words: Sequence[str]) -> Fate:
    """The fate of a flag that was given `words`, by its entry."""
    words = [_spell_word(word) for word in words] or ["true"]
    value = " ".join(words).lower()
    if entry.refused is not None and value not in (*map(str.lower, entry.unless), *entry.values):
        return Fate(refused=entry.refused)
    if entry.ours is None or entry.values.get(value) == LEFT_OUT:
        return Fate(unneeded=entry.unneeded or "that is how it is here")
    if spelling := entry.values.get(value):
        words = spelling.split()
    elif entry.times and len(words) == 1:
        words = [_multiply_word(words[0], float(entry.times))]
    elif entry.form == "mixture":
        words = _mixture(words)
    elif entry.form == "whole":
        words = [*words, "1.0"]
    return Fate(ours=entry.ours, words=words)


def _multiply_word(word: str, factor: float) -> str:
    try:
        number = float(word) * factor
    except ValueError:
        return word
    return str(int(number)) if number.is_integer() else str(number)


def _mixture(words: list[str]) -> list[str]:
    """Names and amounts of a JSON mixture such as `{"a": 1.0, "b": 500}`; other words unchanged."""
    if len(words) != 1 or not words[0].lstrip().startswith("{"):
        return words
    try:
        mixture = json.loads(words[0], parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return words
    return [str(word) for pair in mixture.items() for word in pair]


def _spell_word(word: str) -> str:
    """A word as our command line has it."""
    return word.lower() if word.lower() in ("true", "false", NONE_WORD) else word


def _entry(**facts: Any) -> Entry:
    return Entry(ours=facts.pop("as", None), **facts)


@cache
def read_table(file: str, *, package: str = "open_instruct.config.suites") -> dict[str, Any]:
    """The content of a YAML file of a package, in which every scalar is the word that stands
    there.
    """
    text = (files(package) / file).read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return table

"""The settings of another suite's launch, in one form for every reader of this folder."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile
from typing import Any

import yaml

from open_instruct.config.parser import YAML_NULL, group_words, read_yaml_nodes
from open_instruct.core.errors import InputError, Problem

ENDS_OF_COMMANDS = ("&&", "||", ";", "|", "&")
# Flags of launchers that say how many processes to start.
GPU_FLAGS = (
    "--num_processes",
    "--num-processes",
    "--nproc_per_node",
    "--nproc-per-node",
    "--num_gpus",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a launch, by the suite's names.

    Example: `accelerate launch --num_processes 2 trl/scripts/dpo.py --loss_type sigmoid sft` is::

        Settings(trainer="dpo", values={"loss_type": ["sigmoid", "sft"]}, num_gpus=2)

    Attributes:
        trainer: which of the suite's trainers it is for; empty where it does not say.
        values: the words of each setting. A key of nested YAML has its sections before it, with
            dots between.
        unreadable: for each setting whose value is not known before the launch runs, how it is
            given.
        num_gpus: processes that train, where the launch says how many.
    """

    trainer: str
    values: Mapping[str, list[str]]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int | None = None


def read_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of each `--flag`, by its name with underscores; a flag without any is true.

    :raises InputError: a word belongs to no flag.
    """
    problems: list[Problem] = []
    groups = group_words(first_command(words), problems)
    if problems:
        raise InputError("\n".join(problems), problems=problems)
    flags = {}
    for spelling, its_words in groups:
        flags[spelling.removeprefix("--").replace("-", "_")] = its_words or ["true"]
    return flags


def first_command(words: Sequence[str]) -> list[str]:
    """The words before the first one that ends a command, such as `&&`."""
    return list(takewhile(lambda word: word not in ENDS_OF_COMMANDS, words))


def split_at_program(
    words: Sequence[str], program: re.Pattern[str]
) -> tuple[list[str], str, list[str]]:
    """The launcher's words, the first group that `program` matched, and the words behind it.

    Where no word is the program, all words are behind it.
    """
    for index, word in enumerate(words):
        match = program.fullmatch(word)
        if match:
            return list(words[:index]), match[1], list(words[index + 1 :])
    return [], "", list(words)


def count_gpus(launcher: Sequence[str]) -> int | None:
    """The processes that a launcher's words start on one node; None where they do not say."""
    words = chain.from_iterable(word.split("=", 1) for word in launcher)
    for flag, count in pairwise(words):
        if flag in GPU_FLAGS and count.isdecimal():
            return int(count)
    return None


def name_configurations(values: dict[str, list[str]], name: str, configuration: str) -> None:
    """Put the configurations of data sets behind their names, as `name:configuration`."""
    if name not in values or configuration not in values:
        return
    pairs = zip(values[name], values.pop(configuration), strict=False)
    values[name] = [path if config == "none" else f"{path}:{config}" for path, config in pairs]


def read_yaml(path: str) -> dict[str, list[str]]:
    """The settings of a YAML file, flat: `lora: {rank: 8}` is `lora.rank`.

    :raises InputError: the file cannot be read, or is no mapping.
    """
    try:
        values = {_key(key, path): plain_value(value, path) for key, value in read_yaml_nodes(path)}
    except RecursionError:  # a list that has itself in it, by an alias
        raise InputError(
            f"{path}: lists or mappings nested too deep", kind="unreadable_file"
        ) from None
    return flatten(values)


def _key(node: Any, path: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        line = node.start_mark.line + 1
        raise InputError(
            f"{path} line {line}: a setting's name is one word, not a list", kind="unreadable_file"
        )
    return str(node.value)


def plain_value(node: Any, path: str) -> Any:
    """A YAML value as dicts, lists and the words as written, so that 5e-7 is no text."""
    if isinstance(node, yaml.ScalarNode):
        return "none" if node.tag == YAML_NULL else node.value
    if isinstance(node, yaml.SequenceNode):
        return [plain_value(item, path) for item in node.value]
    return {_key(key, path): plain_value(value, path) for key, value in node.value}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, list[str]]:
    """The words of nested settings, by their keys with dots between.

    A key of a list of mappings has a word for every mapping; it is none where the key is missing.

    Example: `{"datasets": [{"path": "a", "split": "train"}, {"path": "b"}]}` is::

        {"datasets.path": ["a", "b"], "datasets.split": ["train", "none"]}
    """
    words: dict[str, list[str]] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if value in ({}, []):
            words[name] = ["none"]
        elif isinstance(value, dict):
            words |= flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for inner in dict.fromkeys(chain.from_iterable(value)):
                words[f"{name}.{inner}"] = [_one_word(item.get(inner, "none")) for item in value]
        elif isinstance(value, list):
            words[name] = [_one_word(item) for item in value]
        else:
            words[name] = [value]
    return words


def _one_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

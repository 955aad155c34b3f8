"""Flags as lines of a YAML file, which our parser reads as the words that they were."""

import json
import re
from collections.abc import Mapping, Sequence

PLAIN = re.compile(r"[\w./+-][\w./+@:=-]*(?<!:)")


def write_yaml_lines(arguments: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each flag: its word, or a list of its words."""
    lines = []
    for name, words in arguments.items():
        value = ", ".join(map(_quote, words))
        if len(words) != 1:
            value = f"[{value}]"
        lines.append(f"{name}: {value}")
    return lines


def _quote(word: str) -> str:
    """A word as YAML has it: without quotes where they are not needed."""
    if PLAIN.fullmatch(word) and word != "-":
        return word
    return json.dumps(word, ensure_ascii=False)

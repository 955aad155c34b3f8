"""Flags as lines of a YAML file, which our parser reads as the words that they were."""

import json
import re
from collections.abc import Mapping, Sequence

PLAIN = re.compile(r"[\w./+-][\w./+@:=-]*(?<!:)")


def yaml_lines(arguments: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each flag: its word, or a list of its words."""
    lines = []
    for name, words in arguments.items():
        spelled = [_scalar(word) for word in words]
        lines.append(
            f"{name}: {spelled[0]}" if len(spelled) == 1 else f"{name}: [{', '.join(spelled)}]"
        )
    return lines


def _scalar(word: str) -> str:
    """A word as YAML has it: bare where it can stand so, else in quotes."""
    is_plain = PLAIN.fullmatch(word) and not word.startswith("- ") and word != "-"
    return word if is_plain else json.dumps(word, ensure_ascii=False)

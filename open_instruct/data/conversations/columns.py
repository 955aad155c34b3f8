"""Guess the `--columns` that would make rows of other column names usable."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from open_instruct.data.conversations.row_forms import CONVERSATION_KEYS, PROMPT_KEYS
from open_instruct.data.conversations.row_keys import OTHER_NAMES, find_key, find_value

_MIN_LIKENESS = 0.75  # of a name that was mistyped, as `get_close_matches` measures it


def guess_columns(row: Mapping[str, Any], wanted_keys: Sequence[str]) -> str:
    """The words of `--columns` that would map other columns of a row to `wanted_keys`.

    They are "" if one of `wanted_keys` has no likely column.
    """
    words = []
    # The prompt of a pair may be in its conversations.
    has_conversations = any(isinstance(value, list) for value in row.values())
    has_prompt_key = find_key(row, (*CONVERSATION_KEYS, *PROMPT_KEYS)) is not None
    has_prompt = has_prompt_key or ("chosen" in wanted_keys and has_conversations)
    for column in wanted_keys:
        if find_key(row, (column,)) or (column == "prompt" and has_prompt):
            continue
        known_keys = [
            name for name in OTHER_NAMES["columns"][column] if find_value(row, name) is not None
        ]
        others = [name for name in row if name not in wanted_keys]
        similar = get_close_matches(column, others, n=1, cutoff=_MIN_LIKENESS)
        candidates = [*known_keys, *similar]
        if not candidates:
            return ""
        words.append(f"{column}={candidates[0]}")
    return " ".join(words)

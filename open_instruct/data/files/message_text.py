"""Messages that a file has as one text: of JSON, or as Python's repr, which pandas writes."""

import ast
import json
from typing import Any


def read_message_text(value: Any) -> Any:
    """The messages of a text that holds a list of them; anything else as it is.

    Example: `'[{"role": "user", "content": "Hi"}]'` becomes that list, and `"[1, 2]"` stays.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            messages = read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        are_messages = isinstance(messages, list) and all(map(_looks_like_message, messages))
        return messages if are_messages and messages else value
    return value


def _looks_like_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return {"role", "content"} <= value.keys() or {"from", "value"} <= value.keys()

"""Read JSON files that others wrote; every error becomes a message that names the file."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.files import MAX_BYTES, describe_special_file, read_whole
from open_instruct.core.text import escape_controls
from open_instruct.data.files.rows import MalformedRow, parse_json

# Ends of the names of files in a model's folder.
READ_BY_LIBRARIES = (".json", ".jinja", ".model", ".safetensors", "vocab.txt", "merges.txt")
# What is shown of a value.
MAX_TEXT_SHOWN = 40
MAX_KEYS_SHOWN = 8
MAX_ITEMS_SHOWN = 2


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        InputError: the file cannot be read, is no JSON object, or has a key twice in one object.
    """
    try:
        value = parse_json(read_whole(file))
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror or error}", kind="unreadable_file"
        ) from None
    except MalformedRow as error:
        raise InputError(
            f"{file} is {error.reason}; fetch it again", kind="unreadable_file"
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"{file} holds a JSON {type(value).__name__}, where an object is needed",
            kind="unreadable_file",
        )
    return value


def check_files(folder: Path) -> None:
    """Refuse a model's folder with files that libraries should not read.

    Raises:
        InputError: an entry that libraries would read is no regular file, or unreasonably large.
    """
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if not path.name.endswith(READ_BY_LIBRARIES):
            continue
        kind = describe_special_file(path)
        if not kind and path.suffix != ".safetensors" and path.stat().st_size > MAX_BYTES:
            kind = f"of more than {MAX_BYTES >> 20} MiB"
        if kind:
            raise InputError(
                f"{path} is {kind}, and nothing that a model's folder may have there; fetch it "
                "again",
                kind="unreadable_file",
            )


def shorten_value(value: Any, depth: int = 3) -> str:
    """A value as JSON on one line, with only the beginning of long texts, lists and objects."""
    if isinstance(value, Mapping) and depth:
        items = []
        for key, item in islice(value.items(), MAX_KEYS_SHOWN):
            items.append(f"{json.dumps(str(key))}: {shorten_value(item, depth - 1)}")
        if len(value) > len(items):
            items.append("…")
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list) and depth:
        items = [shorten_value(item, depth - 1) for item in value[:MAX_ITEMS_SHOWN]]
        if len(value) > len(items):
            items.append("…")
        return "[" + ", ".join(items) + "]"
    if isinstance(value, Mapping | list):
        return "…"
    if isinstance(value, str) and len(value) > MAX_TEXT_SHOWN:
        value = f"{value[:MAX_TEXT_SHOWN]}…"
    return escape_controls(json.dumps(value, default=str, ensure_ascii=False))


def one_line(error: BaseException) -> str:
    """The first lines of a library's error message, joined into one printable line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    letters = [letter if letter.isprintable() else "?" for letter in " ".join(lines[:2])]
    return "".join(letters)[:300] or type(error).__name__

"""JSON from files that others wrote: every error becomes a message that names the file."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.files import MAX_BYTES, kind_of_other, read_whole
from open_instruct.core.text import escaped
from open_instruct.data.files.rows import MalformedRow, parsed_json

# Ends of the names of files in a model's folder.
READ_BY_LIBRARIES = (".json", ".jinja", ".model", ".safetensors", "vocab.txt", "merges.txt")
LONGEST_SHOWN = 40


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        InputError: the file cannot be read, is no JSON object, or has a key twice in one object.
    """
    try:
        value = parsed_json(read_whole(file))
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
    """:raises InputError: an entry that libraries would read is no regular file, or is unreasonably
    large.
    """
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if not path.name.endswith(READ_BY_LIBRARIES):
            continue
        kind = kind_of_other(path)
        if not kind and path.suffix != ".safetensors" and path.stat().st_size > MAX_BYTES:
            kind = f"of more than {MAX_BYTES >> 20} MiB"
        if kind:
            raise InputError(
                f"{path} is {kind}, and nothing that a model's folder may have there; fetch it "
                "again",
                kind="unreadable_file",
            )


def shortened(value: Any, depth: int = 3) -> str:
    """A value as JSON on one line, with only the beginning of long texts, lists and objects."""
    if isinstance(value, Mapping) and depth:
        items = [
            f"{json.dumps(str(key))}: {shortened(item, depth - 1)}"
            for key, item in islice(value.items(), 8)
        ]
        return "{" + ", ".join(items + ["…"] * (len(value) > len(items))) + "}"
    if isinstance(value, list) and depth:
        items = [shortened(item, depth - 1) for item in value[:2]]
        return "[" + ", ".join(items + ["…"] * (len(value) > len(items))) + "]"
    if isinstance(value, Mapping | list):
        return "…"
    text = (
        value
        if isinstance(value, str) and len(value) <= LONGEST_SHOWN
        else f"{str(value)[:LONGEST_SHOWN]}…"
    )
    return escaped(
        json.dumps(text if isinstance(value, str) else value, default=str, ensure_ascii=False)
    )


def one_line(error: BaseException) -> str:
    """The first lines of a library's error message, joined into one printable line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(lines[:2]))[:300]
    return text or type(error).__name__

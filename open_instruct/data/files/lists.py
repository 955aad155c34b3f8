"""Rows of a .json file that is a list of rows, or an object with such a list."""

from __future__ import annotations

import json
import mmap
import re
from array import array
from pathlib import Path

from open_instruct.data.files.rows import JsonRows, hash_of_file
from open_instruct.errors import InputError

# The keys under which published files have their rows.
WRAPPERS = ("data", "rows", "examples", "instances", "train")
_LONGEST_LINE = 2**24
# A whole JSON string, or one structural character. Possessive quantifiers, so the engine keeps no states to go back to.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
_LONE_QUOTE = b'"'
_BEGIN = re.compile(rb"(?:\xef\xbb\xbf)?\s*([\[{])")
_LIST_MEMBER = re.compile(rb'\s*"([^"\\]*)"\s*:\s*\[')


def is_json_lines(path: Path) -> bool:
    """Whether a file that is called .json has an object a line."""
    with path.open("rb") as file:
        line = file.readline(_LONGEST_LINE)
        while line and not line.strip():
            line = file.readline(_LONGEST_LINE)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not any(isinstance(value.get(key), list) for key in WRAPPERS)


def json_list(path: Path, name: str, flag: str) -> JsonRows:
    """The rows of a list; their places are found without parsing any.

    Raises:
        InputError: there is no list of rows, or more than one.
    """
    try:
        with path.open("rb") as file:
            is_empty = path.stat().st_size == 0  # mmap refuses an empty file
            edges = _edges_of_rows(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as error:
        raise InputError(
            f"{flag}: {name} {error}; give a list of rows, [{{...}}, {{...}}], or an object that has it as "
            f"{' or '.join(map(repr, WRAPPERS))}"
        ) from None
    places = array("q")
    for row, (start, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True), start=1):
        places.extend((start, stop, row))
    return JsonRows(path, name, fingerprint=hash_of_file(path), places=places)


def _edges_of_rows(data: mmap.mmap | bytes) -> array[int]:
    """The start and the end of each row, in turn.

    Raises:
        ValueError: the file is no list of rows; the message completes a sentence about it.
    """
    begin = _BEGIN.match(data)
    if begin is None:
        raise ValueError("holds no JSON list")
    edges, end = _edges_of_items(data, begin.start(1))
    if re.compile(rb"\S").search(data, end):
        raise ValueError("goes on behind its end")
    if begin[1] == b"[":
        return edges
    members = [_LIST_MEMBER.match(data, start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    lists = [member for member in members if member and member[1].decode(errors="replace") in WRAPPERS]
    if len(lists) != 1:
        names = " and ".join(repr(member[1].decode()) for member in lists)
        raise ValueError(f"has lists of rows as {names}" if lists else "is an object without a list of rows")
    return _edges_of_items(data, lists[0].end() - 1)[0]


def _edges_of_items(data: mmap.mmap | bytes, start: int) -> tuple[array[int], int]:
    """Start and end of each item of the list or object that begins at `start`, in turn, and the end of the whole."""
    edges = array("q", [start + 1])
    depth = 0
    for token in _TOKEN.finditer(data, start):
        text = token[0]
        if text == _LONE_QUOTE:
            raise ValueError("has a text without an end, or is cut short")
        if text in (b"[", b"{"):
            depth += 1
        elif text in (b"]", b"}"):
            depth -= 1
        elif text == b"," and depth == 1:
            edges.extend((token.start(), token.end()))
        if depth == 0:
            edges.append(token.start())
            is_empty = len(edges) == 2 and not data[edges[0] : edges[1]].strip()
            return array("q") if is_empty else edges, token.end()
    raise ValueError("is cut short: a list or an object in it has no end")

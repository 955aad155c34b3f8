"""Rows of a .json file that is a list of rows, or an object with such a list."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from array import array
from itertools import chain
from pathlib import Path

from open_instruct.data.files.json_rows import JsonRows
from open_instruct.errors import InputError

# The keys under which published files have their rows.
WRAPPERS = ("data", "rows", "examples", "instances", "train")
_LONGEST_LINE = 2**24
# A whole JSON string, or one structural character. Possessive quantifiers, so the engine keeps no states to go back to.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
_QUOTE, _COMMA, _OPEN = ord('"'), ord(","), b"[{"


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
    """The rows of a list; one pass finds where they start and stop, without parsing any.

    Raises:
        InputError: there is no list of rows, or more than one.
    """
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        is_empty = path.stat().st_size == 0  # mmap refuses an empty file
        edges, problem = _edges(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if problem:
        raise InputError(
            f"{flag}: {name} {problem}; give a list of rows, [{{...}}, {{...}}], or an object that has it as "
            f"{' or '.join(map(repr, WRAPPERS))}"
        )
    rows = zip(edges[::2], edges[1::2], range(1, len(edges)), strict=False)
    return JsonRows(path, name, fingerprint=fingerprint, places=array("q", chain.from_iterable(rows)))


def _edges(data: mmap.mmap | bytes) -> tuple[array[int], str]:
    """Where each row starts and stops, in turn, and what is wrong with the file; "" if nothing is."""
    edges = array("q")
    begin = re.match(rb"(?:\xef\xbb\xbf)?\s*([\[{])", data)
    if begin is None:
        return edges, "holds no JSON list"
    is_wrapped = begin[1] == b"{"
    key = b""
    list_keys: list[bytes] = []
    depth = inside = start = end = 0  # `inside` is how deep the list of rows lies, once it has begun
    for token in _TOKEN.finditer(data, begin.start(1)):
        at, after = token.span()
        character = data[at]
        if character == _QUOTE:
            if after - at == 1:
                return edges, "has a text without an end, or is cut short"
            if depth == 1:
                key = data[at + 1 : after - 1]
        elif character in _OPEN:
            depth += 1
            is_rows = depth == 1 if not is_wrapped else depth == 2 and key.decode(errors="replace") in WRAPPERS
            if is_rows and character == _OPEN[0]:
                list_keys.append(key)
                inside, start = depth, after
        elif character == _COMMA:
            if depth == inside:
                edges.extend((start, at))
                start = after
        else:
            if depth == inside:
                if len(edges) or data[start:at].strip():
                    edges.extend((start, at))
                inside = -1
            depth -= 1
            if depth == 0:
                end = after
                break
    if depth:
        return edges, "is cut short: a list or an object in it has no end"
    if len(list_keys) != 1:
        names = " and ".join(repr(name.decode(errors="replace")) for name in list_keys)
        return edges, f"has lists of rows as {names}" if list_keys else "is an object without a list of rows"
    return edges, "goes on behind its end" if re.compile(rb"\S").search(data, end) else ""

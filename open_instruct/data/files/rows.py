"""Raw rows with their places in files, the protocol of the sources that read them, and the sources of JSON.

A source knows the number and the hash of its rows before any row is parsed, so that the mixer and the cache decide
first. The other kinds of files have a file each in this folder.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class MalformedRow(ValueError):
    """One row cannot be used. `kind` is the word that reports count it under, `reason` a sentence for the user."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason

    def at(self, file: str, line: int) -> BadRow:
        """The bad row, with its place."""
        return BadRow(file=file, line=line, kind=self.kind, reason=self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One parsed row. `line` counts from 1: the line of a .jsonl file, the row of anything else.

    Example: `RawRow(file="rows.jsonl", line=3, value={"chosen": [...], "rejected": [...]})`.
    """

    file: str
    line: int
    value: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """One row that cannot be used, and why.

    Example: `BadRow(file="rows.jsonl", line=3, kind="not_json", reason="not JSON: ...")`.
    """

    file: str
    line: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


class RowSource(Protocol):
    """Rows of one file or one split."""

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        """One item for each of `indices`, which must be ascending and distinct, in that order."""
        ...


class JsonRows:
    """Rows at known byte offsets of a file: read by seeking, parsed one by one. Memory holds three numbers a row.

    Seeking in a .gz unpacks all bytes between, so rows in ascending order cost one more pass.
    """

    def __init__(self, path: Path, name: str, *, fingerprint: str, places: array[int]) -> None:
        """`places` holds three numbers a row: where it starts, where it stops, and its number for messages."""
        self.name = name
        self.fingerprint = fingerprint
        self._path = path
        self._places = places

    def __len__(self) -> int:
        return len(self._places) // 3

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        with unpacked(self._path) as file:
            for index in indices:
                start, stop, number = self._places[3 * index : 3 * index + 3]
                file.seek(start)
                try:
                    value = parse_json_object(file.read(stop - start).removeprefix(_BYTE_ORDER_MARK))
                except MalformedRow as error:
                    yield error.at(self.name, number)
                else:
                    yield RawRow(file=self.name, line=number, value=value)


def json_lines(path: Path, name: str) -> JsonRows:
    """The lines of a file that are not blank; one pass finds where they start and hashes them."""
    places = array("q")
    digest = hashlib.sha256()
    position = 0
    with unpacked(path) as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if line.strip():
                places.extend((position, position + len(line), number))
            position += len(line)
    return JsonRows(path, name, fingerprint=digest.hexdigest(), places=places)


def parse_json_object(line: bytes) -> dict[str, Any]:
    """The object that one line of a .jsonl file holds.

    Raises:
        MalformedRow: the line is not UTF-8, not JSON, or no JSON object.
    """
    try:
        text = line.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise MalformedRow(
            "not_utf8", f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        ) from error
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} at column {error.colno}"
        if error.pos >= len(text.rstrip()) and text.lstrip().startswith("{"):
            reason = "an object that does not end on its line: .jsonl has one whole object a line"
        raise MalformedRow("not_json", reason) from error
    except (ValueError, RecursionError) as error:  # a key twice; an integer of thousands of digits; brackets too deep
        raise MalformedRow("not_json", f"not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise MalformedRow("not_object", f"the row is a JSON {kind_of(value).split()[-1]}, not an object")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.loads` that refuses duplicate keys, as readers differ in the value that they take."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is there twice")
    return fields


def kind_of(value: Any) -> str:
    """JSON's name of the type of a value, with its article."""
    if value is None:
        return "null"
    kinds = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)


def unpacked(path: Path) -> IO[bytes]:
    """The file opened for reading; a .gz is unpacked."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    file: IO[bytes] = opener(path, "rb")
    return file


def hash_of_file(path: Path) -> str:
    """The hex sha256 of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Raw rows with their places in files, and the protocol of the sources that read them.

A source knows the number and the hash of its rows before any row is parsed, so that the mixer and the cache decide
first. This folder has one source for each kind of file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from open_instruct.data.files.foreign_json import kind_of, unique_keys


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


class ReadRow(Mapping[str, Any]):
    """A row that knows which of its keys were read."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.value = value
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.value[key]

    def __contains__(self, key: object) -> bool:
        return key in self.value  # looking is not reading

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def unread(self) -> Iterator[str]:
        """The keys with a value that nothing has read."""
        return (key for key, item in self.value.items() if item is not None and key not in self.read)


def says(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row has a value other than null under a key; Arrow fills missing columns with null."""
    return (row.value if isinstance(row, ReadRow) else row).get(key) is not None


def reach(row: Mapping[str, Any], name: str) -> Any:
    """The value under a name, None if there is none; a dot reaches into an object: `reward_model.ground_truth`."""
    if name in row or "." not in name:
        return row.get(name)
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return reach(inner, rest) if isinstance(inner, Mapping) else None


class RowSource(Protocol):
    """Rows of one file or one split."""

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        """One item for each of `indices`, which must be ascending and distinct, in that order."""
        ...


def parse_json_object(line: bytes) -> dict[str, Any]:
    """The object that one line of a .jsonl file holds.

    Raises:
        MalformedRow: the line is not UTF-8, not JSON, or no JSON object.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedRow(
            "not_utf8", f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        ) from error
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) and text.lstrip().startswith("{"):
            raise MalformedRow(
                "not_json", "an object that does not end on its line: .jsonl has one whole object a line"
            ) from error
        raise MalformedRow("not_json", f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a key twice; an integer of thousands of digits; brackets too deep
        raise MalformedRow("not_json", f"not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise MalformedRow("not_object", f"the row is a JSON {kind_of(value).split()[-1]}, not an object")
    return value

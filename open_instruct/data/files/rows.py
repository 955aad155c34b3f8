"""Raw rows with their places in files, what a source of them is, and the sources of JSON.

A source knows the number and the hash of its rows before any row is parsed, so that the mixer and
the cache decide first. Tables are read in tables.py.
"""

import gzip
import hashlib
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError

# The keys under which published files have their rows.
WRAPPERS = ("data", "rows", "examples", "instances", "train")

MAX_REASON = 800  # characters of why a row cannot be used


class MalformedRow(ValueError):
    """One row cannot be used.

    Attributes:
        kind: the word that reports count it under.
        reason: a sentence for the user.
        missing_key: the key that the row lacks, if that is the reason.
    """

    def __init__(self, kind: str, reason: str, *, missing_key: str = "") -> None:
        self.kind = kind
        self.missing_key = missing_key
        # It may repeat the row.
        self.reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One row of a source. `line` counts from 1: the line of a .jsonl file, the row of anything
    else.

    Example: `RawRow(file="rows.jsonl", line=3, value={"chosen": [...], "rejected": [...]})`.
    """

    file: str
    line: int
    value: dict[str, Any] = field(default_factory=dict)
    problem: MalformedRow | None = None  # why it has no value, if it has none

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"

    def content(self) -> dict[str, Any]:
        """:raises MalformedRow: the row could not be read."""
        if self.problem is not None:
            raise self.problem
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Rows of one file or one split.

    `rows` gives one item for each of its indices, which must be ascending and distinct, in that
    order.

    Example: `RowSource(name="rows.jsonl", fingerprint="9f86…", num_rows=2, rows=read)`, where
    `list(read([1]))` is `[RawRow(file="rows.jsonl", line=2, value={…})]`.
    """

    name: str
    fingerprint: str
    num_rows: int
    rows: Callable[[Sequence[int]], Iterator[RawRow]]
    warnings: Callable[[], list[str]] = list  # about what has been read so far

    def __len__(self) -> int:
        return self.num_rows


# Gives the line of each row and what is there.
Reader = Callable[[], Iterable[tuple[int, Any]]]
# Makes a row of what is there; it may raise MalformedRow.
Parser = Callable[[Any], dict[str, Any]]


def file_rows(
    path: Path, name: str, *, read: Reader, parse: Parser, num_rows: int | None = None
) -> RowSource:
    """The rows of one file, read from its start each time, so that memory holds one of them.

    Without `num_rows`, all is read once to be counted.
    """

    def rows(indices: Sequence[int]) -> Iterator[RawRow]:
        wanted = set(indices)
        for index, (line, found) in enumerate(islice(read(), max(wanted, default=-1) + 1)):
            if index in wanted:
                try:
                    yield RawRow(file=name, line=line, value=parse(found))
                except MalformedRow as error:
                    # A new one: traceback and cause of the other hold the text of the row, which
                    # may be long.
                    yield RawRow(
                        file=name, line=line, problem=MalformedRow(error.kind, error.reason)
                    )

    with unpacked(path) as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    num_rows = sum(1 for _ in read()) if num_rows is None else num_rows
    return RowSource(name=name, fingerprint=fingerprint, num_rows=num_rows, rows=rows)


def json_lines(path: Path, name: str) -> RowSource:
    """The lines of a file that are not blank."""

    def numbered_lines() -> Iterator[tuple[int, bytes]]:
        with unpacked(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.removeprefix(BOM_UTF8)

    return file_rows(path, name, read=numbered_lines, parse=parse_json_object)


def json_list(path: Path, name: str, flag: str) -> RowSource:
    """The rows of a file that is a list of rows, or an object with one such list; it is read as a
    whole.

    Raises:
        InputError: it is not JSON, or there is no list of rows, or more than one.
    """
    value: Any = None
    problem = "holds no list of rows"
    try:
        value = parsed_json(path.read_bytes().removeprefix(BOM_UTF8))
    except MalformedRow as error:
        problem = f"is {error.reason}"
    if isinstance(value, dict):
        keys = [key for key in WRAPPERS if isinstance(value.get(key), list)]
        value = value[keys[0]] if len(keys) == 1 else None
        problem = f"has lists of rows as {' and '.join(map(repr, keys))}" if keys else problem
    if not isinstance(value, list):
        raise InputError(
            f"{flag}: {name} {problem}; give a list of rows, [{{...}}, {{...}}], or an object "
            f"that has it as {' or '.join(map(repr, WRAPPERS))}",
            kind="unreadable_file",
        )
    return file_rows(
        path, name, read=partial(enumerate, value, start=1), parse=_as_object, num_rows=len(value)
    )


def is_json_lines(path: Path) -> bool:
    """Whether a file that is called .json has an object a line."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and not any(isinstance(row.get(key), list) for key in WRAPPERS)


def parse_json_object(line: bytes) -> dict[str, Any]:
    """The object that one line of a .jsonl file holds.

    Raises:
        MalformedRow: the line is not UTF-8, not JSON, or no JSON object.
    """
    cut_short = "an object that does not end on its line: .jsonl has one whole object a line"
    return _as_object(parsed_json(line, cut_short=cut_short))


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedRow(
            "not_object", f"the row is a JSON {kind_of(value).split()[-1]}, not an object"
        )
    return value


def parsed_json(data: bytes, *, cut_short: str = "") -> Any:
    """What JSON of others says; `cut_short` is a better reason for refusing the beginning of an
    object.

    Raises:
        MalformedRow: it is not UTF-8 or not JSON, or an object has a key twice.
    """
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise MalformedRow(
            "not_utf8", f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1}"
        ) from error
    except json.JSONDecodeError as error:
        place = (
            f"column {error.colno}"
            if error.lineno == 1
            else f"line {error.lineno}, column {error.colno}"
        )
        is_cut = cut_short and error.pos >= len(text.rstrip()) and text.lstrip().startswith("{")
        raise MalformedRow(
            "not_json", cut_short if is_cut else f"not JSON: {error.msg} at {place}"
        ) from error
    # A key twice; an integer of thousands of digits; brackets too deep.
    except (ValueError, RecursionError) as error:
        raise MalformedRow("not_json", f"not JSON that can be read: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.loads` that refuses duplicate keys, as readers differ in the value that they
    take.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is there twice in the object {fields!s:.60}")
    return fields


def kind_of(value: Any) -> str:
    """JSON's name of the type of a value, with its article."""
    if value is None:
        return "null"
    kinds = {
        list: "a list",
        str: "a string",
        int: "a number",
        float: "a number",
        bool: "a boolean",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)


def unpacked(path: Path) -> BufferedReader | gzip.GzipFile:
    """The file opened for reading; a .gz is unpacked."""
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")

"""Raw rows with their places in files, the sources that give them, and the sources of JSON.

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
    """One row of a source, or the problem that it has instead of a value.

    Example: `RawRow(file="rows.jsonl", line=3, value={"chosen": [...], "rejected": [...]})`.
    """

    file: str
    line: int
    """Counted from 1: the line of a .jsonl file, the row of anything else."""
    value: dict[str, Any] = field(default_factory=dict)
    problem: MalformedRow | None = None

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"

    def content(self) -> dict[str, Any]:
        """The value.

        Raises:
            MalformedRow: the row could not be read.
        """
        if self.problem is not None:
            raise self.problem
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """The rows of one file or one split, read when they are asked for.

    Example: `RowSource(name="rows.jsonl", fingerprint="9f86…", num_rows=2, rows=read)`, where
    `list(read([1]))` is `[RawRow(file="rows.jsonl", line=2, value={…})]`.
    """

    name: str
    fingerprint: str
    num_rows: int
    rows: Callable[[Sequence[int]], Iterator[RawRow]]
    """Gives one row for each of its indices, which must be ascending and distinct."""
    warnings: Callable[[], list[str]] = list
    """Gives warnings about what has been read so far."""

    def __len__(self) -> int:
        return self.num_rows


ReadItems = Callable[[], Iterable[tuple[int, Any]]]
"""Gives the line of each row, and what is there."""
ParseItem = Callable[[Any], dict[str, Any]]
"""Makes a row of what is there; it may raise MalformedRow."""


def open_file_rows(
    path: Path,
    name: str,
    *,
    read: ReadItems,
    parse: ParseItem,
    num_rows: int | None = None,
) -> RowSource:
    """The rows of one file, read from its start each time, so that memory holds one of them.

    Without `num_rows`, all is read once to be counted.
    """

    def read_rows(indices: Sequence[int]) -> Iterator[RawRow]:
        wanted_indices = set(indices)
        num_read = max(wanted_indices, default=-1) + 1
        for index, (line, item) in enumerate(islice(read(), num_read)):
            if index in wanted_indices:
                yield _parse_row(item, parse, file=name, line=line)

    with open_unpacked(path) as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    if num_rows is None:
        num_rows = sum(1 for _ in read())
    return RowSource(
        name=name,
        fingerprint=fingerprint,
        num_rows=num_rows,
        rows=read_rows,
    )


def _parse_row(
    item: Any,
    parse: ParseItem,
    *,
    file: str,
    line: int,
) -> RawRow:
    try:
        return RawRow(file=file, line=line, value=parse(item))
    except MalformedRow as error:
        # A new one: traceback and cause of the other hold the text of the row, which may be long.
        return RawRow(file=file, line=line, problem=MalformedRow(error.kind, error.reason))


def open_json_lines(path: Path, name: str) -> RowSource:
    """The rows of a .jsonl file, one on each line that is not blank."""

    def numbered_lines() -> Iterator[tuple[int, bytes]]:
        with open_unpacked(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.removeprefix(BOM_UTF8)

    return open_file_rows(path, name, read=numbered_lines, parse=parse_json_object)


def open_json_list(path: Path, name: str, flag: str) -> RowSource:
    """The rows of a .json file: a list, or an object with one list; it is read as a whole.

    Raises:
        InputError: it is not JSON, or there is no list of rows, or more than one.
    """
    value: Any = None
    problem = "holds no list of rows"
    try:
        with open_unpacked(path) as file:
            value = parse_json(file.read().removeprefix(BOM_UTF8))
    except MalformedRow as error:
        problem = f"is {error.reason}"
    if isinstance(value, dict):
        keys = [key for key in WRAPPERS if isinstance(value.get(key), list)]
        if keys:
            problem = f"has lists of rows as {' and '.join(map(repr, keys))}"
        value = value[keys[0]] if len(keys) == 1 else None
    if not isinstance(value, list):
        raise InputError(
            f"{flag}: {name} {problem}; give a list of rows, [{{...}}, {{...}}], or an object "
            f"that has it as {' or '.join(map(repr, WRAPPERS))}",
            kind="unreadable_file",
        )
    read = partial(enumerate, value, start=1)
    return open_file_rows(path, name, read=read, parse=_check_object, num_rows=len(value))


def is_json_lines(path: Path) -> bool:
    """Whether a file that is called .json has an object a line."""
    with open_unpacked(path) as file:
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
    return _check_object(parse_json(line, cut_short=cut_short))


def _check_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedRow(
            "not_object", f"the row is a JSON {name_json_type(value).split()[-1]}, not an object"
        )
    return value


def parse_json(data: bytes, *, cut_short: str = "") -> Any:
    """The value of JSON that others wrote.

    Args:
        data: in UTF-8.
        cut_short: a better reason for refusing the beginning of an object.

    Raises:
        MalformedRow: it is not UTF-8 or not JSON, or an object has a key twice.
    """
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except UnicodeDecodeError as error:
        raise MalformedRow(
            "not_utf8", f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1}"
        ) from error
    except json.JSONDecodeError as error:
        reason = _describe_json_error(error)
        is_cut = error.pos >= len(text.rstrip()) and text.lstrip().startswith("{")
        if cut_short and is_cut:
            reason = cut_short
        raise MalformedRow("not_json", reason) from error
    # A key twice; an integer of thousands of digits; brackets too deep.
    except (ValueError, RecursionError) as error:
        raise MalformedRow("not_json", f"not JSON that can be read: {error}") from error


def _describe_json_error(error: json.JSONDecodeError) -> str:
    place = f"column {error.colno}"
    if error.lineno > 1:
        place = f"line {error.lineno}, {place}"
    return f"not JSON: {error.msg} at {place}"


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.loads`: readers of JSON differ in the value of a key that comes twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        [(key, _)] = counts.most_common(1)
        raise ValueError(f"the key {key!r} is there twice in the object {fields!s:.60}")
    return fields


def name_json_type(value: Any) -> str:
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


def open_unpacked(path: Path) -> BufferedReader | gzip.GzipFile:
    """The file opened for reading; a .gz is unpacked."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    return path.open("rb")

"""Tables of text: .csv and .tsv, packed or not."""

import ast
import csv
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import IO, Any

from open_instruct.data.files.rows import FileRows, MalformedRow, unpacked
from open_instruct.errors import InputError

_DELIMITERS = ",;\t"
_LONGEST_CELL = 2**28
_NOT_UTF8 = re.compile(r"[\ud800-\udfff]")  # what stands for such bytes, see `_opened`


def text_table(path: Path, name: str, flag: str) -> FileRows:
    """The rows under a line of column names.

    A cell is text, except for a list of messages, written as JSON or as Python's repr (pandas writes that).
    """
    with _opened(path) as file:
        first = next((line for line in file if line.strip()), "")
    cells = partial(_cells, path, name, delimiter=max(_DELIMITERS, key=first.count))
    _, columns = next(cells(), (1, [""]))
    if len(set(columns)) < len(columns) or not all(column.strip() for column in columns):
        raise InputError(
            f"{flag}: {name} must begin with a line of column names, each once; it begins with {first.strip()[:80]!r}"
        )
    return FileRows(path, name, read=lambda: islice(cells(), 1, None), parse=partial(_row, columns))


def _row(columns: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise MalformedRow(
            "not_readable", f"{len(cells)} cells under {len(columns)} column names ({', '.join(columns)[:80]})"
        )
    if _NOT_UTF8.search("".join(cells)):
        raise MalformedRow("not_readable", "not UTF-8: save the table as CSV UTF-8")
    return {column: _value_of(cell) for column, cell in zip(columns, cells, strict=True)}


def _cells(path: Path, name: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of the header and of each row that is not blank, with the line that they begin in."""
    csv.field_size_limit(_LONGEST_CELL)
    line = 1
    with _opened(path) as file:
        reader = csv.reader(file, delimiter=delimiter)
        try:
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1
        except csv.Error as error:
            raise InputError(f"{name}, line {line}: no table that can be read: {error}") from error


def _opened(path: Path) -> IO[str]:
    """The table as text, in which bytes that are not UTF-8 are surrogates."""
    return TextIOWrapper(unpacked(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _value_of(cell: str) -> Any:
    """The messages of a cell if it holds a list of them, else its text."""
    if not cell.lstrip().startswith("["):
        return cell
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(cell)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        is_messages = isinstance(value, list) and all(
            isinstance(item, dict) and ({"role", "content"} <= item.keys() or {"from", "value"} <= item.keys())
            for item in value
        )
        return value if is_messages and value else cell
    return cell

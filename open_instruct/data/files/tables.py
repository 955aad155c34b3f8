"""Tables of text: .csv and .tsv, packed or not."""

import ast
import csv
import json
import re
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import IO, Any

from open_instruct.data.files.rows import BadRow, RawRow, hash_of_file, unpacked
from open_instruct.errors import InputError

_DELIMITERS = ",;\t"
_LONGEST_CELL = 2**28
_NOT_UTF8 = re.compile(r"[\ud800-\udfff]")  # what stands for such bytes, see `TextTable._open`


class TextTable:
    """Rows under a line of column names, read from the start each time; memory holds one of them.

    A cell is text, except for a list of messages, written as JSON or as Python's repr (pandas writes that).
    """

    def __init__(self, path: Path, name: str, flag: str) -> None:
        self.name = name
        self.fingerprint = hash_of_file(path)
        self._path = path
        with self._open() as file:
            first = next((line for line in file if line.strip()), "")
        self._delimiter = max(_DELIMITERS, key=first.count)
        _, self._columns = next(self._cells(), (1, [""]))
        if len(set(self._columns)) < len(self._columns) or not all(column.strip() for column in self._columns):
            raise InputError(
                f"{flag}: {name} must begin with a line of column names, each once; it begins with "
                f"{first.strip()[:80]!r}"
            )
        self._num_rows = sum(1 for _ in self._cells()) - 1

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        wanted = set(indices)
        below_header = islice(self._cells(), 1, max(wanted, default=-1) + 2)
        for row, (line, cells) in enumerate(below_header):
            if row in wanted:
                yield self._row(line, cells)

    def _row(self, line: int, cells: Sequence[str]) -> RawRow | BadRow:
        if len(cells) != len(self._columns):
            problem = f"{len(cells)} cells under {len(self._columns)} column names ({', '.join(self._columns)[:80]})"
        elif _NOT_UTF8.search("".join(cells)):
            problem = "not UTF-8: save the table as CSV UTF-8"
        else:
            value = {column: _value_of(cell) for column, cell in zip(self._columns, cells, strict=True)}
            return RawRow(file=self.name, line=line, value=value)
        return BadRow(file=self.name, line=line, kind="not_readable", reason=problem)

    def _cells(self) -> Iterator[tuple[int, list[str]]]:
        """The cells of the header and of each row that is not blank, with the line that they begin in."""
        csv.field_size_limit(_LONGEST_CELL)
        line = 1
        with self._open() as file:
            reader = csv.reader(file, delimiter=self._delimiter)
            try:
                for cells in reader:
                    if cells:
                        yield line, cells
                    line = reader.line_num + 1
            except csv.Error as error:
                raise InputError(f"{self.name}, line {line}: no table that can be read: {error}") from error

    def _open(self) -> IO[str]:
        """The table as text, in which bytes that are not UTF-8 are surrogates."""
        return TextIOWrapper(unpacked(self._path), encoding="utf-8-sig", errors="surrogateescape", newline="")


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

"""Tables of text: .csv and .tsv, packed or not."""

from __future__ import annotations

import ast
import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from open_instruct.data.files.json_rows import unpacked
from open_instruct.data.files.rows import BadRow, RawRow
from open_instruct.errors import InputError

_DELIMITERS = ",;\t"
_LONGEST_CELL = 2**28


class TextTable:
    """Rows under a line of column names, read from the start each time; memory holds one of them.

    A cell is text, except for a list of messages, written as JSON or as Python's repr (pandas writes that).
    """

    def __init__(self, path: Path, name: str, flag: str) -> None:
        self.name = name
        self._path = path
        self._flag = flag
        self._names, self._delimiter = self._header()
        self._num_rows = sum(1 for _ in self._cells())
        with path.open("rb") as file:
            self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        wanted = iter(indices)
        index = next(wanted, None)
        for place, (line, cells) in enumerate(self._cells()):
            if place != index:
                continue
            problem = self._problem(cells)
            if problem:
                yield BadRow(file=self.name, line=line, kind="not_readable", reason=problem)
            else:
                value = {name: _value_of(cell) for name, cell in zip(self._names, cells, strict=True)}
                yield RawRow(file=self.name, line=line, value=value)
            index = next(wanted, None)
            if index is None:
                return

    def _problem(self, cells: Sequence[str]) -> str | None:
        if len(cells) != len(self._names):
            return f"{len(cells)} cells under {len(self._names)} column names ({', '.join(self._names)[:80]})"
        try:
            "".join(cells).encode("utf-8")
        except UnicodeEncodeError:  # bytes that are not UTF-8, which `_open` lets through
            return "not UTF-8: save the table as CSV UTF-8"
        return None

    def _header(self) -> tuple[list[str], str]:
        with self._open() as file:
            first = next((line for line in file if line.strip()), "")
        delimiter = max(_DELIMITERS, key=first.count)
        names = next(csv.reader([first], delimiter=delimiter), [])
        if len(set(names)) < len(names) or not all(name.strip() for name in names) or not names:
            raise InputError(
                f"{self._flag}: {self.name} must begin with a line of column names, each once; it begins with "
                f"{first.strip()[:80]!r}"
            )
        return names, delimiter

    def _cells(self) -> Iterator[tuple[int, list[str]]]:
        """Each row below the header that is not blank, with the line that it begins in."""
        csv.field_size_limit(_LONGEST_CELL)
        line = 0
        with self._open() as file:
            reader = csv.reader(file, delimiter=self._delimiter)
            is_header = True
            try:
                for cells in reader:
                    if cells and not is_header:
                        yield line + 1, cells
                    is_header = is_header and not cells
                    line = reader.line_num
            except csv.Error as error:
                raise InputError(f"{self.name}, line {line + 1}: no table that can be read: {error}") from error

    def _open(self) -> IO[str]:
        file = unpacked(self._path)
        return TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


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

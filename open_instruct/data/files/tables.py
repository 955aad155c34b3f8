"""Tables: text (.csv and .tsv, packed or not), and column files (.parquet and .arrow)."""

import ast
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from open_instruct.core.errors import InputError
from open_instruct.data.files.arrow_values import row_conversion
from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.rows import MalformedRow, RowSource, file_rows, unpacked
from open_instruct.data.files.unfolding import check_declared_size

_DELIMITERS = ",;\t"
_LONGEST_CELL = 2**28
_NOT_UTF8 = re.compile(r"[\ud800-\udfff]")  # what stands for such bytes, see `_opened`
_ROWS_AT_ONCE = 1024
# A Parquet file may store a text of many rows once, so it does not show how many bytes its rows
# become in memory. But no cell is larger than its unpacked row group.
_BYTES_AT_ONCE = 2**29
_LONGEST_ROW = 2**23  # bytes

Batches = Callable[[], Iterable[Any]]


def text_table(path: Path, name: str, flag: str) -> RowSource:
    """The rows under a line of column names.

    A cell is text, except for a list of messages, written as JSON or as Python's repr (pandas
    writes that).
    """
    with _opened(path) as file:
        first = next((line for line in file if line.strip()), "")
    cells = partial(_cells, path, name, delimiter=max(_DELIMITERS, key=first.count))
    _, columns = next(cells(), (1, [""]))
    if len(set(columns)) < len(columns) or not all(column.strip() for column in columns):
        raise InputError(
            f"{flag}: {name} must begin with a line of column names, each once; it begins with "
            f"{first.strip()[:80]!r}",
            kind="bad_row",
        )
    return file_rows(
        path, name, read=lambda: islice(cells(), 1, None), parse=partial(_row, columns)
    )


def _row(columns: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise MalformedRow(
            "not_readable",
            (f"{len(cells)} cells under {len(columns)} column names ({', '.join(columns)[:80]})"),
        )
    if _NOT_UTF8.search("".join(cells)):
        raise MalformedRow("not_readable", "not UTF-8: save the table as CSV UTF-8")
    return {column: _value_of_cell(cell) for column, cell in zip(columns, cells, strict=True)}


def _cells(path: Path, name: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of the header and of each row that is not blank, with the line that they begin
    in.
    """
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
            raise InputError(
                f"{name}, line {line}: no table that can be read: {error}", kind="unreadable_file"
            ) from error


def _opened(path: Path) -> IO[str]:
    """The table as text, in which bytes that are not UTF-8 are surrogates."""
    return TextIOWrapper(unpacked(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _value_of_cell(cell: str) -> Any:
    """The messages of a cell if it holds a list of them, else its text."""
    if not cell.lstrip().startswith("["):
        return cell
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(cell)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        is_messages = isinstance(value, list) and all(
            isinstance(item, dict)
            and ({"role", "content"} <= item.keys() or {"from", "value"} <= item.keys())
            for item in value
        )
        return value if is_messages and value else cell
    return cell


def column_file(path: Path, name: str, flag: str) -> RowSource:
    """The rows of a .parquet file, read batch by batch, or of a .arrow file, mapped into memory."""
    is_parquet = path.suffix == ".parquet"
    try:
        num_rows, schema, batches = _parquet(path) if is_parquet else _arrow(path)
    except Exception as error:  # pyarrow's kinds of errors have no common ancestor
        kind = "a Parquet" if is_parquet else "an Arrow"
        raise InputError(
            f"{flag}: {name} is not {kind} file, or is damaged: {one_line(error)}",
            kind="unreadable_file",
        ) from error
    convert = row_conversion(schema, decodes_json=True)
    read = partial(_numbered_rows, batches, name)
    return file_rows(
        path, name, read=read, parse=lambda row: convert(_value_of_row(row)), num_rows=num_rows
    )


def _numbered_rows(batches: Batches, file: str) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(chain.from_iterable(map(_split, batches())), start=1)
    except Exception as error:
        raise InputError(
            f"{file} is damaged: {one_line(error)}; fetch it again", kind="unreadable_file"
        ) from error


def _split(batch: Any) -> Iterable[Any]:
    """The rows of a batch, read at once; where one may be bad or too long, a batch of each."""
    if _shows_length(batch) and batch.nbytes <= _LONGEST_ROW:
        with suppress(Exception):  # such as of text that is not UTF-8
            return list(batch.to_pylist())
    return (batch.slice(row, 1) for row in range(batch.num_rows))


def _shows_length(batch: Any) -> bool:
    """Whether no repeated texts are stored once, in dictionaries."""
    return "dictionary<" not in str(batch.schema.types)


def _value_of_row(row: Any) -> dict[str, Any]:
    """A row that is read already, or that of a batch of one."""
    if isinstance(row, dict):
        return row
    too_long = f"the row has more than {_LONGEST_ROW >> 20} MiB, more than a model reads"
    if _shows_length(row) and row.nbytes > _LONGEST_ROW:
        raise MalformedRow("not_readable", too_long)
    try:
        (value,) = row.to_pylist()
    except Exception as error:  # such as text that is not UTF-8
        raise MalformedRow("not_readable", f"damaged: {one_line(error)}") from error
    if len(str(value)) > _LONGEST_ROW:
        raise MalformedRow("not_readable", too_long)
    return value


def _parquet(path: Path) -> tuple[int, Any, Batches]:
    """The number of rows of the file, their schema, and a reader of its record batches."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=True)
    check_declared_size(file.metadata, path.stat().st_size)

    def batches() -> Iterator[Any]:
        for group in range(file.metadata.num_row_groups):
            num_rows = _BYTES_AT_ONCE // max(1, file.metadata.row_group(group).total_byte_size)
            yield from file.iter_batches(
                batch_size=max(1, min(num_rows, _ROWS_AT_ONCE)), row_groups=[group]
            )

    return file.metadata.num_rows, file.schema_arrow, batches


def _arrow(path: Path) -> tuple[int, Any, Batches]:
    """As `_parquet`, for Arrow's stream format, which datasets writes, or its random-access
    format.
    """
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    try:
        table = pyarrow.ipc.open_file(mapped).read_all()
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        table = pyarrow.ipc.open_stream(mapped).read_all()
    table.validate(full=True)  # reading past what is mapped would end the process
    return table.num_rows, table.schema, partial(table.to_batches, max_chunksize=_ROWS_AT_ONCE)

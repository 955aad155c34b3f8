"""Rows of tables: text (.csv and .tsv, packed or not), and columns (.parquet and .arrow)."""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from open_instruct.core.errors import InputError
from open_instruct.data.files.arrow_values import build_row_conversion
from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.message_text import read_message_text
from open_instruct.data.files.rows import MalformedRow, RowSource, open_file_rows, open_unpacked
from open_instruct.data.files.unfolding import check_declared_size

_DELIMITERS = ",;\t"
_MAX_CELL_LENGTH = 2**28
_NOT_UTF8 = re.compile(r"[\ud800-\udfff]")  # what stands for such bytes, see `_open_text`
_ROWS_PER_BATCH = 1024
# A Parquet file may store a text of many rows once, so it does not show how many bytes its rows
# become in memory. But no cell is larger than its unpacked row group.
_BYTES_PER_BATCH = 2**29
_MAX_ROW_BYTES = 2**23  # bytes

Batches = Callable[[], Iterable[Any]]


def open_text_table(path: Path, name: str, flag: str) -> RowSource:
    """The rows under a line of column names.

    A cell is text, except for a list of messages, written as JSON or as Python's repr (pandas
    writes that).
    """
    with _open_text(path) as file:
        first = next((line for line in file if line.strip()), "")
    read_cells = partial(_read_cells, path, name, delimiter=max(_DELIMITERS, key=first.count))
    _, columns = next(read_cells(), (1, [""]))
    if len(set(columns)) < len(columns) or not all(column.strip() for column in columns):
        raise InputError(
            f"{flag}: {name} must begin with a line of column names, each once; it begins with "
            f"{first.strip()[:80]!r}",
            kind="bad_row",
        )
    return open_file_rows(
        path, name, read=lambda: islice(read_cells(), 1, None), parse=partial(_parse_row, columns)
    )


def _parse_row(columns: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise MalformedRow(
            "not_readable",
            f"{len(cells)} cells under {len(columns)} column names ({', '.join(columns)[:80]})",
        )
    if _NOT_UTF8.search("".join(cells)):
        raise MalformedRow("not_readable", "not UTF-8: save the table as CSV UTF-8")
    return {column: read_message_text(cell) for column, cell in zip(columns, cells, strict=True)}


def _read_cells(path: Path, name: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The first line and the cells of the header and of each row that is not blank."""
    csv.field_size_limit(_MAX_CELL_LENGTH)
    line = 1
    with _open_text(path) as file:
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


def _open_text(path: Path) -> IO[str]:
    """The table as text, in which bytes that are not UTF-8 are surrogates."""
    return TextIOWrapper(
        open_unpacked(path), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )


def open_column_file(path: Path, name: str, flag: str) -> RowSource:
    """The rows of a .parquet file, read batch by batch, or of a .arrow file, mapped into memory."""
    if path.suffix == ".parquet":
        kind = "a Parquet"
        open_batches = _open_parquet
    else:
        kind = "an Arrow"
        open_batches = _open_arrow
    try:
        num_rows, schema, batches = open_batches(path)
    except Exception as error:  # pyarrow's kinds of errors have no common ancestor
        raise InputError(
            f"{flag}: {name} is not {kind} file, or is damaged: {one_line(error)}",
            kind="unreadable_file",
        ) from error
    convert = build_row_conversion(schema, decodes_json=True)
    read = partial(_number_rows, batches, name)
    return open_file_rows(
        path, name, read=read, parse=lambda row: convert(_take_row(row)), num_rows=num_rows
    )


def _number_rows(batches: Batches, file: str) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(chain.from_iterable(map(_split, batches())), start=1)
    except Exception as error:
        raise InputError(
            f"{file} is damaged: {one_line(error)}; fetch it again", kind="unreadable_file"
        ) from error


def _split(batch: Any) -> Iterable[Any]:
    """The rows of a batch, read at once; where one may be bad or too long, a batch of each."""
    if _shows_length(batch) and batch.nbytes <= _MAX_ROW_BYTES:
        with suppress(Exception):  # such as of text that is not UTF-8
            return list(batch.to_pylist())
    return (batch.slice(row, 1) for row in range(batch.num_rows))


def _shows_length(batch: Any) -> bool:
    """Whether no repeated texts are stored once, in dictionaries."""
    return "dictionary<" not in str(batch.schema.types)


def _take_row(row: Any) -> dict[str, Any]:
    """A row that is read already, or the row of a batch of one."""
    if isinstance(row, dict):
        return row
    too_long = f"the row has more than {_MAX_ROW_BYTES >> 20} MiB, more than a model reads"
    if _shows_length(row) and row.nbytes > _MAX_ROW_BYTES:
        raise MalformedRow("not_readable", too_long)
    try:
        (value,) = row.to_pylist()
    except Exception as error:  # such as text that is not UTF-8
        raise MalformedRow("not_readable", f"damaged: {one_line(error)}") from error
    if len(str(value)) > _MAX_ROW_BYTES:
        raise MalformedRow("not_readable", too_long)
    return value


def _open_parquet(path: Path) -> tuple[int, Any, Batches]:
    """The number of rows of the file, their schema, and a reader of its record batches."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=True)
    check_declared_size(file.metadata, path.stat().st_size)

    def batches() -> Iterator[Any]:
        for group in range(file.metadata.num_row_groups):
            num_rows = _BYTES_PER_BATCH // max(1, file.metadata.row_group(group).total_byte_size)
            batch_size = max(1, min(num_rows, _ROWS_PER_BATCH))
            yield from file.iter_batches(batch_size=batch_size, row_groups=[group])

    return file.metadata.num_rows, file.schema_arrow, batches


def _open_arrow(path: Path) -> tuple[int, Any, Batches]:
    """Open a file of Arrow, in either of its formats: streams, which datasets writes, and files."""
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    try:
        table = pyarrow.ipc.open_file(mapped).read_all()
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        table = pyarrow.ipc.open_stream(mapped).read_all()
    table.validate(full=True)  # reading past what is mapped would end the process
    return table.num_rows, table.schema, partial(table.to_batches, max_chunksize=_ROWS_PER_BATCH)

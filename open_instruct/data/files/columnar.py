"""Column files: .parquet and .arrow."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.rows import BadRow, RawRow
from open_instruct.errors import InputError

_ROWS_AT_ONCE = 1024
# A Parquet file may store a text of many rows once, so it does not show how many bytes its rows become in memory. But
# no cell is larger than its unpacked row group.
_BYTES_AT_ONCE = 2**29
_LONGEST_ROW = 2**23  # bytes


def _parsed(batch: Any, wanted: Sequence[int], first: int, file: str) -> Iterator[RawRow | BadRow]:
    has_dictionaries = "dictionary<" in str(batch.schema.types)  # repeated texts are stored once
    is_long = has_dictionaries or batch.nbytes > _LONGEST_ROW
    bad, values = partial(BadRow, file=file, line=wanted[0] + 1, kind="not_readable"), None
    too_long = f"the row has more than {_LONGEST_ROW >> 20} MiB, more than a model reads"
    if batch.num_rows == 1 and is_long and not has_dictionaries:
        yield bad(reason=too_long)
        return
    if batch.num_rows == 1 or not is_long:
        try:
            values = batch.take([index - first for index in wanted]).to_pylist()
        except Exception as error:  # such as text that is not UTF-8
            if batch.num_rows == 1:
                yield bad(reason=f"damaged: {one_line(error)}")
                return
    if values is None:  # one by one, to find the bad rows
        for index in wanted:
            yield from _parsed(batch.slice(index - first, 1), [index], index, file)
    elif is_long and len(str(values[0])) > _LONGEST_ROW:
        yield bad(reason=too_long)
    else:
        yield from (RawRow(file=file, line=index + 1, value=value) for index, value in zip(wanted, values, strict=True))


def _readable(batches: Iterable[Any], file: str) -> Iterator[Any]:
    try:
        yield from batches
    except Exception as error:  # pyarrow's kinds of errors have no common ancestor
        raise InputError(f"{file} is damaged: {one_line(error)}; fetch it again") from error


class ColumnFile:
    """A .parquet file, read batch by batch, or a .arrow file, mapped into memory."""

    def __init__(self, path: Path, name: str, flag: str) -> None:
        self.name = name
        kind, opened = ("a Parquet", _parquet) if path.suffix == ".parquet" else ("an Arrow", _arrow)
        try:
            self._num_rows, self._batches = opened(path)
        except Exception as error:
            raise InputError(f"{flag}: {name} is not {kind} file, or is damaged: {one_line(error)}") from error
        with path.open("rb") as file:
            self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        first = begin = 0
        for batch in _readable(self._batches(), self.name):
            end = bisect_left(indices, first + batch.num_rows)
            if begin < end:
                yield from _parsed(batch, indices[begin:end], first, self.name)
            if end == len(indices):
                return
            first, begin = first + batch.num_rows, end


Batches = Callable[[], Iterable[Any]]


def _parquet(path: Path) -> tuple[int, Batches]:
    """The number of rows of the file, and a reader of its record batches."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=True)

    def batches() -> Iterator[Any]:
        for group in range(file.metadata.num_row_groups):
            num_rows = _BYTES_AT_ONCE // max(1, file.metadata.row_group(group).total_byte_size)
            yield from file.iter_batches(batch_size=max(1, min(num_rows, _ROWS_AT_ONCE)), row_groups=[group])

    return file.metadata.num_rows, batches


def _arrow(path: Path) -> tuple[int, Batches]:
    """As `_parquet`, for Arrow's stream format, which datasets writes, or its random-access format."""
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    try:
        table = pyarrow.ipc.open_file(mapped).read_all()
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        table = pyarrow.ipc.open_stream(mapped).read_all()
    table.validate(full=True)  # reading past what is mapped would end the process
    return table.num_rows, partial(table.to_batches, max_chunksize=_ROWS_AT_ONCE)

"""Column files: .parquet and .arrow."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.rows import BadRow, RawRow, hash_of_file
from open_instruct.errors import InputError

_ROWS_AT_ONCE = 1024
# A Parquet file may store a text of many rows once, so it does not show how many bytes its rows become in memory. But
# no cell is larger than its unpacked row group.
_BYTES_AT_ONCE = 2**29
_LONGEST_ROW = 2**23  # bytes


class ColumnFile:
    """A .parquet file, read batch by batch, or a .arrow file, mapped into memory."""

    def __init__(self, path: Path, name: str, flag: str) -> None:
        self.name = name
        is_parquet = path.suffix == ".parquet"
        try:
            self._num_rows, self._batches = _parquet(path) if is_parquet else _arrow(path)
        except Exception as error:  # pyarrow's kinds of errors have no common ancestor
            kind = "a Parquet" if is_parquet else "an Arrow"
            raise InputError(f"{flag}: {name} is not {kind} file, or is damaged: {one_line(error)}") from error
        self.fingerprint = hash_of_file(path)

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        first = begin = 0
        for batch in _readable(self._batches(), self.name):
            end = bisect_left(indices, first + batch.num_rows)
            if begin < end:
                yield from _rows(batch, indices[begin:end], first, self.name)
            if end == len(indices):
                return
            first += batch.num_rows
            begin = end


def _readable(batches: Iterable[Any], file: str) -> Iterator[Any]:
    try:
        yield from batches
    except Exception as error:
        raise InputError(f"{file} is damaged: {one_line(error)}; fetch it again") from error


def _rows(batch: Any, wanted: Sequence[int], first: int, file: str) -> Iterator[RawRow | BadRow]:
    """The rows `wanted` of a batch that begins with row `first`; one by one where one may be bad, to find it."""
    if not (_has_dictionaries(batch) or batch.nbytes > _LONGEST_ROW):
        try:
            values = batch.take([index - first for index in wanted]).to_pylist()
        except Exception:
            pass  # such as text that is not UTF-8
        else:
            yield from (RawRow(file=file, line=row + 1, value=value) for row, value in zip(wanted, values, strict=True))
            return
    for row in wanted:
        yield _only_row(batch.slice(row - first, 1), file, row + 1)


def _only_row(batch: Any, file: str, line: int) -> RawRow | BadRow:
    """The row of a batch that has one."""
    reason = f"the row has more than {_LONGEST_ROW >> 20} MiB, more than a model reads"
    has_dictionaries = _has_dictionaries(batch)
    if has_dictionaries or batch.nbytes <= _LONGEST_ROW:
        try:
            (value,) = batch.to_pylist()
        except Exception as error:
            reason = f"damaged: {one_line(error)}"
        else:
            if not has_dictionaries or len(str(value)) <= _LONGEST_ROW:
                return RawRow(file=file, line=line, value=value)
    return BadRow(file=file, line=line, kind="not_readable", reason=reason)


def _has_dictionaries(batch: Any) -> bool:
    """Whether repeated texts are stored once, so that a batch does not show how long its rows are."""
    return "dictionary<" in str(batch.schema.types)


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

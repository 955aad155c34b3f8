"""Column files: .parquet and .arrow."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.rows import FileRows, MalformedRow
from open_instruct.errors import InputError

_ROWS_AT_ONCE = 1024
# A Parquet file may store a text of many rows once, so it does not show how many bytes its rows become in memory. But
# no cell is larger than its unpacked row group.
_BYTES_AT_ONCE = 2**29
_LONGEST_ROW = 2**23  # bytes

Batches = Callable[[], Iterable[Any]]


def column_file(path: Path, name: str, flag: str) -> FileRows:
    """The rows of a .parquet file, read batch by batch, or of a .arrow file, mapped into memory."""
    is_parquet = path.suffix == ".parquet"
    try:
        num_rows, batches = _parquet(path) if is_parquet else _arrow(path)
    except Exception as error:  # pyarrow's kinds of errors have no common ancestor
        kind = "a Parquet" if is_parquet else "an Arrow"
        raise InputError(f"{flag}: {name} is not {kind} file, or is damaged: {one_line(error)}") from error
    return FileRows(path, name, read=partial(_rows, batches, name), parse=_value_of, num_rows=num_rows)


def _rows(batches: Batches, file: str) -> Iterator[tuple[int, Any]]:
    """Each row with its number."""
    try:
        yield from enumerate(chain.from_iterable(map(_split, batches())), start=1)
    except Exception as error:
        raise InputError(f"{file} is damaged: {one_line(error)}; fetch it again") from error


def _split(batch: Any) -> list[Any]:
    """The rows of a batch; where one may be bad or too long, a batch of each."""
    if not _has_dictionaries(batch) and batch.nbytes <= _LONGEST_ROW:
        with suppress(Exception):  # such as of text that is not UTF-8
            return cast(list[Any], batch.to_pylist())
    return [batch.slice(row, 1) for row in range(batch.num_rows)]


def _has_dictionaries(batch: Any) -> bool:
    """Whether repeated texts are stored once, so that a batch does not show how long its rows are."""
    return "dictionary<" in str(batch.schema.types)


def _value_of(batch: Any) -> dict[str, Any]:
    """The row of a batch that has one, or the row itself."""
    if isinstance(batch, dict):
        return batch
    too_long = f"the row has more than {_LONGEST_ROW >> 20} MiB, more than a model reads"
    if not _has_dictionaries(batch) and batch.nbytes > _LONGEST_ROW:
        raise MalformedRow("not_readable", too_long)
    try:
        (value,) = batch.to_pylist()
    except Exception as error:  # such as text that is not UTF-8
        raise MalformedRow("not_readable", f"damaged: {one_line(error)}") from error
    if len(str(value)) > _LONGEST_ROW:
        raise MalformedRow("not_readable", too_long)
    return value


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

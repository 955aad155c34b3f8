"""Refuse Parquet files that unfold to far more than files of their size do.

A constant column of five billion numbers is a kilobyte on disk, and 40 GB in memory. A file says
how many values it has; how long its texts are is found by reading them a few rows at a time.
"""

from pathlib import Path
from typing import Any

BYTES_OF_A_VALUE = 8  # of a number, or of where a text begins
MAX_TIMES_ITS_SIZE = 1000
ALWAYS_ALLOWED_BYTES = 2**30  # any file may unfold to so much
BATCH_BYTES = 2**28


def check_declared_size(metadata: Any, num_file_bytes: int) -> None:
    """Refuse a Parquet file by what its own metadata say that it has.

    Raises:
        ValueError: that is far more than files of its size have.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    num_bytes = 0
    for group in groups:
        num_values = sum(group.column(number).num_values for number in range(group.num_columns))
        num_bytes += max(group.total_byte_size, BYTES_OF_A_VALUE * num_values)
    _check_size(num_bytes, num_file_bytes)


def check_unfolding(path: Path) -> None:
    """Refuse a Parquet file that would fill the memory if it were read as a whole.

    Raises:
        ValueError: it unfolds to far more than files of its size do.
        pyarrow.ArrowException: it is damaged.
    """
    from pyarrow.parquet import ParquetFile

    num_file_bytes = path.stat().st_size
    with ParquetFile(path, memory_map=True) as file:
        check_declared_size(file.metadata, num_file_bytes)
        num_bytes = 0
        for number in range(file.metadata.num_row_groups):
            # Where a text is stored once for many rows, each row may be as long as the whole group.
            max_row_bytes = max(1, file.metadata.row_group(number).total_byte_size)
            num_rows = max(1, BATCH_BYTES // max_row_bytes)
            for batch in file.iter_batches(batch_size=num_rows, row_groups=[number]):
                num_bytes += batch.nbytes
                _check_size(num_bytes, num_file_bytes)


def _check_size(num_bytes: int, num_file_bytes: int) -> None:
    if num_bytes > max(ALWAYS_ALLOWED_BYTES, MAX_TIMES_ITS_SIZE * num_file_bytes):
        raise ValueError(f"it has {num_file_bytes:,} bytes, and unfolds to {num_bytes:,} or more")

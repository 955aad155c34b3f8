"""A source whose columns are called otherwise than the rows of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from open_instruct.data.files.rows import BadRow, RawRow, RowSource, reach


class Renamed:
    """A source with words of `--columns`, what a row should have and the column it has it in: `messages=dialogue`."""

    def __init__(self, source: RowSource, columns: Sequence[str]) -> None:
        self.name, self.fingerprint = source.name, source.fingerprint
        self._source = source
        self._columns = dict(word.split("=", 1) for word in columns)
        self._unseen = set(self._columns.values())

    def __len__(self) -> int:
        return len(self._source)

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        for row in self._source.rows(indices):
            yield replace(row, value=self._renamed(row.value)) if isinstance(row, RawRow) else row

    def warnings(self) -> Iterator[str]:
        """Of columns that no row so far had."""
        for ours, theirs in self._columns.items():
            if theirs in self._unseen:
                yield f"--columns {ours}={theirs}: no row of {self.name} has a column {theirs!r}"

    def _renamed(self, value: dict[str, Any]) -> dict[str, Any]:
        if not self._columns:
            return value
        found = {ours: item for ours, theirs in self._columns.items() if (item := reach(value, theirs)) is not None}
        self._unseen -= {self._columns[ours] for ours in found}
        moved = {theirs if theirs in value else theirs.partition(".")[0] for theirs in self._columns.values()}
        return {key: item for key, item in value.items() if key not in moved} | found

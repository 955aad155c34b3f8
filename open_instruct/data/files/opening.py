"""From a name to its rows, whatever kind of file, folder or data set it is."""

from __future__ import annotations

import hashlib
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from open_instruct.data.files.columnar import ColumnFile
from open_instruct.data.files.json_rows import json_lines
from open_instruct.data.files.lists import is_json_lines, json_list
from open_instruct.data.files.named import NamedRows
from open_instruct.data.files.names import SUFFIXES, refuse_missing_file, suffix_of
from open_instruct.data.files.rows import BadRow, RawRow, RowSource, reach
from open_instruct.data.files.tables import TextTable
from open_instruct.errors import InputError

# Files that mark a folder as one that the datasets library or the hub wrote: the library opens it.
_DATASET_MARKERS = ("state.json", "dataset_dict.json", "README.md")
_SPLITS = {
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev"),
    "train": ("train", "training"),
}


def open_rows(name: str, split: str = "train", *, flag: str = "--mixer_list") -> RowSource:
    """The rows of a local file, of a folder of such files, or of a data set by name.

    Raises:
        InputError: there is no such file, folder, data set or split; it cannot be read; or the package
            that reads it is not installed.
    """
    path = Path(name).expanduser()
    if path.exists() and not path.is_dir():
        if split != "train":
            raise InputError(f"{flag}_splits: {name} is a file, its only split is 'train', not {split!r}.")
        return _open_file(path, name, flag)
    if path.is_dir() and not any((path / marker).is_file() for marker in _DATASET_MARKERS):
        return _Folder(path, name, split, flag)
    refuse_missing_file(name, flag=flag)
    return NamedRows(name, split, flag=flag)


def _open_file(path: Path, name: str, flag: str) -> RowSource:
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise InputError(f"{flag}: {name}: cannot read '{suffix}' files; give one of {', '.join(SUFFIXES)}.")
    try:
        if suffix.startswith(".jsonl") or (suffix == ".json" and is_json_lines(path)):
            return json_lines(path, name)
        if suffix == ".json":
            return json_list(path, name, flag)
        return ColumnFile(path, name, flag) if suffix in (".parquet", ".arrow") else TextTable(path, name, flag)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{flag}: {name} cannot be read: {error}") from error


class _Folder:
    """The files of a folder, one after the other in the order of their names.

    Files that have a split in their name are of that split, all others of 'train'.
    """

    def __init__(self, path: Path, name: str, split: str, flag: str) -> None:
        self.name = name if split == "train" else f"{name}[{split}]"
        files = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        readable = [file for file in files if suffix_of(file) in SUFFIXES]
        if not readable:
            there = f"it has {', '.join(file.name for file in files[:3])}" if files else "it is empty"
            raise InputError(f"{flag}: {name}: no file in this folder can be read ({there}); put {SUFFIXES[0]} there.")
        chosen = [file for file in readable if _split_of(file.relative_to(path)) == split]
        if not chosen:
            splits = sorted({_split_of(file.relative_to(path)) for file in readable})
            raise InputError(f"{flag}_splits: {name} has no split {split!r}; it has {', '.join(splits)}.")
        self._sources = [_open_file(file, str(Path(name) / file.relative_to(path)), flag) for file in chosen]
        self._starts = [0, *accumulate(map(len, self._sources))]
        self.fingerprint = hashlib.sha256(" ".join(each.fingerprint for each in self._sources).encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        wanted: dict[int, list[int]] = {}
        for index in indices:
            source = bisect_right(self._starts, index) - 1
            wanted.setdefault(source, []).append(index - self._starts[source])
        for source, own in wanted.items():
            yield from self._sources[source].rows(own)


def _split_of(file: Path) -> str:
    words = set(re.split(r"[^a-z]+", str(file).lower()))
    return next((split for split, names in _SPLITS.items() if words & set(names)), "train")


class Renamed:
    """A source with its columns renamed by the words of `--columns`, `OURS=THEIRS`: `messages=dialogue`."""

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
        """A warning for each column that no row so far had."""
        for ours, theirs in self._columns.items():
            if theirs in self._unseen:
                yield f"--columns {ours}={theirs}: no row of {self.name} has a column {theirs!r}"

    def _renamed(self, value: dict[str, Any]) -> dict[str, Any]:
        if not self._columns:
            return value
        renamed = {ours: item for ours, theirs in self._columns.items() if (item := reach(value, theirs)) is not None}
        self._unseen -= {self._columns[ours] for ours in renamed}
        moved = {theirs if theirs in value else theirs.partition(".")[0] for theirs in self._columns.values()}
        return {key: item for key, item in value.items() if key not in moved} | renamed

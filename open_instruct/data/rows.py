"""Raw rows and where they came from: local files, or data sets by name.

A source knows how many rows it has and what they hash to before any row is parsed, so that the mixer
and the cache decide first. Local .jsonl is read by Python alone, .parquet and .arrow by pyarrow, names
and folders by datasets.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from open_instruct.data.foreign_json import kind_of, one_line, unique_keys
from open_instruct.errors import InputError

FILE_SUFFIXES = (".jsonl", ".parquet", ".arrow")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 1024


class MalformedRow(ValueError):
    """One row cannot be used. `kind` is the word it is counted under, `reason` a sentence for its author."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One parsed row. `line` counts from 1: the line of a .jsonl file, the row of anything else.

    Example: `RawRow(file="rows.jsonl", line=3, value={"chosen": [...], "rejected": [...]})`.
    """

    file: str
    line: int
    value: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """One row that cannot be used, and why.

    Example: `BadRow(file="rows.jsonl", line=3, kind="not_json", reason="not JSON: ...")`.
    """

    file: str
    line: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


class RowSource(Protocol):
    """Rows of one file or one split."""

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        """One item for each of `indices`, which must be ascending and distinct, in that order."""
        ...


def open_rows(name: str, split: str = "train", *, flag: str = "--mixer_list") -> RowSource:
    """The rows of a local .jsonl, .parquet or .arrow file, of a data set folder, or of a data set by name.

    Raises:
        InputError: there is no such file, folder, data set or split; it cannot be read; or the package
            that reads it is not installed.
    """
    path = Path(name).expanduser()
    if path.exists() and not path.is_dir():
        if split != "train":
            raise InputError(f"{flag}_splits: {name} is a file, its only split is 'train', not {split!r}.")
        if path.suffix not in FILE_SUFFIXES:
            known = ", ".join(FILE_SUFFIXES)
            raise InputError(f"{flag}: {name}: cannot read '{path.suffix}' files; give one of {known}.")
        try:
            return _JsonLines(path, name) if path.suffix == ".jsonl" else _ColumnFile(path, name, flag)
        except OSError as error:
            raise InputError(f"{flag}: {name} cannot be read: {error}") from error
    is_path = path.suffix in FILE_SUFFIXES or name.startswith((".", "/", "~")) or len(path.parts) > 2
    if is_path and not path.is_dir():
        raise InputError(f"{flag}: {name}: no such file.{near_files(path)}")
    return _NamedRows(name, split, flag=flag)


def near_files(path: Path) -> str:
    """The files whose names are near that of a missing one, as a sentence with a space before it."""
    if not path.parent.is_dir():
        return f" There is no folder {path.parent} either."
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


class _JsonLines:
    """A .jsonl file: one pass finds where lines start and what they hash to, rows are read by seeking."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._places: list[tuple[int, int]] = []  # (byte offset, line number) of every line that is not blank
        digest = hashlib.sha256()
        position = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    self._places.append((position, number))
                position += len(line)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        with self._path.open("rb") as file:
            for index in indices:
                position, number = self._places[index]
                file.seek(position)
                line = file.readline()
                try:
                    value = parse_json_object(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line)
                except MalformedRow as error:
                    yield BadRow(file=self.name, line=number, kind=error.kind, reason=error.reason)
                else:
                    yield RawRow(file=self.name, line=number, value=value)


def parse_json_object(line: bytes) -> dict[str, Any]:
    """The object that one line of a .jsonl file holds.

    Raises:
        MalformedRow: not UTF-8, not JSON, or JSON of another kind.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedRow(
            "not_utf8", f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        ) from error
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise MalformedRow("not_json", f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a key twice; an integer of thousands of digits; brackets too deep
        raise MalformedRow("not_json", f"not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise MalformedRow("not_object", f"the row is a JSON {kind_of(value).split()[-1]}, not an object")
    return value


def _parsed(batch: Any, wanted: Sequence[int], first: int, file: str) -> Iterator[RawRow | BadRow]:
    try:
        values = batch.take([index - first for index in wanted]).to_pylist()
    except Exception as error:  # such as text that is not UTF-8: then one by one, to find the rows
        if len(wanted) > 1:
            for index in wanted:
                yield from _parsed(batch, [index], first, file)
        else:
            yield BadRow(file=file, line=wanted[0] + 1, kind="not_readable", reason=f"damaged: {one_line(error)}")
        return
    yield from (RawRow(file=file, line=index + 1, value=value) for index, value in zip(wanted, values, strict=True))


def _readable(batches: Iterable[Any], file: str) -> Iterator[Any]:
    try:
        yield from batches
    except Exception as error:  # pyarrow's kinds of errors have no common ancestor
        raise InputError(f"{file} is damaged: {one_line(error)}; fetch it again") from error


class _ColumnFile:
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
    """How many rows the file has, and what gives its record batches."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=True)
    return file.metadata.num_rows, partial(file.iter_batches, batch_size=_ROWS_AT_ONCE)


def _arrow(path: Path) -> tuple[int, Batches]:
    """As `_parquet`, of the stream form that datasets writes, or of the random-access form."""
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    try:
        table = pyarrow.ipc.open_file(mapped).read_all()
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        table = pyarrow.ipc.open_stream(mapped).read_all()
    table.validate(full=True)  # reading past what is mapped would end the process
    return table.num_rows, partial(table.to_batches, max_chunksize=_ROWS_AT_ONCE)


class _NamedRows:
    """One split of what the datasets library finds under a name, or under a folder (`save_to_disk` or plain files)."""

    def __init__(self, name: str, split: str, *, flag: str) -> None:
        import datasets

        self.name = f"{name}[{split}]"
        path = Path(name).expanduser()
        try:
            if any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
                found = datasets.load_from_disk(str(path))
                if isinstance(found, datasets.DatasetDict):
                    if split not in found:
                        raise InputError(
                            f"{flag}_splits: {name} has no split {split!r}; it has {', '.join(sorted(found))}."
                        )
                    found = found[split]
            else:
                found = datasets.load_dataset(str(path) if path.is_dir() else name, split=split)
        except InputError:
            raise
        except Exception as error:  # the library raises many kinds, of its own and of its downloads
            where = "the folder" if path.is_dir() else "there is no such file, and as a data set's name"
            near = near_files(path) if path.parent.is_dir() and not path.is_dir() else ""
            raise InputError(
                f"{flag}: {name}: {where} cannot be loaded (split {split!r}): {type(error).__name__}: {error}{near}"
            ) from error
        self._dataset = found.with_format(None)
        self.fingerprint = str(found._fingerprint)

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        for first in range(0, len(indices), _ROWS_AT_ONCE):
            wanted = [int(index) for index in indices[first : first + _ROWS_AT_ONCE]]
            for index, value in zip(wanted, self._dataset.select(wanted), strict=True):
                yield RawRow(file=self.name, line=index + 1, value=value)

"""Rows of JSON files: JSON Lines, packed or not, and lists. Memory holds three numbers a row."""

from __future__ import annotations

import gzip
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from open_instruct.data.files.rows import BadRow, MalformedRow, RawRow, parse_json_object

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonRows:
    """Rows at known byte offsets of a file: read by seeking, parsed one by one.

    Seeking in a .gz unpacks all bytes between, so rows in ascending order cost one more pass.
    """

    def __init__(self, path: Path, name: str, *, fingerprint: str, places: array[int]) -> None:
        """`places` holds three numbers a row: where it starts, where it stops, and its number for messages."""
        self.name = name
        self.fingerprint = fingerprint
        self._path = path
        self._places = places

    def __len__(self) -> int:
        return len(self._places) // 3

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        with unpacked(self._path) as file:
            for index in indices:
                start, stop, number = self._places[3 * index : 3 * index + 3]
                file.seek(start)
                try:
                    value = parse_json_object(file.read(stop - start).removeprefix(_BYTE_ORDER_MARK))
                except MalformedRow as error:
                    yield error.at(self.name, number)
                else:
                    yield RawRow(file=self.name, line=number, value=value)


def json_lines(path: Path, name: str) -> JsonRows:
    """The lines of a file that are not blank; one pass finds where they start and hashes them."""
    places = array("q")
    digest = hashlib.sha256()
    position = 0
    with unpacked(path) as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if line.strip():
                places.extend((position, position + len(line), number))
            position += len(line)
    return JsonRows(path, name, fingerprint=digest.hexdigest(), places=places)


def unpacked(path: Path) -> IO[bytes]:
    """The file opened for reading; a .gz is unpacked."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    file: IO[bytes] = opener(path, "rb")
    return file

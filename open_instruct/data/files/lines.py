"""JSON Lines, packed or not."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from open_instruct.data.rows import BadRow, MalformedRow, RawRow, parse_json_object

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """One pass finds where lines start and what they hash to, rows are read by seeking.

    Within a .gz that means to unpack what lies between, so rows in ascending order cost one more pass.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._places: list[tuple[int, int]] = []  # (byte offset, line number) of every line that is not blank
        digest = hashlib.sha256()
        position = 0
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    self._places.append((position, number))
                position += len(line)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow | BadRow]:
        with self._open() as file:
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

    def _open(self) -> IO[bytes]:
        opened: Any = gzip.open if self._path.suffix.lower() == ".gz" else open
        file: IO[bytes] = opened(self._path, "rb")
        return file

"""Keep the tokens of rows, end to end, while a data set is built, and make flat arrays of them.

Tokens in files that are mapped stay there. They are addressed as if these files lay end to end, and
the tokens that are kept here behind them.

Legend for array names: N rows of the data set, T tokens, E edges between pieces, C bytes.
"""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from open_instruct.data.files.token_files import JoinedArrays

ROWS_PER_CHUNK = 512  # which are read, tokenised and stored at a time
# In place of the number of a stored row: it is not kept, or is on the other side of `--eval_split`.
NOT_KEPT = -1
ON_OTHER_SIDE = -2


class StoredRow(NamedTuple):
    """A row, whose tokens lie in `RowStore.token_ids`, or in a mapped file."""

    lengths: tuple[int, ...]  # the number of tokens of each piece
    details: bytes = b""
    mapped_start: int | None = None  # among the tokens of all mapped files


class RowStore:
    """The rows that are kept, each once.

    A row is a run of pieces. In a row with one document, context and learned pieces alternate. In a
    row with several documents the first piece is their common prompt, and each further piece is one
    reply to it.

    Args:
        documents_per_row: 1, or the number of replies to a common prompt.
        reads_ends: whether the model is read only at the end of each learned piece.
    """

    def __init__(self, *, documents_per_row: int, reads_ends: bool) -> None:
        self.documents_per_row = documents_per_row
        self.reads_ends = reads_ends
        self.token_ids = array("i")  # of all rows that are not mapped, end to end
        self.mapped = JoinedArrays([])
        self.rows: list[StoredRow] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def learned_stride(self) -> int:
        """The step between learned pieces, of which piece 1 is the first.

        It is 1 behind a common prompt, and 2 where context and replies alternate.
        """
        return 1 if self.documents_per_row > 1 else 2

    def add(self, pieces: Sequence[Sequence[int]], details: bytes) -> None:
        """Put a row behind the others."""
        self.token_ids.extend(chain.from_iterable(pieces))
        self.rows.append(StoredRow(lengths=tuple(map(len, pieces)), details=details))

    def add_mapped(self, start: int, lengths: Sequence[int]) -> None:
        """Put a row behind the others whose tokens begin at `start` of the mapped ones."""
        self.rows.append(StoredRow(lengths=tuple(lengths), mapped_start=start))

    def pop_rows(self, first: int) -> list[tuple[list["array[int]"], bytes]]:
        """Remove the rows from number `first` on; returns the pieces and the details of each."""
        rows = self.rows[first:]
        start = len(self.token_ids) - sum(sum(row.lengths) for row in rows)
        row_contents = []
        piece_start = start
        for row in rows:
            pieces = []
            for length in row.lengths:
                pieces.append(self.token_ids[piece_start : piece_start + length])
                piece_start += length
            row_contents.append((pieces, row.details))
        del self.token_ids[start:]
        del self.rows[first:]
        return row_contents

    def build_arrays(self, order_N: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a `TokenDataset` that has the rows in the order `order_N`."""
        edges = array("q")
        bounds = array("q")
        num_tokens = array("q")
        num_labels = array("q")
        details = bytearray()
        keys = bytearray()
        next_start = 0
        for row in self.rows:
            lengths = row.lengths
            length = sum(lengths)
            start = row.mapped_start
            if start is None:
                start = len(self.mapped) + next_start
                token_bytes = self.token_ids[next_start : next_start + length].tobytes()
                next_start += length
            else:
                token_bytes = self.mapped[start : start + length].astype(np.int32).tobytes()
            content = array("i", lengths).tobytes() + token_bytes + row.details
            keys += hashlib.sha256(content).digest()
            bounds.extend((len(edges), len(edges) + len(lengths) + 1))
            bounds.extend((len(details), len(details) + len(row.details)))
            edges.extend(accumulate(lengths, initial=start))
            details += row.details
            num_tokens.append(length + (self.documents_per_row - 1) * lengths[0])
            learned_lengths = lengths[1 :: self.learned_stride]
            num_labels.append(len(learned_lengths) if self.reads_ends else sum(learned_lengths))
        return {
            "token_ids_T": np.frombuffer(self.token_ids, dtype=np.int32),
            "edges_E": np.frombuffer(edges, dtype=np.int64),
            "details_C": np.frombuffer(bytes(details), dtype=np.uint8),
            "bounds_N4": np.frombuffer(bounds, dtype=np.int64).reshape(-1, 4)[order_N],
            "num_tokens": np.frombuffer(num_tokens, dtype=np.int64)[order_N],
            "num_label_tokens": np.frombuffer(num_labels, dtype=np.int64)[order_N],
            "keys_N32": np.frombuffer(bytes(keys), dtype=np.uint8).reshape(-1, 32)[order_N],
        }

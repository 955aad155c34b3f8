"""What each token of a packed row may attend to, where several responses share one copy of their prompt.

Legend: T tokens of the row, S segments, K keys once the shared ones are repeated for every segment that sees them.

A row is a list of segments, end to end. A segment attends causally to itself. One with a *prefix length* p > 0 attends
besides to all p tokens of its root, the last segment before it that has none, and its own first token stands at
position p, right after them::

    segment    root A      a1     a2       root B
    tokens     0 1 2 3     4 5    4 5 6    0 1 2
    prefix     0           4      4        0

An ordinary document is a root of which nobody is a branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch


class Segment(NamedTuple):
    """Where a segment starts in the row and its tokens, and the same of the prefix that it attends to."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int

    @property
    def is_first_branch(self) -> bool:
        """Whether its prefix lies just before it, so that both together are what an ordinary document is."""
        return self.prefix_length > 0 and self.prefix_start + self.prefix_length == self.start


class Segments(NamedTuple):
    """The segments of one row, as its blocks are given them.

    Attributes:
        lengths, prefix_lengths: of each segment, S numbers; for attention that is computed segment by segment.
        positions_T: int64, the logical position of every token, for RoPE; where the row is split over ranks, of this
            rank's tokens alone.
        cu_queries, cu_keys: int32 (S + 1,), where each segment's queries and gathered keys start, then their number.
        key_index_K: int64, the row's token that each gathered key is.
        max_queries, max_keys: of any segment.
    """

    lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    positions_T: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    key_index_K: torch.Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, lengths: tuple[int, ...], prefix_lengths: tuple[int, ...], *, device: torch.device) -> Segments:
        """From the lengths of the segments and of what they see before themselves.

        Example: lengths (4, 2, 3, 3) and prefix lengths (0, 4, 4, 0), the row above::

            positions_T  0 1 2 3  4 5  4 5 6  0 1 2
            cu_keys      0 4 10 17 20
        """
        segments = tuple(segments_of(lengths, prefix_lengths))
        positions, key_index = [], []
        for start, length, prefix_start, prefix_length in segments:
            positions.append(torch.arange(prefix_length, prefix_length + length))
            key_index.append(torch.arange(prefix_start, prefix_start + prefix_length))
            key_index.append(torch.arange(start, start + length))
        num_keys = [segment.prefix_length + segment.length for segment in segments]
        return cls(
            lengths=lengths,
            prefix_lengths=prefix_lengths,
            positions_T=torch.cat(positions).to(device),
            cu_queries=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            cu_keys=torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32, device=device),
            key_index_K=torch.cat(key_index).to(device),
            max_queries=max(lengths),
            max_keys=max(num_keys),
        )


def segments_of(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...]) -> Iterator[Segment]:
    """Every segment of the row; a prefix must be the whole of its root."""
    start, root = 0, Segment(0, 0, 0, 0)
    for length, prefix_length in zip(lengths, prefix_lengths, strict=True):
        assert prefix_length in (0, root.length), f"a prefix of {prefix_length} tokens after a root of {root.length}"
        if prefix_length:
            yield Segment(start, length, root.start, prefix_length)
        else:
            root = Segment(start, length, start, 0)
            yield root
        start += length

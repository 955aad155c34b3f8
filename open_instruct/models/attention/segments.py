"""Segments: what each token of a packed row attends to where documents share what they begin with.

Legend: T tokens of the row, H query heads, G key-value heads, D features of a head, S segments, K keys with shared
ones repeated for every segment that sees them.

A row is a list of segments, end to end. A segment attends causally to itself, and before that to its *prefix*: the
first p tokens of what the segment before it sees, itself included. Its own first token stands at position p::

    segment    a                b        c      d
    tokens     0 1 2 3 4 5      4 5 6    6 7    0 1 2
    prefix     0                4        6      0

Here b begins like a, and goes on from a's first 4 tokens; c begins like b, and sees those 4 and the first 2 of b. So
every tree of documents that share beginnings of any depth is a row, walked depth first, and its keys lie in ranges: of
c's prefix, 4 tokens of a and 2 of b. An ordinary document is a segment without a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch


class QKV(NamedTuple):
    """Queries (..., H, D), keys and values (..., G, D); groups of query heads share a key-value head."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QKV:
        return QKV(change(self.query), change(self.key), change(self.value))

    @property
    def shares_heads(self) -> bool:
        return self.query.shape[-2] != self.key.shape[-2]


class Range(NamedTuple):
    """Neighbouring tokens of the row."""

    start: int
    length: int


class Segment(NamedTuple):
    """The start and length of a segment in the row, and the ranges of its prefix, in logical order."""

    start: int
    length: int
    prefix: tuple[Range, ...]

    @property
    def prefix_length(self) -> int:
        return sum(part.length for part in self.prefix)

    def last_of_prefix(self, count: int) -> tuple[Range, ...]:
        """The ranges of its last `count` tokens."""
        return _tokens_of(self.prefix, self.prefix_length - count, self.prefix_length)


class Segments(NamedTuple):
    """The segments of one row, as the model's blocks receive them.

    Attributes:
        lengths, prefix_lengths: of each segment, S numbers; for attention that is computed segment by segment.
        positions_T: int64, the logical position of every token, for RoPE; where the row is split over ranks, of this
            rank's tokens alone.
        cu_queries, cu_keys: int32 (S + 1,), where each segment's queries and gathered keys start, then their number.
            A prefix's keys come before a segment's own.
        key_index_K: int64, the row's token that each gathered key is; None where that is the row, as nobody shares.
        max_queries, max_keys: of any segment.
    """

    lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    positions_T: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    key_index_K: torch.Tensor | None
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, lengths: tuple[int, ...], prefix_lengths: tuple[int, ...], *, device: torch.device) -> Segments:
        """From the lengths of the segments and of their prefixes.

        Example: lengths (6, 3, 2, 3) and prefix lengths (0, 4, 6, 0), the row above::

            positions_T  0 1 2 3 4 5   4 5 6           6 7                 0 1 2
            key_index_K  0 1 2 3 4 5   0 1 2 3 6 7 8   0 1 2 3 6 7 9 10    11 12 13
            cu_queries   0             6               9                   11         14
            cu_keys      0             6               13                  21         24
        """
        segments = segments_of(lengths, prefix_lengths)
        positions = [torch.arange(each.prefix_length, each.prefix_length + each.length) for each in segments]
        seen = [part for each in segments for part in (*each.prefix, Range(each.start, each.length))]
        num_keys = [each.prefix_length + each.length for each in segments]
        return cls(
            lengths=lengths,
            prefix_lengths=prefix_lengths,
            positions_T=torch.cat(positions).to(device),
            cu_queries=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            cu_keys=torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32, device=device),
            key_index_K=torch.cat([torch.arange(start, start + length) for start, length in seen]).to(device)
            if any(prefix_lengths)
            else None,
            max_queries=max(lengths),
            max_keys=max(num_keys),
        )


def segments_of(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...]) -> tuple[Segment, ...]:
    """Every segment of the row, with the ranges that its prefix lies in."""
    segments: list[Segment] = []
    seen: tuple[Range, ...] = ()  # by the last token of the segment before
    start = 0
    for length, prefix_length in zip(lengths, prefix_lengths, strict=True):
        prefix = _tokens_of(seen, 0, prefix_length)
        segments.append(Segment(start, length, prefix))
        seen = (*prefix, Range(start, length))
        start += length
    return tuple(segments)


def _tokens_of(ranges: tuple[Range, ...], first: int, stop: int) -> tuple[Range, ...]:
    """The ranges of the tokens from `first` to before `stop`, counted through `ranges`."""
    cut: list[Range] = []
    num_before = 0
    for start, length in ranges:
        begin, end = max(first - num_before, 0), min(stop - num_before, length)
        if begin < end:
            cut.append(Range(start + begin, end - begin))
        num_before += length
    assert num_before >= stop, f"a prefix of {stop} tokens of a segment that sees {num_before}"
    return tuple(cut)

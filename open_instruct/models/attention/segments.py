"""Segments: what each token of a packed row attends to where responses share a prompt.

Legend: T tokens of the row, H query heads, G key-value heads, D features of a head, S segments, N documents, K keys
with shared ones repeated for every document that sees them.

A row is a list of segments, end to end. A segment attends causally to itself. One with a *prefix length* p > 0 attends
besides to all p tokens of its root, the last segment before it that has none, and its own first token stands at
position p, right after them::

    segment    root A      a1     a2       root B
    tokens     0 1 2 3     4 5    4 5 6    0 1 2
    prefix     0           4      4        0

An ordinary document is a root without branches. A root and its first branch lie together like an ordinary document, so
attention takes them as one, and of b branches only b - 1 see keys that lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Segment(NamedTuple):
    """The start and length of a segment in the row, and those of the prefix that it attends to."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int

    @property
    def is_first_branch(self) -> bool:
        """Whether the prefix lies just before the segment, so that both together form an ordinary document."""
        return self.prefix_length > 0 and self.prefix_start + self.prefix_length == self.start


class Segments(NamedTuple):
    """The segments of one row, as the model's blocks receive them.

    Attributes:
        lengths, prefix_lengths: of each segment, S numbers; for attention that is computed segment by segment.
        positions_T: int64, the logical position of every token, for RoPE; where the row is split over ranks, of this
            rank's tokens alone.
        cu_queries, cu_keys: int32 (N + 1,), where each document's queries and gathered keys start, then their number.
            A branch has its root's keys before its own.
        key_index_K: int64, the row's token that each gathered key is; None where that is the row, as nobody shares.
        max_queries, max_keys: of any document.
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
        """From the lengths of the segments and of what they see before themselves.

        Example: lengths (4, 2, 3, 3) and prefix lengths (0, 4, 4, 0), the row above::

            positions_T  0 1 2 3 4 5   4 5 6           0 1 2
            key_index_K  0 1 2 3 4 5   0 1 2 3 6 7 8   9 10 11
            cu_queries   0             6               9         12
            cu_keys      0             6               13        16
        """
        documents = documents_of(lengths, prefix_lengths)
        positions = [torch.arange(each.prefix_length, each.prefix_length + each.length) for each in documents]
        key_spans = [span for each in documents for span in ((each.prefix_start, each.prefix_length), each[:2])]
        key_index = [torch.arange(start, start + length) for start, length in key_spans]
        num_queries = [each.length for each in documents]
        num_keys = [each.prefix_length + each.length for each in documents]
        return cls(
            lengths=lengths,
            prefix_lengths=prefix_lengths,
            positions_T=torch.cat(positions).to(device),
            cu_queries=torch.tensor([0, *accumulate(num_queries)], dtype=torch.int32, device=device),
            cu_keys=torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32, device=device),
            key_index_K=torch.cat(key_index).to(device) if num_keys != num_queries else None,
            max_queries=max(num_queries),
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


def documents_of(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...]) -> tuple[Segment, ...]:
    """The segments, each root and its first branch as one.

    Example: lengths (4, 2, 3, 3) and prefix lengths (0, 4, 4, 0) give lengths 6, 3, 3 and prefix lengths 0, 4, 0.
    """
    documents: list[Segment] = []
    for segment in segments_of(lengths, prefix_lengths):
        if segment.is_first_branch:
            documents[-1] = documents[-1]._replace(length=documents[-1].length + segment.length)
        else:
            documents.append(segment)
    return tuple(documents)

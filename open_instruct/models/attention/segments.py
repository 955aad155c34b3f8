"""Segments of packed rows: what each token attends to where documents share a beginning.

Legend: T tokens of the row, H query heads, G key-value heads, D features of a head, S segments, K
keys with shared ones repeated for every segment that sees them.

A row is a list of segments, end to end. A segment attends causally to itself, and before that to
its *prefix*: the first p tokens of what the segment before it sees, itself included. Its own first
token stands at position p::

    segment    a                b        c      d
    tokens     0 1 2 3 4 5      4 5 6    6 7    0 1 2
    prefix     0                4        6      0

Here b begins like a, and goes on from a's first 4 tokens; c begins like b, and sees those 4 and the
first 2 of b. So every tree of documents that share beginnings of any depth is a row, walked depth
first. An ordinary document is a segment without a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch


class QKV(NamedTuple):
    """Queries (..., H, D), keys and values (..., G, D).

    Groups of query heads share a key-value head.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QKV:
        return QKV(change(self.query), change(self.key), change(self.value))

    @property
    def shares_heads(self) -> bool:
        return self.query.shape[-2] != self.key.shape[-2]


class Segments(NamedTuple):
    """The segments of one row, as the model's blocks receive them.

    Attributes:
        lengths, prefix_lengths: of each segment, S numbers; for attention that is computed segment
            by segment.
        positions_T: int64, the logical position of every token, for RoPE; where the row is split
            over ranks, of this rank's tokens alone.
        cu_queries, cu_keys: int32 (S + 1,), where each segment's queries and gathered keys start,
            then their number. A prefix's keys come before a segment's own.
        key_index_K: int64, the row's token that each gathered key is; None where that is the row,
            as nobody shares.
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
    def from_lengths(
        cls, lengths: tuple[int, ...], prefix_lengths: tuple[int, ...], *, device: torch.device
    ) -> Segments:
        """From the lengths of the segments and of their prefixes.

        Example: lengths (6, 3, 2, 3) and prefix lengths (0, 4, 6, 0), the row above::

            positions_T  0 1 2 3 4 5   4 5 6           6 7                 0 1 2
            key_index_K  0 1 2 3 4 5   0 1 2 3 6 7 8   0 1 2 3 6 7 9 10    11 12 13
            cu_queries   0             6               9                   11         14
            cu_keys      0             6               13                  21         24
        """
        positions: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        seen = torch.arange(0)  # by the last token of the segment before
        stop = 0
        for length, prefix_length in zip(lengths, prefix_lengths, strict=True):
            start = stop
            stop = start + length
            assert prefix_length <= len(seen), (
                f"a prefix of {prefix_length} tokens of a segment that sees {len(seen)}"
            )
            seen = torch.cat([seen[:prefix_length], torch.arange(start, stop)])
            positions.append(torch.arange(prefix_length, len(seen)))
            keys.append(seen)
        num_keys = [len(each) for each in keys]
        return cls(
            lengths=lengths,
            prefix_lengths=prefix_lengths,
            positions_T=torch.cat(positions).to(device),
            cu_queries=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            cu_keys=torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32, device=device),
            key_index_K=torch.cat(keys).to(device) if any(prefix_lengths) else None,
            max_queries=max(lengths),
            max_keys=max(num_keys),
        )

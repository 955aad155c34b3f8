"""Attention in rows whose responses share one copy of their prompt; segments.py defines which tokens attend to which.

Legend: T tokens of the row, N tiles taken together, Q query and K key tokens of a tile, H query heads, G key-value
heads, D features of a head.

On a CPU the work is cut into *tiles*, ranges of queries against ranges of keys, none of which repeats a key. A root and
its first branch are computed as one ordinary document. Every other branch is computed against itself, and all of these
at once against the root. The results of two tiles with the same queries are combined by their log-sums of exponentials,
as flash attention does with the blocks of a row (Dao et al. 2022, arXiv:2205.14135, section 3.1), and so are their
gradients (Dao 2023, arXiv:2307.08691, section 3.1.2): the backward pass of a tile is given the output and the log-sum
over all keys of its queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from open_instruct.models.attention.segments import QKV, Segment, Segments, documents_of, segments_of

MAX_CACHED_TILINGS = 4

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Tile(NamedTuple):
    """Queries against keys, each a range of the row's tokens.

    `distance` is that from the first key to the first query in logical positions: query q and key k (counted from 0
    within the tile) are `distance + q - k` apart. None: every query sees every key.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    distance: int | None


class TileBatch(NamedTuple):
    """Tiles of one shape; `is_first` if no earlier tiles have their queries."""

    num_tiles: int
    query_index: torch.Tensor
    key_index: torch.Tensor
    is_causal: bool
    is_seen_QK: torch.Tensor | None
    is_first: bool


def attend(qkv_NL: QKV, *, mask_QK: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
    """Scaled dot product attention with heads last but one, as OLMo-core lays them out; causal without a mask.

    Shape (N, Q, H, D).
    """
    output_NHQD = F.scaled_dot_product_attention(
        *qkv_NL.each(lambda tensor: tensor.transpose(1, 2)),
        attn_mask=mask_QK,
        is_causal=mask_QK is None,
        scale=scale,
        enable_gqa=qkv_NL.shares_heads,
    )
    return output_NHQD.transpose(1, 2)


def attend_plainly(qkv_T: QKV, segments: Segments, *, left: int = -1, scale: float | None = None) -> torch.Tensor:
    """The definition: one masked call a segment, its prefix's keys repeated. Shape (T, H, D); `left` < 0: no window."""
    outputs = []
    for start, length, prefix_start, prefix_length in segments_of(segments.lengths, segments.prefix_lengths):
        own, prefix = slice(start, start + length), slice(prefix_start, prefix_start + prefix_length)
        keys, values = (torch.cat((tensor[prefix], tensor[own])) for tensor in (qkv_T.key, qkv_T.value))
        qkv_1L = QKV(qkv_T.query[own], keys, values).each(lambda tensor: tensor.unsqueeze(0))
        num_keys = prefix_length + length
        mask_QK = is_seen(length, num_keys, distance=prefix_length, left=left, device=keys.device)
        outputs.append(attend(qkv_1L, mask_QK=mask_QK, scale=scale).squeeze(0))
    return torch.cat(outputs)


def attend_in_tiles(qkv_T: QKV, segments: Segments, *, left: int = -1, scale: float | None = None) -> torch.Tensor:
    """`attend_plainly`, on a CPU, without repeating a key. Shape (T, H, D)."""
    batches = tile_batches(segments.lengths, segments.prefix_lengths, left)
    attended: torch.Tensor = _TiledAttention.apply(*qkv_T, batches, scale)
    return attended


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        batches: tuple[TileBatch, ...],
        scale: float | None,
    ) -> torch.Tensor:
        out_THD = torch.empty_like(query_THD)
        lse_TH: torch.Tensor | None = None
        for batch in batches:
            tiles = _tiles_of(batch, query_THD, key_TGD, value_TGD)
            out, lse = _flash(*tiles, 0.0, batch.is_causal, attn_mask=_bias(batch, query_THD.dtype), scale=scale)
            out_NHD, lse_NH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (out, lse))
            if lse_TH is None:
                lse_TH = lse_NH.new_empty(query_THD.shape[:2])
            if not batch.is_first:
                lse_before_NH = lse_TH.index_select(0, batch.query_index)
                lse_part_NH = lse_NH
                lse_NH = torch.logaddexp(lse_before_NH, lse_part_NH)
                out_before_NHD = out_THD.index_select(0, batch.query_index)
                out_NHD = (
                    out_before_NHD * (lse_before_NH - lse_NH).exp().unsqueeze(-1)
                    + out_NHD * (lse_part_NH - lse_NH).exp().unsqueeze(-1)
                ).to(out_THD.dtype)
            out_THD.index_copy_(0, batch.query_index, out_NHD)
            lse_TH.index_copy_(0, batch.query_index, lse_NH)
        ctx.save_for_backward(query_THD, key_TGD, value_TGD, out_THD, lse_TH)
        ctx.batches, ctx.scale = batches, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_THD, key_TGD, value_TGD, out_THD, lse_TH = ctx.saved_tensors
        # Added up over tiles in the inputs' own dtype, as autograd adds the gradients of a tensor that is used twice.
        grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (query_THD, key_TGD, value_TGD))
        for batch in ctx.batches:
            tiles = _tiles_of(batch, query_THD, key_TGD, value_TGD)
            grad_out, out, lse = (
                _rows(t, batch.query_index, batch.num_tiles).transpose(1, 2) for t in (grad_out_THD, out_THD, lse_TH)
            )
            bias = _bias(batch, query_THD.dtype)
            grads = _flash_backward(grad_out, *tiles, out, lse, 0.0, batch.is_causal, attn_mask=bias, scale=ctx.scale)
            indices = (batch.query_index, batch.key_index, batch.key_index)
            for total, grad, index in zip((grad_query, grad_key, grad_value), grads, indices, strict=True):
                total.index_add_(0, index, grad.transpose(1, 2).flatten(0, 1))
        return grad_query, grad_key, grad_value, None, None


def _tiles_of(batch: TileBatch, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor) -> QKV:
    """Queries (N, H, Q, D), keys and values (N, G, K, D)."""
    query, key, value = (
        _rows(tensor, index, batch.num_tiles).transpose(1, 2)
        for tensor, index in ((query_THD, batch.query_index), (key_TGD, batch.key_index), (value_TGD, batch.key_index))
    )
    return QKV(query, key, value)


def _rows(tensor_T: torch.Tensor, index: torch.Tensor, num_tiles: int) -> torch.Tensor:
    return tensor_T.index_select(0, index).unflatten(0, (num_tiles, -1))


def _bias(batch: TileBatch, dtype: torch.dtype) -> torch.Tensor | None:
    if batch.is_seen_QK is None:
        return None
    return torch.zeros_like(batch.is_seen_QK, dtype=dtype).masked_fill_(~batch.is_seen_QK, -torch.inf)


@lru_cache(maxsize=MAX_CACHED_TILINGS)
def tile_batches(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...], left: int) -> tuple[TileBatch, ...]:
    """All tiles of a row, those of one shape together, each query's own segment before its prefix.

    Cached: they are the same for all layers with one window, and for the backward pass.
    """
    shapes: dict[tuple[bool, int, int, int | None], list[Tile]] = {}
    documents = documents_of(lengths, prefix_lengths)
    own_lengths = tuple(document.length for document in documents)
    for is_first, tiles in ((True, own_tiles(own_lengths, left)), (False, prefix_tiles(documents, left))):
        for tile in tiles:
            shapes.setdefault((is_first, tile.num_queries, tile.num_keys, tile.distance), []).append(tile)
    batches = []
    for (is_first, num_queries, num_keys, distance), members in shapes.items():
        is_causal = distance == 0 and num_queries == num_keys and not 0 <= left < num_queries - 1
        is_seen_QK = None
        if distance is not None and not is_causal:
            is_seen_QK = is_seen(num_queries, num_keys, distance=distance, left=left, device=torch.device("cpu"))
        batches.append(
            TileBatch(
                num_tiles=len(members),
                query_index=_ranges([tile.first_query for tile in members], num_queries),
                key_index=_ranges([tile.first_key for tile in members], num_keys),
                is_causal=is_causal,
                is_seen_QK=is_seen_QK,
                is_first=is_first,
            )
        )
    return tuple(batches)


def own_tiles(lengths: tuple[int, ...], left: int) -> Iterator[Tile]:
    """Each document (or branch) against itself.

    One that is longer than a window of W = left + 1 is cut into blocks of W queries, each against its own W keys and
    the W before.
    """
    start = 0
    for length in lengths:
        block = length if left < 0 else left + 1
        for first in range(0, length, max(block, 1)):
            num_before = min(first, block)
            num_queries = min(block, length - first)
            yield Tile(start + first, num_queries, start + first - num_before, num_before + num_queries, num_before)
        start += length


def prefix_tiles(segments: tuple[Segment, ...], left: int) -> Iterator[Tile]:
    """Branches but the first against their roots: all of a root in one tile, unless a window hides some of it."""
    index = 0
    while index < len(segments):
        start, length, prefix_start, prefix_length = segments[index]
        index += 1
        if prefix_length == 0 or length == 0:
            continue
        if left < 0 or prefix_length + length - 1 <= left:
            end = start + length
            while index < len(segments):
                following = segments[index]
                is_like = following.prefix_length and following.prefix_start == prefix_start
                if not is_like or 0 <= left < prefix_length + following.length - 1:
                    break
                end += following.length
                index += 1
            yield Tile(start, end - start, prefix_start, prefix_length, None)
        elif left > 0:
            # Only the first `left` queries see any of the prefix, and of the prefix only its last `left` tokens.
            num_queries = min(length, left)
            num_keys = min(prefix_length, left)
            yield Tile(start, num_queries, prefix_start + prefix_length - num_keys, num_keys, num_keys)


def _ranges(starts: list[int], length: int) -> torch.Tensor:
    return (torch.tensor(starts).unsqueeze(1) + torch.arange(length)).flatten()


def is_seen(num_queries: int, num_keys: int, *, distance: int, left: int, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: those at 0 to `left` (if that is at least 0) positions before it; shape (Q, K)."""
    query = torch.arange(distance, distance + num_queries, device=device).unsqueeze(1)
    apart = query - torch.arange(num_keys, device=device)
    return (apart >= 0) & (apart <= left) if left >= 0 else apart >= 0

"""Attention over documents that are packed end to end, without flash-attn.

Legend of the shape suffixes: B rows, T tokens of a row, N documents taken together, L tokens of one document,
Q query tokens, K key tokens, H query heads, G key-value heads, D features of a head. The suffix of a `QKV` is the start
that its three shapes have in common.

On a CPU, documents of equal length take one call of PyTorch's scaled dot product attention, which is causal without a
mask. On a GPU in 16 bits, all documents take one call of PyTorch's variable-length attention. Documents that share what
they begin with are *segments* (segments.py): one that goes on from others is given their keys before its own, and on a
CPU a mask.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from olmo_core.nn.attention import Attention
from olmo_core.nn.attention.backend import AttentionBackend, TorchAttentionBackend
from olmo_core.nn.transformer import Transformer
from torch.nn.attention.varlen import varlen_attn

from open_instruct.models.attention.context_parallel import ContextGroup
from open_instruct.models.attention.segments import QKV, Segment, Segments, segments_of

MAX_CACHED_MASKS = 4

# Read once, since the parameters of varlen_attn differ between releases of PyTorch: the first had no flag for shared
# heads (they were simply accepted), and none for windows.
_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters
_VARLEN_GQA_FLAG: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_PARAMETERS else {}
_VARLEN_HAS_WINDOWS = "window_size" in _VARLEN_PARAMETERS


class SegmentAttention(TorchAttentionBackend):
    """Causal attention within segments, in place of OLMo-core's backend; it has no parameters.

    `window_size` is OLMo-core's: (left, 0) lets a query see itself and `left` tokens before it, (-1, -1) all
    tokens before it. Distances are counted within the document. Key-value heads are shared by groups of
    query heads and never repeated in memory.
    """

    context: ContextGroup | None = None
    """The ranks that rows are split over (context_parallel.py), if they are."""

    @classmethod
    def like(cls, stock: AttentionBackend) -> SegmentAttention:
        return cls(
            head_dim=stock.head_dim,
            n_heads=stock.n_heads,
            n_kv_heads=stock.n_kv_heads,
            scale=stock.scale,
            window_size=stock.window_size,
        )

    def forward(self, qkv: Any, cu_doc_lens: Any = None, *_: object, **unused: object) -> torch.Tensor:
        """Attend.

        Args:
            qkv: queries of shape (B, T, H, D), keys and values of shape (B, T, G, D).
            cu_doc_lens: the `Segments` of the rows laid end to end.

        Returns:
            Shape (B, T, H, D), contiguous.
        """
        assert isinstance(cu_doc_lens, Segments), "blocks are called by a SegmentTransformer, with segments"
        qkv_T = QKV(*qkv).each(lambda tensor: tensor.flatten(0, 1))
        if self.context is not None:
            qkv_T = self.context.heads_of_whole_row(qkv_T)
        attended = attend_over_segments(qkv_T, cu_doc_lens, left=self.window_size[0], scale=self.scale)
        if self.context is not None:
            attended = self.context.tokens_of_all_heads(attended)
        return attended.unflatten(0, qkv[0].shape[:2]).contiguous()


def context_of(model: Transformer) -> ContextGroup | None:
    """The ranks that the rows of `model` are split over; None where each rank has whole rows."""
    first = cast(Attention, next(iter(model.blocks.values())).attention)
    return cast(SegmentAttention, first.backend).context


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


def attend_in_window(qkv_NL: QKV, *, left: int, scale: float | None = None) -> torch.Tensor:
    """Every token attends to itself and at most `left` tokens before it (all, where `left` < 0); shape (N, L, H, D).

    A document longer than the window W = left + 1 is cut into blocks of W. A block can see itself and the
    block before it, in a pattern that is the same for all blocks: so one mask of W x 2W serves every
    document, and work grows with L x W instead of L x L.
    """
    window, length = left + 1, qkv_NL.query.shape[1]
    if not 0 < window < length:
        return attend(qkv_NL, scale=scale)

    num_whole = length // window
    blocks = qkv_NL.each(lambda tensor: tensor[:, : num_whole * window].unflatten(1, (num_whole, window)))
    mask_QK = _band_mask(window, qkv_NL.query.device)
    parts = [attend(blocks.each(lambda block: block[:, 0]), scale=scale)]
    if num_whole > 1:
        keys, values = (torch.cat((t[:, :-1], t[:, 1:]), dim=2) for t in (blocks.key, blocks.value))
        with_previous = QKV(blocks.query[:, 1:], keys, values).each(lambda tensor: tensor.flatten(0, 1))
        attended = attend(with_previous, mask_QK=mask_QK, scale=scale)
        parts.append(attended.unflatten(0, (-1, num_whole - 1)).flatten(1, 2))
    num_left_over = length - num_whole * window
    if num_left_over:
        first_key = (num_whole - 1) * window
        keys, values = qkv_NL.key[:, first_key:], qkv_NL.value[:, first_key:]
        last = QKV(qkv_NL.query[:, num_whole * window :], keys, values)
        parts.append(attend(last, mask_QK=mask_QK[:num_left_over, : window + num_left_over], scale=scale))
    return torch.cat(parts, dim=1)


def attend_by_segment(
    qkv_T: QKV, segments: Sequence[Segment], *, left: int = -1, scale: float | None = None
) -> torch.Tensor:
    """Attention within each of the segments that lie end to end, and to their prefixes; shape (T, H, D).

    Segments of one length, with prefixes of one length, are computed together. `left` < 0 means no window.
    """
    # split has one backward node for all segments; every slice would make a gradient of the whole row's size.
    queries, keys, values = (tensor.split([segment.length for segment in segments]) for tensor in qkv_T)
    starts = [segment.start for segment in segments]
    alike: dict[tuple[int, int], list[int]] = {}  # indices of segments, by lengths
    for index, segment in enumerate(segments):
        if segment.length > 0:
            alike.setdefault((segment.length, segment.prefix_length), []).append(index)
    attended: list[torch.Tensor] = list(queries)
    for (length, prefix_length), members in alike.items():
        num_seen = prefix_length if left < 0 else min(prefix_length, left)
        query = _stack([queries[index] for index in members])
        key, value = (
            _stack([_seen_by(segments[index], num_seen, tensors, starts, tensors[index]) for index in members])
            for tensors in (keys, values)
        )
        if num_seen == 0:
            together = attend_in_window(QKV(query, key, value), left=left, scale=scale)
        else:
            mask_QK = is_seen(length, num_seen + length, distance=num_seen, left=left, device=key.device)
            together = attend(QKV(query, key, value), mask_QK=mask_QK, scale=scale)
        for index, output_LHD in zip(members, together.unbind(0), strict=True):
            attended[index] = output_LHD
    return torch.cat(attended)


def attend_over_segments(qkv_T: QKV, segments: Segments, *, left: int = -1, scale: float | None = None) -> torch.Tensor:
    """Every token attends to its segment's prefix and to the tokens before it in the segment; shape (T, H, D)."""
    if not _varlen_can_run(qkv_T.query):
        return _attend_piece_by_piece(qkv_T, segments, left=left, scale=scale)
    # The kernel aligns the causal diagonal to the last query and the last key of a document, and counts windows
    # from there. With a prefix's keys before a segment's own, distances are those of logical positions.
    query, keys, values = qkv_T
    if segments.key_index_K is not None:
        keys, values = (_Gathered.apply(tensor, segments.key_index_K) for tensor in (keys, values))
    flags: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
    if qkv_T.shares_heads:
        flags |= _VARLEN_GQA_FLAG
    lengths = (segments.cu_queries, segments.cu_keys, segments.max_queries, segments.max_keys)
    return cast(torch.Tensor, varlen_attn(query, keys, values, *lengths, **flags))


@torch.compiler.disable
def _attend_piece_by_piece(qkv_T: QKV, segments: Segments, *, left: int, scale: float | None) -> torch.Tensor:
    """Attention by segment, left out of compiled blocks because it differs with every row's lengths."""
    each = segments_of(segments.lengths, segments.prefix_lengths)
    return attend_by_segment(qkv_T, each, left=left, scale=scale)


class _Gathered(torch.autograd.Function):
    """Gathers rows of a tensor, some several times, and adds up their gradients in float32.

    A shared token gets a gradient from each segment that sees it; a sum of many in 16 bits would lose the small ones.
    """

    @staticmethod
    def forward(ctx: Any, tensor_TGD: torch.Tensor, index_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_K)
        ctx.num_tokens = tensor_TGD.shape[0]
        return tensor_TGD.index_select(0, index_K)

    @staticmethod
    def backward(ctx: Any, grad_KGD: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_K,) = ctx.saved_tensors
        exact_KGD = grad_KGD.to(torch.promote_types(grad_KGD.dtype, torch.float32))
        sums_TGD = exact_KGD.new_zeros(ctx.num_tokens, *exact_KGD.shape[1:]).index_add_(0, index_K, exact_KGD)
        return sums_TGD.to(grad_KGD.dtype), None


def _seen_by(
    segment: Segment, num_seen: int, tensors: Sequence[torch.Tensor], starts: Sequence[int], own_LGD: torch.Tensor
) -> torch.Tensor:
    """A segment's own keys or values behind the last `num_seen` of its prefix, which lie in segments before it."""
    parts: list[torch.Tensor] = []
    for start, length in segment.last_of_prefix(num_seen):
        # The last segment that starts there or before it: segments without tokens start where the next one does.
        holder = bisect_right(starts, start) - 1
        first = start - starts[holder]
        parts.append(tensors[holder][first : first + length])
    return torch.cat((*parts, own_LGD)) if parts else own_LGD


def _stack(documents: list[torch.Tensor]) -> torch.Tensor:
    """A new leading dimension; a single document is not copied."""
    return documents[0].unsqueeze(0) if len(documents) == 1 else torch.stack(documents)


def is_seen(num_queries: int, num_keys: int, *, distance: int, left: int, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: those at 0 to `left` (if that is at least 0) positions before it; shape (Q, K)."""
    seen_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(distance)
    return seen_QK.triu(distance - left) if left >= 0 else seen_QK


@lru_cache(maxsize=MAX_CACHED_MASKS)
def _band_mask(window: int, device: torch.device) -> torch.Tensor:
    """The mask of a block of `window` queries over the keys of the block before and its own; True is seen.

    Shape (window, 2 * window). For a window of 2, keys a b of the block before and c d of this one::

        a b c d
        . x x .   query c sees b and c
        . . x x   query d sees c and d
    """
    return is_seen(window, 2 * window, distance=window, left=window - 1, device=device)


def _varlen_can_run(query: torch.Tensor) -> bool:
    # The kernels behind varlen_attn are flash attention's: 16 bits, heads of up to 256 in steps of 8.
    head_dim = query.shape[-1]
    is_16_bit = query.dtype in (torch.bfloat16, torch.float16)
    return _VARLEN_HAS_WINDOWS and query.is_cuda and is_16_bit and head_dim % 8 == 0 and head_dim <= 256

"""Attention over documents that are packed end to end, without flash-attn.

Legend of the shape suffixes: B rows, T tokens of a row, Q query tokens, K key tokens, H query
heads, G key-value heads, D features of a head. The suffix of a `QKV` is the start that its three
shapes have in common.

On a GPU in 16 bits, all documents take one call of PyTorch's variable-length attention; on a CPU
parts of them are calls of its flash attention (cpu_flash.py). Elsewhere, and on a CPU where a
window hides keys, each document takes calls of scaled dot product attention. Documents that share
what they begin with are *segments* (segments.py): one that goes on from others is given their keys
before its own.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from olmo_core.nn.attention.backend import AttentionBackend, TorchAttentionBackend
from olmo_core.nn.transformer import Transformer
from torch.nn.attention.varlen import varlen_attn

from open_instruct.models.attention.context_parallel import ContextGroup
from open_instruct.models.attention.cpu_flash import attend_in_parts, can_attend_in_parts
from open_instruct.models.attention.segments import QKV, Segments

# Queries of a narrow window that are computed together.
LEAST_PIECE = 128

# Read once, since the parameters of varlen_attn differ between releases of PyTorch: the first had
# no flag for shared heads (they were simply accepted), and none for windows.
_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters
_VARLEN_GQA_FLAG: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in _VARLEN_PARAMETERS else {}
)
_VARLEN_HAS_WINDOWS = "window_size" in _VARLEN_PARAMETERS


class SegmentAttention(TorchAttentionBackend):
    """Causal attention within segments, in place of OLMo-core's backend; it has no parameters.

    `window_size` is OLMo-core's: (left, 0) lets a query see itself and `left` tokens before it,
    (-1, -1) all tokens before it. Distances are counted within the document. Key-value heads are
    shared by groups of query heads and never repeated in memory.
    """

    context: ContextGroup | None = None
    """The ranks that rows are split over (context_parallel.py), if they are."""

    @classmethod
    def from_stock(cls, stock: AttentionBackend) -> SegmentAttention:
        return cls(
            head_dim=stock.head_dim,
            n_heads=stock.n_heads,
            n_kv_heads=stock.n_kv_heads,
            scale=stock.scale,
            window_size=stock.window_size,
        )

    def forward(
        self,
        qkv: Any,
        cu_doc_lens: Any = None,
        *_: object,
        **unused: object,
    ) -> torch.Tensor:
        """Attend.

        Args:
            qkv: queries of shape (B, T, H, D), keys and values of shape (B, T, G, D).
            cu_doc_lens: the `Segments` of the rows laid end to end.

        Returns:
            Shape (B, T, H, D), contiguous.
        """
        assert isinstance(cu_doc_lens, Segments), (
            "blocks are called by a SegmentTransformer, with segments"
        )
        qkv_T = QKV(*qkv).each(lambda tensor: tensor.flatten(0, 1))
        if self.context is not None:
            qkv_T = QKV(*self.context.scatter_heads(*qkv_T))
        attended = attend_over_segments(
            qkv_T, cu_doc_lens, left=self.window_size[0], scale=self.scale
        )
        if self.context is not None:
            attended = self.context.gather_heads(attended)
        return attended.unflatten(0, qkv[0].shape[:2]).contiguous()


def find_context_group(model: Transformer) -> ContextGroup | None:
    """The ranks that the rows of `model` are split over; None where each rank has whole rows."""
    return cast(ContextGroup | None, getattr(model, "context", None))


def attend(qkv: QKV, *, left: int = -1, scale: float | None = None) -> torch.Tensor:
    """Attention of the last Q of K tokens to those before; shape (Q, H, D).

    Queries have shape (Q, H, D), keys and values (K, G, D).
    """
    num_queries = len(qkv.query)
    num_keys = len(qkv.key)
    distance = num_keys - num_queries
    mask_QK = None
    if distance or 0 <= left < num_keys - 1:
        mask_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=qkv.key.device)
        mask_QK = mask_QK.tril(distance)
        if left >= 0:
            mask_QK = mask_QK.triu(distance - left)
    output_NHQD = F.scaled_dot_product_attention(
        *qkv.each(lambda tensor: tensor.transpose(0, 1).unsqueeze(0)),
        attn_mask=mask_QK,
        is_causal=mask_QK is None,
        scale=scale,
        enable_gqa=qkv.shares_heads,
    )
    return output_NHQD.squeeze(0).transpose(0, 1)


@torch.compiler.disable
def attend_by_segment(
    qkv: QKV,
    segments: Segments,
    *,
    left: int = -1,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of one segment after another; shape (T, H, D).

    Queries have shape (T, H, D), keys and values of the segments (K, G, D). With a window the
    queries come in pieces, each with the keys that its window reaches, so that work and masks grow
    with the window and not with the segment. Compiled blocks leave this out, as it differs with
    every row's lengths.
    """
    lengths = zip(segments.prefix_lengths, segments.lengths, strict=True)
    num_keys = [prefix + length for prefix, length in lengths]
    # split has one backward node for all segments; every slice would make a gradient of the whole
    # row's size.
    split = zip(
        qkv.query.split(segments.lengths),
        qkv.key.split(num_keys),
        qkv.value.split(num_keys),
        strict=True,
    )
    attended: list[torch.Tensor] = []
    for query, key, value in split:
        if not 0 <= left < len(key) - 1:
            attended.append(attend(QKV(query, key, value), scale=scale))
            continue
        stop = len(key) - len(query)
        for piece in query.split(max(left + 1, LEAST_PIECE)):
            start = max(stop - left, 0)
            stop += len(piece)
            window = QKV(piece, key[start:stop], value[start:stop])
            attended.append(attend(window, left=left, scale=scale))
    return torch.cat(attended)


def attend_over_segments(
    qkv_T: QKV,
    segments: Segments,
    *,
    left: int = -1,
    scale: float | None = None,
) -> torch.Tensor:
    """Every token attends to its segment's prefix and the tokens before it; shape (T, H, D).

    :param left: how many tokens before it a window lets a token see; below 0: all.
    """
    has_varlen = _varlen_can_run(qkv_T.query)
    if not has_varlen and can_attend_in_parts(qkv_T.query, segments, left=left):
        return attend_in_parts(qkv_T, segments, scale=scale)
    query, keys, values = qkv_T
    if segments.key_index_K is not None:
        keys = GatherRows.apply(keys, segments.key_index_K)
        values = GatherRows.apply(values, segments.key_index_K)
    if not has_varlen:
        return attend_by_segment(QKV(query, keys, values), segments, left=left, scale=scale)
    # The kernel aligns the causal diagonal to the last query and the last key of a document, and
    # counts windows from there. With a prefix's keys before a segment's own, distances are those of
    # logical positions.
    flags: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
    if qkv_T.shares_heads:
        flags |= _VARLEN_GQA_FLAG
    lengths = (segments.cu_queries, segments.cu_keys, segments.max_queries, segments.max_keys)
    return cast(torch.Tensor, varlen_attn(query, keys, values, *lengths, **flags))


class GatherRows(torch.autograd.Function):
    """Gathers rows of a tensor, some several times, and adds up their gradients in float32.

    A shared token gets a gradient from each segment that sees it; a sum of many in 16 bits would
    lose the small ones.
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
        sums_TGD = exact_KGD.new_zeros(ctx.num_tokens, *exact_KGD.shape[1:])
        sums_TGD.index_add_(0, index_K, exact_KGD)
        return sums_TGD.to(grad_KGD.dtype), None


def _varlen_can_run(query: torch.Tensor) -> bool:
    # The kernels behind varlen_attn are flash attention's: 16 bits, heads of up to 256 in steps of
    # 8.
    head_dim = query.shape[-1]
    is_16_bit = query.dtype in (torch.bfloat16, torch.float16)
    return (
        _VARLEN_HAS_WINDOWS
        and query.is_cuda
        and is_16_bit
        and head_dim % 8 == 0
        and head_dim <= 256
    )

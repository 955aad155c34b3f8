"""Attention over documents that are packed end to end, without flash-attn.

Legend of the shape suffixes: B rows, T tokens of a row, N documents taken together, L tokens of one document,
Q query tokens, K key tokens, H query heads, G key-value heads, D features of a head. The suffix of a `QKV` is the start
that its three shapes have in common.

On a CPU, documents of equal length take one call of PyTorch's scaled dot product attention, which is causal without a
mask. On a GPU in 16 bits, all documents take one call of PyTorch's variable-length attention. Documents that share a
prompt are *segments* (segments.py): on a CPU shared_attention.py computes them; on a GPU the same single call does,
with the prompt's keys gathered for every response but the first. Long documents in float32 on a CPU are computed by
blocks.py instead, shared prompts or not.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from olmo_core.nn.attention import Attention
from olmo_core.nn.attention.backend import AttentionBackend
from olmo_core.nn.transformer import Transformer
from torch.nn.attention.varlen import varlen_attn

from open_instruct.models.attention.blocks import attend_in_blocks, can_pay, pays
from open_instruct.models.attention.context_parallel import ContextGroup
from open_instruct.models.attention.segments import QKV, Segment, Segments, documents_of
from open_instruct.models.attention.shared_attention import attend_in_tiles, attend_plainly

MAX_CACHED_MASKS = 4

# Read once, since the parameters of varlen_attn differ between releases of PyTorch: the first had no flag for shared
# heads (they were simply accepted), and none for windows.
_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters
_VARLEN_GQA_FLAG: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_PARAMETERS else {}
_VARLEN_HAS_WINDOWS = "window_size" in _VARLEN_PARAMETERS


class SegmentAttention(AttentionBackend):
    """Causal attention, within documents where their lengths are given, with OLMo-core's interface.

    `window_size` is OLMo-core's: (left, 0) lets a query see itself and `left` tokens before it, (-1, -1) all
    tokens before it. Distances are counted within the document. Key-value heads are shared by groups of
    query heads and never repeated in memory. There are no parameters, and no mask as large as a row squared.

    `context` is set where rows are split over ranks (context_parallel.py); they then need their `Segments`.
    """

    context: ContextGroup | None = None

    @classmethod
    def assert_supported(cls) -> None:
        """Runs wherever PyTorch does."""

    @classmethod
    def assert_supports_swa(cls) -> None:
        """Sliding windows are supported."""

    @classmethod
    def assert_supports_ring_cp(cls) -> None:
        raise RuntimeError("SegmentAttention does not split a row over ranks (ring context parallelism)")

    @classmethod
    def assert_supports_ulysses_cp(cls) -> None:
        """Supported, by `apply_context_parallel`."""

    @classmethod
    def assert_supports_packed_qkv(cls) -> None:
        raise RuntimeError("SegmentAttention takes queries, keys and values as three tensors")

    @classmethod
    def assert_supports_kv_cache(cls) -> None:
        raise RuntimeError("SegmentAttention is for training and has no key-value cache")

    def forward(
        self,
        qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cu_doc_lens: torch.Tensor | Segments | None = None,
        cu_doc_lens_q: torch.Tensor | None = None,
        cu_doc_lens_k: torch.Tensor | None = None,
        max_doc_len: int | None = None,
        max_doc_len_q: int | None = None,
        max_doc_len_k: int | None = None,
        local_k_slice: slice | None = None,
        kv_cache_manager: Any = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            qkv: queries of shape (B, T, H, D), keys and values of shape (B, T, G, D).
            cu_doc_lens: int32, shape (documents + 1,): where each document starts in the rows laid end to
                end, then B * T. Without it each row is one document. Or the segments of the one row (B = 1).
            max_doc_len: length of the longest document; given with `cu_doc_lens`.

        Returns:
            Shape (B, T, H, D), contiguous.
        """
        if isinstance(qkv, torch.Tensor):
            self.assert_supports_packed_qkv()
        if kv_cache_manager is not None:
            self.assert_supports_kv_cache()
        split_row = (cu_doc_lens_q, cu_doc_lens_k, max_doc_len_q, max_doc_len_k, local_k_slice)
        if any(argument is not None for argument in split_row):
            self.assert_supports_ring_cp()
        if sinks is not None:
            raise RuntimeError("SegmentAttention has no attention sinks")

        qkv_BT, left = QKV(*qkv), self.window_size[0]
        if isinstance(cu_doc_lens, Segments):
            qkv_T = qkv_BT.each(lambda tensor: tensor.squeeze(0))
            if self.context is not None:
                qkv_T = self.context.heads_of_whole_row(qkv_T)
            attended = attend_over_segments(qkv_T, cu_doc_lens, left=left, scale=self.scale)
            if self.context is not None:
                attended = self.context.tokens_of_all_heads(attended)
            return attended.unsqueeze(0).contiguous()
        if self.context is not None:
            raise RuntimeError("rows that are split over ranks need their segments")
        num_rows, row_len = qkv_BT.query.shape[:2]
        if cu_doc_lens is None and can_pay(qkv_BT.query, left):
            rows = tuple(Segment(row * row_len, row_len, 0, 0) for row in range(num_rows))
            if pays(qkv_BT.query, rows, left):
                attended_THD = attend_in_blocks(qkv_BT.each(_end_to_end), rows, left=left, scale=self.scale)
                return attended_THD.unflatten(0, (num_rows, row_len))
        if cu_doc_lens is None and not 0 <= left < row_len - 1:
            return attend(qkv_BT, scale=self.scale).contiguous()
        varlen = _varlen_can_run(qkv_BT.query)
        if cu_doc_lens is None and not varlen:
            return attend_in_window(qkv_BT, left=left, scale=self.scale).contiguous()

        qkv_T = qkv_BT.each(_end_to_end)
        if varlen:
            if cu_doc_lens is None:
                cu_doc_lens = torch.arange(num_rows + 1, dtype=torch.int32, device=qkv_T.query.device) * row_len
            attended_THD = attend_varlen(qkv_T, cu_doc_lens, max_doc_len or row_len, left=left, scale=self.scale)
        else:
            assert cu_doc_lens is not None
            lengths: list[int] = cu_doc_lens.diff().tolist()
            attended_THD = attend_by_document(qkv_T, lengths, left=left, scale=self.scale)
        return attended_THD.unflatten(0, (num_rows, row_len)).contiguous()


def context_of(model: Transformer) -> ContextGroup | None:
    """The ranks that the rows of `model` are split over; None where each rank has whole rows."""
    first = cast(Attention, next(iter(model.blocks.values())).attention)
    return cast(SegmentAttention, first.backend).context


def install_segment_attention(model: Transformer) -> None:
    """Give every block of `model` a `SegmentAttention` of its own; parameters and state dict stay as they are."""
    for block in model.blocks.values():
        attention = cast(Attention, block.attention)
        stock = attention.backend
        attention.backend = SegmentAttention(
            head_dim=stock.head_dim,
            n_heads=stock.n_heads,
            n_kv_heads=stock.n_kv_heads,
            scale=stock.scale,
            dropout_p=stock.dropout_p,
            window_size=stock.window_size,
            cache=stock.cache,
        )


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


def attend_by_document(qkv_T: QKV, lengths: list[int], *, left: int = -1, scale: float | None = None) -> torch.Tensor:
    """Attention within each of the documents that lie end to end; shape (T, H, D).

    Documents of one length are computed together. `left` < 0 means no window.
    """
    if sum(lengths) != qkv_T.query.shape[0]:
        raise ValueError(f"document lengths add up to {sum(lengths)}, but there are {qkv_T.query.shape[0]} tokens")
    # split has one backward node for all documents; every slice would make a gradient of the whole row's size.
    queries, keys, values = (tensor.split(lengths) for tensor in qkv_T)
    members: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        members.setdefault(length, []).append(document)
    attended: list[torch.Tensor] = list(queries)
    for length, documents in members.items():
        if length == 0:
            continue
        qkv_NL = QKV(*(_stack([tensors[d] for d in documents]) for tensors in (queries, keys, values)))
        together = attend_in_window(qkv_NL, left=left, scale=scale)
        for document, output_LHD in zip(documents, together.unbind(0), strict=True):
            attended[document] = output_LHD
    return torch.cat(attended)


def attend_varlen(
    qkv_T: QKV, cu_doc_lens: torch.Tensor, max_doc_len: int, *, left: int = -1, scale: float | None = None
) -> torch.Tensor:
    """As `attend_by_document`, in one CUDA kernel, float16 or bfloat16; shape (T, H, D)."""
    # The kernel leaves tokens outside every document uninitialised. Checked on the device, without a sync.
    torch._assert_async(cu_doc_lens[-1] == qkv_T.query.shape[0], "document lengths do not add up to the tokens")
    return _varlen(qkv_T, (cu_doc_lens, cu_doc_lens, max_doc_len, max_doc_len), left=left, scale=scale)


def attend_over_segments(qkv_T: QKV, segments: Segments, *, left: int = -1, scale: float | None = None) -> torch.Tensor:
    """Every token attends to the tokens before it in its own segment and in the segment's prefix; shape (T, H, D)."""
    if not _varlen_can_run(qkv_T.query):
        return _attend_piece_by_piece(qkv_T, segments, left=left, scale=scale)
    # The kernel aligns the causal diagonal to the last query and the last key of a document, and counts windows
    # from there. With the prefix's keys before a branch's own, distances are those of logical positions.
    query, keys, values = qkv_T
    if segments.key_index_K is not None:
        keys, values = (_Gathered.apply(tensor, segments.key_index_K) for tensor in (keys, values))
    lengths = (segments.cu_queries, segments.cu_keys, segments.max_queries, segments.max_keys)
    return _varlen(QKV(query, keys, values), lengths, left=left, scale=scale)


@torch.compiler.disable
def _attend_piece_by_piece(qkv_T: QKV, segments: Segments, *, left: int, scale: float | None) -> torch.Tensor:
    """Attention by document on a CPU, left out of compiled blocks because it differs with every row's lengths."""
    if can_pay(qkv_T.query, left):
        documents = documents_of(segments.lengths, segments.prefix_lengths)
        if pays(qkv_T.query, documents, left):
            return attend_in_blocks(qkv_T, documents, left=left, scale=scale)
    if not any(segments.prefix_lengths):
        return attend_by_document(qkv_T, list(segments.lengths), left=left, scale=scale)
    attend_shared = attend_in_tiles if qkv_T.query.device.type == "cpu" else attend_plainly
    return attend_shared(qkv_T, segments, left=left, scale=scale)


class _Gathered(torch.autograd.Function):
    """Gathers rows of a tensor, some several times, and adds up their gradients in float32.

    A prompt gets a gradient from each of its responses; a sum of many in 16 bits would lose the small ones.
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


def _varlen(
    qkv: QKV, lengths: tuple[torch.Tensor, torch.Tensor, int, int], *, left: int, scale: float | None
) -> torch.Tensor:
    """Call varlen_attn; `lengths` are the cumulative lengths of queries and of keys, and the largest of each."""
    flags: dict[str, Any] = {"window_size": (left, 0)} | (_VARLEN_GQA_FLAG if qkv.shares_heads else {})
    return cast(torch.Tensor, varlen_attn(qkv.query, qkv.key, qkv.value, *lengths, scale=scale, **flags))


def _end_to_end(tensor_BT: torch.Tensor) -> torch.Tensor:
    return tensor_BT.flatten(0, 1)


def _stack(documents: list[torch.Tensor]) -> torch.Tensor:
    """A new leading dimension; a single document is not copied."""
    return documents[0].unsqueeze(0) if len(documents) == 1 else torch.stack(documents)


@lru_cache(maxsize=MAX_CACHED_MASKS)
def _band_mask(window: int, device: torch.device) -> torch.Tensor:
    """The mask of a block of `window` queries over the keys of the block before and its own; True is seen.

    Shape (window, 2 * window). For a window of 2, keys a b of the block before and c d of this one::

        a b c d
        . x x .   query c sees b and c
        . . x x   query d sees c and d
    """
    query = torch.arange(window, device=device).unsqueeze(1)
    key = torch.arange(-window, window, device=device).unsqueeze(0)
    return (key <= query) & (query - key < window)


def _varlen_can_run(query: torch.Tensor) -> bool:
    # The kernels behind varlen_attn are flash attention's: 16 bits, heads of up to 256 in steps of 8.
    head_dim = query.shape[-1]
    is_16_bit = query.dtype in (torch.bfloat16, torch.float16)
    return _VARLEN_HAS_WINDOWS and query.is_cuda and is_16_bit and head_dim % 8 == 0 and head_dim <= 256

"""Causal attention of long documents on a CPU, as products of matrices.

Legend: T tokens of the row, L tokens of a document, K keys that it sees, Q tokens of a block, H query heads, G
key-value heads, R query heads that share one of them, D features of a head; N and M are the queries of a document and
of a block that share a head, L * R and Q * R of them, those of one token together.

PyTorch's flash attention for CPUs takes each head alone, in small pieces, and reaches a third of the rate that products
of matrices have. Here one product takes all queries of a *block* that share a key-value head, and all keys that
they see. The attention weights are kept for the backward pass. They would outgrow everything else that a layer keeps
where documents are very long, so flash attention computes these.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from open_instruct.models.attention.segments import QKV, Segment

# Queries of a block: few enough that their scores stay in the cache and little is computed that causality hides.
MOST_QUERIES, FEWEST_TOKENS = 192, 32
MAX_CACHED_MASKS = 8

# Blocks are faster if a document sees so many keys on average, with its shared prompt. The keys of shared prompts
# may be at most this part of its own, since flash attention takes all branches of a prompt together.
FEWEST_KEYS, MOST_SHARED_KEYS = 320, 0.25
# The most keys that a token may see in any document. The planner repeats this number and FEWEST_KEYS.
MOST_KEYS = 1024


class Block(NamedTuple):
    """Tokens of a document from `first` to `end`, and all keys that they see, the prefix's before its own."""

    first: int
    end: int
    first_key: int
    end_of_keys: int


def pays(query_THD: torch.Tensor, documents: tuple[Segment, ...], left: int) -> bool:
    """Whether `attend_in_blocks` is faster than flash attention: on long documents in float32 on a CPU, in no narrow
    window."""
    has_narrow_window = 0 <= left < FEWEST_KEYS - 1
    if query_THD.device.type != "cpu" or query_THD.dtype != torch.float32 or has_narrow_window:
        return False
    num_tokens = sum(document.length for document in documents)
    own_keys = sum(document.length**2 for document in documents)
    shared_keys = sum(document.length * document.prefix_length for document in documents)
    most_keys = max((document.prefix_length + document.length for document in documents), default=0)
    if left >= 0:
        most_keys = min(most_keys, left + 1)
    is_long = FEWEST_KEYS * num_tokens <= own_keys + shared_keys and most_keys <= MOST_KEYS
    return is_long and shared_keys <= MOST_SHARED_KEYS * own_keys


def attend_in_blocks(
    qkv_T: QKV, documents: tuple[Segment, ...], *, left: int = -1, scale: float | None = None
) -> torch.Tensor:
    """Causal attention of each document to itself and its prefix, shape (T, H, D); `left` < 0: no window."""
    scale = qkv_T.query.shape[-1] ** -0.5 if scale is None else scale
    documents = tuple(document for document in documents if document.length)
    attended: torch.Tensor = _BlockAttention.apply(*qkv_T, documents, left, scale)
    return attended


def blocks_of(document: Segment, left: int, num_shared: int) -> Iterator[Block]:
    """The blocks of a document; `num_shared` query heads share a key-value head."""
    num_tokens = max(MOST_QUERIES // num_shared, FEWEST_TOKENS)
    for first in range(0, document.length, num_tokens):
        end = min(first + num_tokens, document.length)
        first_key = max(0, document.prefix_length + first - left) if left >= 0 else 0
        yield Block(first, end, first_key, document.prefix_length + end)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        documents: tuple[Segment, ...],
        left: int,
        scale: float,
    ) -> torch.Tensor:
        kept: list[torch.Tensor] | None = [] if any(ctx.needs_input_grad) else None
        ctx.documents, ctx.left, ctx.scale = documents, left, scale
        qkv_T = QKV(query_THD, key_TGD, value_TGD)
        out_THD = torch.empty_like(query_THD)
        for document in documents:
            _attend(document, ctx, qkv_T, out_THD, kept)
        ctx.save_for_backward(*qkv_T, *(kept or ()))
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_THD, key_TGD, value_TGD, *kept = ctx.saved_tensors
        qkv_T = QKV(query_THD, key_TGD, value_TGD)
        weights = iter(kept)
        grads_T = QKV(torch.empty_like(query_THD), torch.zeros_like(key_TGD), torch.zeros_like(value_TGD))
        for document in ctx.documents:
            _add_grads(document, ctx, qkv_T, grad_out_THD, grads_T, weights)
        return *grads_T, None, None, None


# A function for one document, so that its copies are freed before the next document's are made.
def _attend(document: Segment, ctx: Any, qkv_T: QKV, out_THD: torch.Tensor, kept: list[torch.Tensor] | None) -> None:
    blocks, copies = _taken_apart(document, ctx, qkv_T)
    out_GND = torch.empty_like(copies.query)
    for query_ND, key_KD, value_KD, out_ND in zip(*copies, out_GND, strict=True):
        for block, queries, keys in blocks:
            weights_MK = _weights(block, query_ND[queries], key_KD[keys], ctx.left)
            torch.mm(weights_MK, value_KD[keys], out=out_ND[queries])
            if kept is not None:
                kept.append(weights_MK)
    _put_queries(out_THD, out_GND, document)


def _add_grads(
    document: Segment, ctx: Any, qkv_T: QKV, grad_out_THD: torch.Tensor, grads_T: QKV, kept: Iterator[torch.Tensor]
) -> None:
    blocks, (query_GND, key_GKD, value_GKD) = _taken_apart(document, ctx, qkv_T)
    grad_out_GND = _queries(grad_out_THD, document, len(key_GKD))
    grad_query_GND = torch.empty_like(query_GND)
    # Stored with features before tokens, since a product with few columns is slower.
    grad_key_GDK, grad_value_GDK = (tensor.new_zeros(tensor.mT.shape) for tensor in (key_GKD, value_GKD))
    for head, (query_ND, key_KD, value_KD) in enumerate(zip(query_GND, key_GKD, value_GKD, strict=True)):
        for _, queries, keys in blocks:
            grad_out_MD = grad_out_GND[head, queries]
            weights_MK = next(kept)
            grad_value_GDK[head, :, keys].addmm_(grad_out_MD.T, weights_MK)
            grad_MK = torch.mm(grad_out_MD, value_KD[keys].T)
            torch._softmax_backward_data(grad_MK, weights_MK, -1, weights_MK.dtype, grad_input=grad_MK)
            grad_key_GDK[head, :, keys].addmm_(query_ND[queries].T, grad_MK)
            torch.mm(grad_MK, key_KD[keys], out=grad_query_GND[head, queries])
    _put_queries(grads_T.query, grad_query_GND.mul_(ctx.scale), document)
    _add_keys(grads_T.key, grad_key_GDK, document)
    _add_keys(grads_T.value, grad_value_GDK, document)


def _taken_apart(document: Segment, ctx: Any, qkv_T: QKV) -> tuple[list[tuple[Block, slice, slice]], QKV]:
    """The blocks, each with its rows of queries and of keys, and copies of the document's tensors head by head."""
    num_groups = qkv_T.key.shape[1]
    num_shared = qkv_T.query.shape[1] // num_groups
    blocks = [
        (each, slice(each.first * num_shared, each.end * num_shared), slice(each.first_key, each.end_of_keys))
        for each in blocks_of(document, ctx.left, num_shared)
    ]
    query_GND = _queries(qkv_T.query, document, num_groups) * ctx.scale
    return blocks, QKV(query_GND, _keys(qkv_T.key, document), _keys(qkv_T.value, document))


def _weights(block: Block, query_MD: torch.Tensor, key_KD: torch.Tensor, left: int) -> torch.Tensor:
    """The attention weights of each query over the keys, (M, K)."""
    num_tokens = block.end - block.first
    num_keys = len(key_KD)
    scores_MK = torch.mm(query_MD, key_KD.T)
    scores_QRK = scores_MK.view(num_tokens, -1, num_keys)
    scores_QRK[..., -num_tokens:] += _after(num_tokens, scores_MK.dtype)
    num_spare = left - (num_keys - num_tokens)  # positions of the first token's window before the first key
    if left >= 0 and num_spare < num_tokens - 1:
        scores_QRK[..., :num_tokens] += _beyond(num_tokens, num_spare, scores_MK.dtype)
    return torch._softmax(scores_MK, -1, False, out=scores_MK)


@lru_cache(maxsize=MAX_CACHED_MASKS)
def _after(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The causal mask over the keys of the block's own tokens: -inf at keys after a token, (Q, 1, Q)."""
    return torch.full((num_tokens, num_tokens), -torch.inf, dtype=dtype).triu_(1).unsqueeze(1)


@lru_cache(maxsize=MAX_CACHED_MASKS)
def _beyond(num_tokens: int, num_spare: int, dtype: torch.dtype) -> torch.Tensor:
    """The window's mask over the first Q keys of the block: -inf at keys too far before a token, (Q, 1, Q)."""
    return torch.full((num_tokens, num_tokens), -torch.inf, dtype=dtype).tril_(-num_spare - 1).unsqueeze(1)


def _queries(tensor_THD: torch.Tensor, document: Segment, num_groups: int) -> torch.Tensor:
    """The document's rows, (G, N, D)."""
    own_LHD = tensor_THD[document.start : document.start + document.length]
    return own_LHD.unflatten(1, (num_groups, -1)).transpose(0, 1).flatten(1, 2)


def _put_queries(tensor_THD: torch.Tensor, rows_GND: torch.Tensor, document: Segment) -> None:
    rows_LGRD = rows_GND.unflatten(1, (document.length, -1)).transpose(0, 1)
    tensor_THD[document.start : document.start + document.length].unflatten(1, rows_LGRD.shape[1:3]).copy_(rows_LGRD)


def _keys(tensor_TGD: torch.Tensor, document: Segment) -> torch.Tensor:
    """The prefix's rows, then the document's own, (G, K, D)."""
    start, length, prefix_start, prefix_length = document
    rows_KGD = tensor_TGD[start : start + length]
    if prefix_length:
        rows_KGD = torch.cat((tensor_TGD[prefix_start : prefix_start + prefix_length], rows_KGD))
    return rows_KGD.transpose(0, 1).contiguous()


def _add_keys(total_TGD: torch.Tensor, grad_GDK: torch.Tensor, document: Segment) -> None:
    start, length, prefix_start, prefix_length = document
    grad_KGD = grad_GDK.permute(2, 0, 1)
    total_TGD[start : start + length] += grad_KGD[prefix_length:]
    total_TGD[prefix_start : prefix_start + prefix_length] += grad_KGD[:prefix_length]

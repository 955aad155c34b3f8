"""Causal attention of long documents on a CPU, as products of matrices.

Legend: T tokens of the row, L tokens of a document, K keys that it sees, Q tokens of a block, H query heads, G
key-value heads, R query heads that share one of them, D features of a head; N and M are the queries of a document and
of a block that share a head, L * R and Q * R of them, those of one token together.

PyTorch's flash attention for CPUs takes each head alone, in small pieces, and reaches a third of the rate that products
of matrices have. Here the queries of a *block* that share a key-value head meet all keys that they see in one product.
Only the scores of a block are in memory, mostly in the cache, and the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from open_instruct.models.segments import QKV, Segment

# Of a block: so few that its scores stay in the cache, and that little is computed of what causality hides.
MOST_QUERIES, FEWEST_TOKENS = 192, 32
MAX_CACHED_MASKS = 8

# Of their own documents, as tokens see them on average: from here on blocks are faster. Then, beside those, of prompts
# that are shared: flash attention takes all branches of a prompt together.
FEWEST_KEYS, MOST_SHARED_KEYS = 448, 0.25


class Block(NamedTuple):
    """Tokens of a document from `first` to `end`, and the keys, its prefix's before its own, that any of them sees."""

    first: int
    end: int
    first_key: int
    end_of_keys: int


def can_pay(query: torch.Tensor, left: int) -> bool:
    """Whether `pays` depends on the documents at all: in float32 on a CPU, where no window is narrow."""
    return query.device.type == "cpu" and query.dtype == torch.float32 and not 0 <= left < FEWEST_KEYS - 1


def pays(query_THD: torch.Tensor, documents: tuple[Segment, ...], left: int) -> bool:
    """Whether `attend_in_blocks` is faster than flash attention: where it can be, if documents are long."""
    if not can_pay(query_THD, left):
        return False
    num_tokens = sum(document.length for document in documents)
    own_keys = sum(document.length**2 for document in documents)
    shared_keys = sum(document.length * document.prefix_length for document in documents)
    return own_keys >= FEWEST_KEYS * num_tokens and shared_keys <= MOST_SHARED_KEYS * own_keys


def attend_in_blocks(
    qkv_T: QKV, documents: tuple[Segment, ...], *, left: int = -1, scale: float | None = None
) -> torch.Tensor:
    """Each document causally to itself and to the prefix before it, shape (T, H, D); `left` < 0: no window."""
    scale = qkv_T.query.shape[-1] ** -0.5 if scale is None else scale
    documents = tuple(document for document in documents if document.length)
    attended: torch.Tensor = _BlockAttention.apply(*qkv_T, documents, left, scale)
    return attended


def blocks_of(document: Segment, left: int, num_shared: int) -> Iterator[Block]:
    """`num_shared`: query heads that share a key-value head."""
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
        ctx.save_for_backward(query_THD, key_TGD, value_TGD)
        ctx.documents, ctx.left, ctx.scale = documents, left, scale
        num_groups = key_TGD.shape[1]
        num_shared = query_THD.shape[1] // num_groups
        scratch = _Scratch(query_THD, documents, num_shared)
        out_THD = torch.empty_like(query_THD)
        for document in documents:
            query_GND = _queries(query_THD, document, num_groups) * scale
            key_GKD, value_GKD = (_keys(tensor, document) for tensor in (key_TGD, value_TGD))
            out_GND = torch.empty_like(query_GND)
            blocks = [*blocks_of(document, left, num_shared)]
            for query_ND, key_KD, value_KD, out_ND in zip(query_GND, key_GKD, value_GKD, out_GND, strict=True):
                for block in blocks:
                    queries, keys = _slices(block, num_shared)
                    weights_MK = _weights(block, query_ND[queries], key_KD[keys], left, scratch)
                    torch.mm(weights_MK, value_KD[keys], out=out_ND[queries])
            _put_queries(out_THD, out_GND, document)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_THD, key_TGD, value_TGD = ctx.saved_tensors
        num_groups = key_TGD.shape[1]
        num_shared = query_THD.shape[1] // num_groups
        scratch, another = (_Scratch(query_THD, ctx.documents, num_shared) for _ in range(2))
        grad_query_THD = torch.empty_like(query_THD)
        grad_key_TGD, grad_value_TGD = torch.zeros_like(key_TGD), torch.zeros_like(value_TGD)
        for document in ctx.documents:
            query_GND = _queries(query_THD, document, num_groups) * ctx.scale
            grad_out_GND = _queries(grad_out_THD, document, num_groups)
            key_GKD, value_GKD = (_keys(tensor, document) for tensor in (key_TGD, value_TGD))
            grad_query_GND = torch.empty_like(query_GND)
            # Features before tokens: a product with so few columns is slower.
            grad_key_GDK, grad_value_GDK = (tensor.new_zeros(tensor.mT.shape) for tensor in (key_GKD, value_GKD))
            blocks = [*blocks_of(document, ctx.left, num_shared)]
            for head in range(num_groups):
                query_ND, key_KD, value_KD = query_GND[head], key_GKD[head], value_GKD[head]
                for block in blocks:
                    queries, keys = _slices(block, num_shared)
                    grad_out_MD = grad_out_GND[head, queries]
                    weights_MK = _weights(block, query_ND[queries], key_KD[keys], ctx.left, scratch)
                    grad_value_GDK[head, :, keys].addmm_(grad_out_MD.T, weights_MK)
                    grad_MK = torch.mm(grad_out_MD, value_KD[keys].T, out=another.of(*weights_MK.shape))
                    torch._softmax_backward_data(grad_MK, weights_MK, -1, weights_MK.dtype, grad_input=grad_MK)
                    grad_key_GDK[head, :, keys].addmm_(query_ND[queries].T, grad_MK)
                    torch.mm(grad_MK, key_KD[keys], out=grad_query_GND[head, queries])
            _put_queries(grad_query_THD, grad_query_GND.mul_(ctx.scale), document)
            _add_keys(grad_key_TGD, grad_key_GDK, document)
            _add_keys(grad_value_TGD, grad_value_GDK, document)
        return grad_query_THD, grad_key_TGD, grad_value_TGD, None, None, None


class _Scratch:
    """Memory for the scores of one block after the other."""

    def __init__(self, like: torch.Tensor, documents: tuple[Segment, ...], num_shared: int) -> None:
        num_keys = max((document.prefix_length + document.length for document in documents), default=0)
        self._memory = like.new_empty(max(MOST_QUERIES, FEWEST_TOKENS * num_shared) * num_keys)

    def of(self, num_rows: int, num_columns: int) -> torch.Tensor:
        return self._memory[: num_rows * num_columns].view(num_rows, num_columns)


def _slices(block: Block, num_shared: int) -> tuple[slice, slice]:
    return slice(block.first * num_shared, block.end * num_shared), slice(block.first_key, block.end_of_keys)


def _weights(block: Block, query_MD: torch.Tensor, key_KD: torch.Tensor, left: int, scratch: _Scratch) -> torch.Tensor:
    """What each query takes of each key's value, (M, K), in `scratch`."""
    num_tokens, num_keys = block.end - block.first, len(key_KD)
    scores_MK = torch.mm(query_MD, key_KD.T, out=scratch.of(len(query_MD), num_keys))
    scores_QRK = scores_MK.view(num_tokens, -1, num_keys)
    scores_QRK[..., -num_tokens:] += _after(num_tokens, scores_MK.dtype)
    num_spare = left - (num_keys - num_tokens)  # of the first token's window, before the first key
    if left >= 0 and num_spare < num_tokens - 1:
        scores_QRK[..., :num_tokens] += _beyond(num_tokens, num_spare, scores_MK.dtype)
    return torch._softmax(scores_MK, -1, False, out=scores_MK)


@lru_cache(maxsize=MAX_CACHED_MASKS)
def _after(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """-inf at the keys after a token, of those of the block's own tokens, (Q, 1, Q)."""
    return torch.full((num_tokens, num_tokens), -torch.inf, dtype=dtype).triu_(1).unsqueeze(1)


@lru_cache(maxsize=MAX_CACHED_MASKS)
def _beyond(num_tokens: int, num_spare: int, dtype: torch.dtype) -> torch.Tensor:
    """-inf at the keys too far before a token, of the first Q that the block has, (Q, 1, Q)."""
    return torch.full((num_tokens, num_tokens), -torch.inf, dtype=dtype).tril_(-num_spare - 1).unsqueeze(1)


def _queries(tensor_THD: torch.Tensor, document: Segment, num_groups: int) -> torch.Tensor:
    """The document's rows, (G, N, D)."""
    own_LHD = tensor_THD[document.start : document.start + document.length]
    return own_LHD.unflatten(1, (num_groups, -1)).transpose(0, 1).flatten(1, 2)


def _put_queries(tensor_THD: torch.Tensor, rows_GND: torch.Tensor, document: Segment) -> None:
    rows_LGRD = rows_GND.unflatten(1, (document.length, -1)).transpose(0, 1)
    own_LHD = tensor_THD[document.start : document.start + document.length]
    own_LHD.unflatten(1, rows_LGRD.shape[1:3]).copy_(rows_LGRD)


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

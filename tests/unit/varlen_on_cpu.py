"""PyTorch's variable-length attention on a CPU, where it has no kernel: exact ones, which check
what they are given.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from open_instruct.models.attention import attention

Pieces = Iterator[tuple[slice, slice, torch.Tensor]]


def documents(starts_q: torch.Tensor, starts_k: torch.Tensor, window: list[int]) -> Pieces:
    """Of each document its queries, its keys, and which key each query sees: the last of both lie
    side by side.
    """
    of_queries, of_keys = starts_q.tolist(), starts_k.tolist()
    for q, q_end, k, k_end in zip(of_queries, of_queries[1:], of_keys, of_keys[1:], strict=False):
        distance = (
            torch.arange(q_end - q).unsqueeze(1)
            + (k_end - k)
            - (q_end - q)
            - torch.arange(k_end - k)
        )
        is_seen = (distance >= 0) if window[0] < 0 else (distance >= 0) & (distance <= window[0])
        yield slice(q, q_end), slice(k, k_end), is_seen


def probabilities(
    query: torch.Tensor, key: torch.Tensor, is_seen: torch.Tensor, scale: float | None
) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, key) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    return scores.masked_fill(~is_seen, -math.inf).softmax(-1)


def exact_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert starts_q.dtype == starts_k.dtype == torch.int32 and not any(
        each is not None for each in unused
    )
    assert (int(starts_q[-1]), int(starts_k[-1])) == (query.shape[0], key.shape[0]), (
        "every token is in a document"
    )
    assert (int(starts_q.diff().max()), int(starts_k.diff().max())) == (max_q, max_k)
    assert window_size is not None and window_size[1] == 0 and is_causal == (window_size[0] == -1)
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    num_shared = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for of_q, of_k, is_seen in documents(starts_q, starts_k, window_size):
        keys, values = (
            tensor[of_k].double().repeat_interleave(num_shared, 1) for tensor in (key, value)
        )
        weights = probabilities(query[of_q].double(), keys, is_seen, scale)
        out[of_q] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out, torch.zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def exact_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dao 2023, arXiv:2307.08691, section 2.2."""
    assert window_size is not None
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    num_shared = query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for of_q, of_k, is_seen in documents(starts_q, starts_k, window_size):
        queries, grad = query[of_q].double(), grad_out[of_q].double()
        keys, values = (
            tensor[of_k].double().repeat_interleave(num_shared, 1) for tensor in (key, value)
        )
        weights = probabilities(queries, keys, is_seen, scale)
        grad_weights = torch.einsum("qhd,khd->hqk", grad, values)
        grad_scores = (
            weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * factor
        )
        grads[0][of_q] = torch.einsum("hqk,khd->qhd", grad_scores, keys).to(query.dtype)
        of_heads = (
            torch.einsum("hqk,qhd->khd", grad_scores, queries),
            torch.einsum("hqk,qhd->khd", weights, grad),
        )
        for total, each in zip(grads[1:], of_heads, strict=True):
            total[of_k] = each.unflatten(1, (-1, num_shared)).sum(2).to(total.dtype)
    return tuple(grads)


@pytest.fixture(scope="session")
def varlen_kernels() -> None:
    """For the rest of the process: nobody else calls them on a CPU."""
    varlen._varlen_attn.register_kernel("cpu")(exact_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(exact_backward)


@pytest.fixture
def as_on_cuda(varlen_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes the way that it takes on CUDA in 16 bits."""
    monkeypatch.setattr(attention, "_varlen_can_run", lambda query: True)

"""Attention whose output is gated, and norms that begin at zero: what Qwen 3.5 has beside the gated
delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from olmo_core.nn.attention import Attention, AttentionConfig
from olmo_core.nn.layer_norm import LayerNormConfig, RMSNorm
from torch import nn


@dataclass
class GatedAttentionConfig(AttentionConfig):
    """OLMo-core's config of attention with a norm for each head, for a `GatedAttention`."""

    def build(
        self, d_model: int, *, init_device: str = "cpu", cache: Any = None, **_: object
    ) -> GatedAttention:
        given = (
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "bias",
            "rope",
            "qk_norm",
            "use_head_qk_norm",
            "backend",
        )
        own = {name: getattr(self, name) for name in given}
        return GatedAttention(
            d_model=d_model, dtype=self.dtype.as_pt(), init_device=init_device, cache=cache, **own
        )


class GatedAttention(Attention):
    """Attention that multiplies what it read by the sigmoid of a gate, which `w_q` gives beside
    each head's query.
    """

    def __init__(
        self, *, d_model: int, dtype: torch.dtype, init_device: str, **options: Any
    ) -> None:
        super().__init__(d_model=d_model, dtype=dtype, init_device=init_device, **options)
        num_rows = 2 * self.n_heads * self.head_dim
        self.w_q = nn.Linear(d_model, num_rows, bias=False, dtype=dtype, device=init_device)

    def forward(self, x: torch.Tensor, cu_doc_lens: Any = None, **_: object) -> torch.Tensor:  # type: ignore[override]
        """The output for x, (B, T, D);

        `cu_doc_lens` are the `Segments` of the rows laid end to end.
        """
        assert self.q_norm is not None and self.k_norm is not None and self.rope is not None
        query, gate = self.w_q(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        key, value = (
            matrix(x).unflatten(-1, (-1, self.head_dim)) for matrix in (self.w_k, self.w_v)
        )
        query, key = self.rope(self.q_norm(query), self.k_norm(key), cu_doc_lens=cu_doc_lens)
        attended = self.backend((query, key, value), cu_doc_lens=cu_doc_lens)
        return cast(torch.Tensor, self.w_out((attended * gate.sigmoid()).flatten(2)))


class NormFromZero(RMSNorm):
    """RMSNorm whose weight is stored less one; multiplied in float32, then rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        scaled = exact * (exact.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (scaled * (1 + self.weight.float())).type_as(x)


@dataclass
class NormFromZeroConfig(LayerNormConfig):
    """OLMo-core's config of a norm, for a `NormFromZero`."""

    def build(
        self, size: int, init_device: str = "cpu", weight_shape: tuple[int, ...] | None = None
    ) -> NormFromZero:
        assert self.eps is not None and self.dtype is not None and weight_shape is None
        return NormFromZero(
            size=size, eps=self.eps, bias=False, dtype=self.dtype.as_pt(), init_device=init_device
        )

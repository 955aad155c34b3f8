"""Qwen 3.5's attention, whose output is gated, and its norms, whose weights begin at zero."""

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
        self,
        d_model: int,
        *,
        init_device: str = "cpu",
        cache: Any = None,
        **_: object,
    ) -> GatedAttention:
        return GatedAttention(
            d_model=d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            bias=self.bias,
            rope=self.rope,
            qk_norm=self.qk_norm,
            use_head_qk_norm=self.use_head_qk_norm,
            backend=self.backend,
            dtype=self.dtype.as_pt(),
            init_device=init_device,
            cache=cache,
        )


class GatedAttention(Attention):
    """Attention whose result is multiplied by the sigmoid of a gate.

    `w_q` gives the gate beside each head's query.
    """

    def __init__(
        self,
        *,
        d_model: int,
        dtype: torch.dtype,
        init_device: str,
        **options: Any,
    ) -> None:
        super().__init__(
            d_model=d_model,
            dtype=dtype,
            init_device=init_device,
            **options,
        )
        num_rows = 2 * self.n_heads * self.head_dim
        self.w_q = nn.Linear(d_model, num_rows, bias=False, dtype=dtype, device=init_device)

    def forward(self, x: torch.Tensor, cu_doc_lens: Any = None, **_: object) -> torch.Tensor:  # type: ignore[override]
        """The output for x, (B, T, D).

        :param cu_doc_lens: the `Segments` of the rows laid end to end.
        """
        assert self.q_norm is not None and self.k_norm is not None and self.rope is not None
        query, gate = self.w_q(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        key = self.w_k(x).unflatten(-1, (-1, self.head_dim))
        value = self.w_v(x).unflatten(-1, (-1, self.head_dim))
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
            size=size,
            eps=self.eps,
            bias=False,
            dtype=self.dtype.as_pt(),
            init_device=init_device,
        )

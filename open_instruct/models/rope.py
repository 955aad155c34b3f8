"""Rotary embeddings by logical position.

T tokens of a row, H heads, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from olmo_core.nn.buffer_cache import BufferCache
from olmo_core.nn.rope import RotaryEmbedding

from open_instruct.models.segments import Segments


class SegmentRotaryEmbedding(RotaryEmbedding):
    """OLMo-core's, which besides takes `Segments` for `cu_doc_lens`: then each token turns by its logical position.

    The tables are cut and applied as for documents; a bf16 table handed to the block from outside would not do, and
    FSDP casts every float that it hands on.
    """

    @classmethod
    def like(cls, stock: RotaryEmbedding, *, tables: BufferCache) -> SegmentRotaryEmbedding:
        """One that turns as `stock` does, with its tables in `tables`, where layers find each other's."""
        assert stock.rotary_dim == stock.dim, "partial rotary embeddings are refused when config.json is read"
        rope = cls(head_size=stock.dim, theta=stock.theta, full_precision=stock.full_precision, scaling=stock.scaling)
        # Not an argument: OLMo-core takes a cache that is still empty for none, and each layer would have its own.
        rope._cache = tables.with_namespace(rope._cache._namespace)
        return rope

    def forward(self, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (1, T, H, D) and keys (1, T, G, D), turned; see `RotaryEmbedding.forward`."""
        segments = kwargs.get("cu_doc_lens")
        if not isinstance(segments, Segments):
            return super().forward(q, k, *args, **kwargs)
        with torch.autocast(q.device.type, enabled=False):
            dtype = torch.float32 if self.full_precision else q.dtype
            tables = self._get_rotary_embedding(segments.max_keys, q.device)
            sin, cos = (table.to(dtype).index_select(0, segments.positions_T)[None, :, None] for table in tables)
            turned_q, turned_k = (self._apply_rotary_pos_emb(sin, cos, x.to(dtype)) for x in (q, k))
        return turned_q.type_as(q), turned_k.type_as(k)

"""OLMo-core's `Transformer` for rows of segments.

Its weights are NaN until a checkpoint is read. OLMo-core calls methods of a model to shard, compile
and initialise it; a subclass replaces them. All of them are public except what has no public door,
which is used in this file alone:

- `Transformer._prepare_inputs` makes the arguments of the blocks. Segments are among these, so that
  a block that is recomputed in the backward pass receives them again.
- `Transformer._device` is what `device` answers. It is set because parameters may have no values
  yet when it is asked.
- `RotaryEmbedding._cache` holds the tables of sines and cosines, and `_apply_rotary_pos_emb`
  applies them. The public `get_buffers` would cut the tables by lengths that compiled code has to
  be compiled for.
- `Transformer._fsdp_enabled` is what `fsdp_enabled` answers. It is set because OLMo-core's
  `apply_fsdp`, which sets it, takes no policy of where shards are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from olmo_core.nn.attention import Attention
from olmo_core.nn.buffer_cache import BufferCache
from olmo_core.nn.rope import RotaryEmbedding
from olmo_core.nn.transformer import Transformer
from olmo_core.utils import get_default_device, mark_dynamic
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from open_instruct.models.attention.attention import SegmentAttention
from open_instruct.models.attention.context_parallel import ContextGroup
from open_instruct.models.attention.segments import Segments
from open_instruct.models.compiled import prepare_compiler
from open_instruct.models.experts.routed import Experts
from open_instruct.models.heads.logprob_head import HeadSettings
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.models.nf4 import fill_pairs
from open_instruct.models.shards import local_part


class SegmentTransformer(Transformer):
    """OLMo-core's model, which takes the `segments` of its rows.

    Without them each row is one document. `build_model` makes it, and `training/parallelize.py`
    splits and prepares it.
    """

    on_host = False  # whether `apply_fsdp` has put shards of weights into host memory
    context: ContextGroup | None = None  # the ranks that rows are split over, if they are
    balance_coefficient = 0.0  # of the loss that has routers spread tokens over experts evenly

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        tables = BufferCache()
        # OLMo-core takes an empty cache for none, and would give each layer its own.
        tables["shared"] = torch.empty(0)
        for attention in self.attentions:
            # OLMo-core has a bias on all four projections or on none; no family has one here.
            attention.w_out.register_parameter("bias", None)
            attention.backend = SegmentAttention.from_stock(attention.backend)
            if attention.rope is not None:
                attention.rope = SegmentRotaryEmbedding.from_stock(
                    cast(RotaryEmbedding, attention.rope), tables=tables
                )

    @property
    def attentions(self) -> Iterator[Attention]:
        """Those of the blocks that attend; others have a mixer of another kind in its place."""
        # Not the blocks' own attributes: what is recomputed in a backward pass is wrapped.
        return (module for module in self.modules() if isinstance(module, Attention))

    @property
    def ropes(self) -> Iterator[SegmentRotaryEmbedding]:
        ropes = (attention.rope for attention in self.attentions)
        return (cast(SegmentRotaryEmbedding, rope) for rope in ropes if rope is not None)

    def _prepare_inputs(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        segments: Segments | None = None,
        head_settings: Callable[[], HeadSettings] | None = None,
        **kwargs: Any,
    ) -> Any:
        assert "doc_lens" not in kwargs, "documents of a row are given as `segments`"
        prepared = super()._prepare_inputs(input_ids, labels, **kwargs)
        ids_on_device, _, block_kwargs, _, head_kwargs = prepared
        head_kwargs["settings"] = head_settings
        if segments is None:
            num_rows, row_len = ids_on_device.shape
            segments = Segments.from_lengths(
                (row_len,) * num_rows, (0,) * num_rows, device=ids_on_device.device
            )
        for rope in self.ropes:
            # Here and not in the block, whose compiled code cannot extend the tables.
            rope.warmup_cache(segments.max_keys, segments.positions_T.device)
            self._mark_lengths(rope.tables)
        self._mark_lengths(segments)
        block_kwargs["cu_doc_lens"] = segments
        return prepared

    def _mark_lengths(self, values: tuple[Any, ...]) -> None:
        """Tell the compiler, where it is used, that rows differ in the lengths of these tensors."""
        if self.compile_enabled:
            for tensor in values:
                if isinstance(tensor, torch.Tensor):
                    mark_dynamic(tensor, 0, strict=False)

    @torch.no_grad()
    def init_weights(  # type: ignore[override]
        self, *, max_seq_len: int | None = None, device: torch.device | None = None, **_: object
    ) -> None:
        """Allocate this rank's shards, fill them with NaN, and warm up RoPE on `device`.

        No collective is entered.
        """
        device = device or get_default_device()
        self.to_empty(device="cpu" if self.on_host else device)
        for parameter in self.parameters():
            local_part(parameter).fill_(torch.nan if parameter.is_floating_point() else 0)
        if self.tie_word_embeddings:
            self.lm_head.w_out.weight = self.embeddings.weight  # to_empty separated them
        self.set_device(device, max_seq_len=max_seq_len)

    def set_device(self, device: torch.device, *, max_seq_len: int | None) -> None:
        """Set the model's device, and make the tables of RoPE and of matrices in 4 bits there."""
        self._device = device
        self.apply(partial(fill_pairs, device=device))
        if max_seq_len is not None:
            for rope in self.ropes:
                rope.warmup_cache(max_seq_len, device)

    def apply_compile(self) -> None:
        prepare_compiler()
        super().apply_compile()

    def apply_cp(self, cp_mesh: DeviceMesh, *_: object, **style: object) -> None:
        """Split rows over ranks, without OLMo-core's own splitting of inputs and RoPE's tables.

        The caller passes the rank's own tokens, and the segments give their logical positions.
        """
        context = ContextGroup(cp_mesh.get_group())
        splitting: list[Any] = [each for each in self.modules() if hasattr(each, "context")]
        for module in splitting:  # this one, attention, and what remembers
            module.context = context

    def apply_tp(self, tp_mesh: DeviceMesh, float8_enabled: bool | None = None) -> None:
        """Split matrices over ranks.

        Adapters are made anew: OLMo-core would cut both halves along the same axis.
        """
        is_trained = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        # lora/adapters.py.
        adapted: list[Any] = [each for each in self.modules() if hasattr(each, "register_adapter")]
        for layer in adapted:
            layer.remove_adapter()
        super().apply_tp(tp_mesh, float8_enabled=float8_enabled)
        for layer in adapted:
            layer.register_adapter(tp_mesh)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_trained[name])  # OLMo-core makes norms anew, to be trained

    def apply_fsdp(  # type: ignore[override]
        self,
        dp_mesh: DeviceMesh,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        prefetch_factor: int,
        *,
        splits_experts: bool = False,
        on_host: bool = False,
        **_: Any,
    ) -> None:
        """Shard parameters, each block a unit; a score's matrix is another, gathered in float32.

        :param splits_experts: leave experts whole, each on a rank of the shard group, where there
            are as many for every rank.
        :param on_host: keep shards of weights and gradients in host memory.
        """
        self.on_host = on_host
        in_float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        style: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        }
        if on_host:
            style["offload_policy"] = CPUOffloadPolicy(pin_memory=dp_mesh.device_type == "cuda")
        if splits_experts:
            for module in self.modules():
                if isinstance(module, Experts) and len(module.w1) % dp_mesh["dp_shard"].size() == 0:
                    module.split(dp_mesh, **style)
        if isinstance(self.lm_head, ValueHead):
            fully_shard(self.lm_head.w_out, mesh=dp_mesh, **style | {"mp_policy": in_float32})
        blocks: list[Any] = list(self.blocks.values())
        for block in blocks:
            block.apply_fsdp(dp_mesh=dp_mesh, **style)
        if not self.tie_word_embeddings:
            # Which only looks up.
            fully_shard(self.embeddings, mesh=dp_mesh, **style).set_unshard_in_backward(False)
        fully_shard(self, mesh=dp_mesh, reshard_after_forward=True, **style)
        if prefetch_factor:
            units = [_find_sharded(block) for block in blocks]
            for number, unit in enumerate(units, start=1):
                unit.set_modules_to_forward_prefetch(units[number : number + prefetch_factor])
        self._fsdp_enabled = True


def _find_sharded(block: nn.Module) -> FSDPModule:
    """The block that FSDP shards, also where a wrapper that recomputes it is around it."""
    return next(module for module in block.modules() if isinstance(module, FSDPModule))


class SegmentRotaryEmbedding(RotaryEmbedding):
    """OLMo-core's RoPE by the logical positions of `Segments`, which it takes for `cu_doc_lens`.

    It cuts the tables itself: FSDP would cast tables passed to a block to bfloat16, which is too
    coarse.
    """

    @classmethod
    def from_stock(cls, stock: RotaryEmbedding, *, tables: BufferCache) -> SegmentRotaryEmbedding:
        """The replacement of `stock`, with its tables in the cache `tables`, which layers share."""
        return cls(
            head_size=stock.rotary_dim,
            theta=stock.theta,
            full_precision=stock.full_precision,
            scaling=stock.scaling,
            cache=tables,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (B, T, H, D) and keys (B, T, G, D), turned."""
        segments: Segments = kwargs.pop("cu_doc_lens")
        with torch.autocast(q.device.type, enabled=False):
            dtype = torch.float32 if self.full_precision else q.dtype
            rows_of_heads = (*q.shape[:2], 1)  # a row of a table is for all heads of a token
            sin, cos = [
                table.index_select(0, segments.positions_T).to(dtype).unflatten(0, rows_of_heads)
                for table in self.tables
            ]
            turned_q = self._apply_rotary_pos_emb(sin, cos, q.to(dtype))
            turned_k = self._apply_rotary_pos_emb(sin, cos, k.to(dtype))
        return turned_q.type_as(q), turned_k.type_as(k)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache["rope_pos_sin"], self._cache["rope_pos_cos"]

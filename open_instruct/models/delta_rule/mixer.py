"""A layer of the gated delta rule, which some blocks have in place of attention.

Its parameters are Hugging Face's. Queries, keys and values are projected, go through a short causal
convolution and SiLU, and are what the rule (rule.py) remembers and reads; what it reads is
normalised, gated and projected back. Olmo-Hybrid has a matrix and a convolution for each of the
three, Qwen 3.5 one for all of them.

Legend of the shape suffixes: T tokens of all rows laid end to end, C channels of the convolution, H
value heads, V features of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from olmo_core.nn.attention.base import SequenceMixer, SequenceMixerConfig
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp

from open_instruct.models.attention.attention import GatherRows
from open_instruct.models.attention.context_parallel import ContextGroup
from open_instruct.models.attention.segments import Segments
from open_instruct.models.delta_rule.rule import DeltaRuleInputs, gated_delta_rule, to_float32
from open_instruct.models.delta_rule.shape import DeltaShape
from open_instruct.models.delta_rule.walk import Walk, plan_walk


@dataclass
class DeltaRuleConfig(SequenceMixerConfig["DeltaRuleMixer"]):
    """OLMo-core's config of a block's mixer, for a `DeltaRuleMixer`."""

    shape: DeltaShape
    norm_eps: float
    doubles_rates: bool = False
    """Rates of writing go up to 2, so that a memory can change its sign (arXiv:2411.12537)."""

    def build(self, d_model: int, *, init_device: str = "cpu", **_: object) -> DeltaRuleMixer:
        return DeltaRuleMixer(self, d_model, init_device=init_device)


class DeltaRuleMixer(SequenceMixer):
    """The layer; its parameters are those of `DeltaShape.tensors`."""

    context: ContextGroup | None = None
    """The ranks that rows are split over, if they are: each walks whole rows for some heads."""

    def __init__(self, config: DeltaRuleConfig, d_model: int, *, init_device: str) -> None:
        super().__init__()
        self.shape = config.shape
        self.doubles_rates = config.doubles_rates
        heads = self.shape.num_value_heads
        values = self.shape.widths[2]
        linear = partial(nn.Linear, bias=False, device=init_device)
        self.A_log = nn.Parameter(torch.empty(heads, device=init_device))
        self.dt_bias = nn.Parameter(torch.empty(heads, device=init_device))
        num_rows = {
            **self.shape.parts,
            "a": heads,
            "b": heads,
            "g": values,
        }
        for name, rows in num_rows.items():
            self.add_module(f"w_{name}", linear(d_model, rows))
        # The matrices whose rows are those of heads, the gate's last.
        self.input_names = [f"w_{name}" for name in num_rows]
        self.add_module(self.shape.output, linear(values, d_model))
        for part, rows in self.shape.parts.items():
            convolution = ShortConvolution(rows, self.shape, device=init_device)
            self.add_module(f"{part}_conv1d", convolution)
        self.o_norm = GatedNorm(self.shape.value_head_dim, eps=config.norm_eps, device=init_device)

    def forward(self, x: torch.Tensor, cu_doc_lens: Any = None, **_: object) -> torch.Tensor:
        """The output for x, (B, T, D).

        :param cu_doc_lens: the `Segments` of the rows laid end to end.
        """
        assert isinstance(cu_doc_lens, Segments), (
            "blocks are called by a SegmentTransformer, with segments"
        )
        inputs = [self.get_submodule(name)(x).flatten(0, 1) for name in self.input_names[:-1]]
        if self.context is not None:
            inputs = self._exchange(inputs, self.context)
        *projected, a_TH, b_TH = inputs
        log_decay_H = select_local_heads(self.A_log, self.context)
        bias_H = select_local_heads(self.dt_bias, self.context)
        rate_TH = b_TH.sigmoid() * (2 if self.doubles_rates else 1)
        decay_TH = -to_float32(log_decay_H).exp() * F.softplus(to_float32(a_TH) + bias_H)
        read_THV = self._remember(projected, decay_TH, rate_TH, cu_doc_lens)
        if self.context is not None:
            read_THV = self.context.gather_heads(read_THV)
        gate_THV = self.get_submodule("w_g")(x).flatten(0, 1).unflatten(-1, read_THV.shape[1:])
        normed = self.o_norm(read_THV, gate_THV).flatten(1).unflatten(0, x.shape[:2])
        return cast(torch.Tensor, self.get_submodule(self.shape.output)(normed))

    def _exchange(self, inputs: list[torch.Tensor], context: ContextGroup) -> list[torch.Tensor]:
        """Turn some tokens' inputs of all heads into all tokens' inputs of some heads."""
        *projected, a, b = inputs
        if not self.shape.is_fused:
            return list(context.scatter_heads(*projected, a, b))
        projected = list(projected[0].split(self.shape.widths, dim=-1))
        *projected, a, b = context.scatter_heads(*projected, a, b)
        return [torch.cat(projected, dim=-1), a, b]

    # Compiled blocks leave this out, as it differs with every row's lengths.
    @torch.compiler.disable
    def _remember(
        self,
        projected: list[torch.Tensor],
        decay_TH: torch.Tensor,
        rate_TH: torch.Tensor,
        segments: Segments,
    ) -> torch.Tensor:
        shape = self.shape
        walk = plan_walk(
            segments.lengths,
            segments.prefix_lengths,
            shape.conv_kernel_dim - 1,
            projected[0].device,
        )
        mixed = []
        for part, x_TC in zip(shape.parts, projected, strict=True):
            convolution = self.get_submodule(f"{part}_conv1d")
            mixed.append(F.silu(convolve(x_TC, convolution, walk)))
        if shape.is_fused:
            num_parts = sum(shape.widths) // mixed[0].shape[-1]  # that heads are split into
            mixed = list(mixed[0].split([width // num_parts for width in shape.widths], dim=-1))
        num_shared = shape.num_value_heads // shape.num_key_heads
        query, key = (
            each.unflatten(-1, (-1, 1, shape.key_head_dim))
            .expand(-1, -1, num_shared, -1)
            .flatten(1, 2)
            for each in mixed[:2]
        )
        value = mixed[2].unflatten(-1, (-1, shape.value_head_dim))
        return gated_delta_rule(
            DeltaRuleInputs(query, key, value, decay_TH, rate_TH), segments, walk
        )

    def apply_tp(self, tp_mesh: DeviceMesh, *_: object, **style: Any) -> None:
        """Split matrices by heads over ranks, each of which walks rows for its own."""
        assert not self.shape.is_fused and not style["float8_enabled"], (
            "refused when the flags are checked"
        )
        whole_inputs = tp.PrepareModuleInput(
            input_layouts=style["input_layout"], desired_input_layouts=Replicate()
        )
        tp.parallelize_module(self, tp_mesh, whole_inputs)
        plan: dict[str, Any] = {name: tp.ColwiseParallel() for name in self.input_names}
        # Blocks take the sum as it is, in parts of the tokens.
        plan[self.shape.output] = tp.RowwiseParallel(
            output_layouts=style["output_layout"], use_local_output=False
        )
        tp.parallelize_module(self, tp_mesh, plan)
        for module, name, parameter in self.small_parameters:
            placement = Replicate() if module is self.o_norm else Shard(0)
            local = distribute_tensor(parameter, tp_mesh, [placement])
            module.register_parameter(name, nn.Parameter(local))

    @property
    def small_parameters(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Parameters that are no matrices, as (module, name, parameter).

        All but the norm's have heads one by one.
        """
        convolutions = [self.get_submodule(f"{part}_conv1d") for part in self.shape.parts]
        found: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in (self, self.o_norm, *convolutions):
            for name, parameter in module.named_parameters(recurse=False):
                found.append((module, name, parameter))
        return found

    def refuse(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "rows are split by `SegmentTransformer.apply_cp`, and weights are not drawn"
        )

    apply_cp = init_weights = refuse

    def num_flops_per_token(self, seq_len: int) -> int:
        """Six for each parameter, and three times the rule's own products."""
        del seq_len
        return 6 * sum(each.numel() for each in self.parameters()) + 3 * self.shape.rule_flops


def convolve(x_TC: torch.Tensor, convolution: nn.Module, walk: Walk) -> torch.Tensor:
    """Convolve each channel over a token and those before it in its document; shape (T, C).

    Before a document's first token is zero.
    """
    with_zero = torch.cat([x_TC, x_TC.new_zeros(1, x_TC.shape[1])])
    history = GatherRows.apply(with_zero, walk.history)
    convolved = convolution(history.T.unsqueeze(0))[0].T
    return convolved.index_select(0, walk.after_history_T)


def select_local_heads(whole: torch.Tensor, context: ContextGroup | None) -> torch.Tensor:
    """The part of a parameter for the heads that this rank walks; it has one after another."""
    local = whole.to_local() if isinstance(whole, DTensor) else whole  # a tensor rank's heads
    if context is None:
        return local
    return local[context.local_slice(len(local))]


class ShortConvolution(nn.Conv1d):
    """A filter for each channel of queries, keys or values, or of all three.

    It computes those of the heads that this rank walks.
    """

    context: ContextGroup | None = None

    def __init__(self, rows: int, shape: DeltaShape, *, device: str) -> None:
        super().__init__(rows, rows, shape.conv_kernel_dim, groups=rows, bias=False, device=device)
        self.is_fused = shape.is_fused
        self.widths = shape.widths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.weight.split(self.widths) if self.is_fused else [self.weight]
        filters = torch.cat([select_local_heads(part, self.context) for part in parts])
        return F.conv1d(x, filters, groups=len(filters))


class GatedNorm(nn.Module):
    """RMSNorm of a head's features, times SiLU of a gate, rounded where transformers rounds."""

    def __init__(self, size: int, *, eps: float, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if isinstance(weight, DTensor):
            # Tensor ranks have their own heads' part of its gradient each.
            weight = weight.to_local(grad_placements=[Partial()])
        scaled = weight * self._normalize(to_float32(x)).to(x.dtype)
        return (scaled * F.silu(to_float32(gate))).to(x.dtype)

    def _normalize(self, exact: torch.Tensor) -> torch.Tensor:
        """Divide each head's features by their root mean square."""
        return exact * (exact.square().mean(-1, keepdim=True) + self.eps).rsqrt()

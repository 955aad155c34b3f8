"""Low-rank adapters (LoRA) beside the matrices of the blocks.

They are those of Hu et al. 2021 (arXiv:2106.09685, section 4.1).
`add_adapters` adds them before the model is sharded. An adapter is two more parameters of a linear
layer, and moves and is sharded with it. Adapters are float32 and trained; everything else is
frozen, except the head of a score or of classes. Readers and writers of checkpoints
(`find_local_shards`) see the model without adapters.

Legend of the shape suffixes: O output features of a layer, I input features, R rank.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from open_instruct.config.lora import ALL_LINEAR, BLOCK, IN_4_BITS, MODULES_OF_TARGETS, LoRASection
from open_instruct.core.errors import InputError
from open_instruct.models.experts.routed import RoutedFeedForward
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.models.hf.head_kinds import LM_HEAD, LM_HEAD_BIAS
from open_instruct.models.hf.names import ADAPTER, clean_name, is_adapter_name
from open_instruct.models.nf4 import FrozenLinear, RoundingMeter, dequantize, quantize
from open_instruct.models.shards import (
    LocalShard,
    find_local_shard,
    find_local_shards,
    gather_full,
    local_part,
    reshard,
)

A, B = ADAPTER


class AdaptedLinear(FrozenLinear):
    """A linear layer that adds `scale * B A x` to its output.

    It takes over the parameters of another layer.
    """

    lora_A: nn.Parameter  # (R, I)
    lora_B: nn.Parameter  # (O, R)

    def __init__(self, stands_for: nn.Linear, lora: LoRASection, *, dtype: torch.dtype) -> None:
        super().__init__(stands_for, in_4_bits=lora.use_qlora, dtype=dtype)
        self.rank = lora.lora_r
        self.scale = lora.scale
        self.is_off = False
        self._dropped_share = lora.lora_dropout
        self.register_adapter()

    def register_adapter(self, tp_mesh: DeviceMesh | None = None) -> None:
        """Add the adapter without values.

        Tensor parallelism cuts the half that meets the side on which the matrix is cut.
        """
        device = next(self.parameters()).device
        a_RI = torch.empty(self.rank, self.in_features, device=device)
        b_OR = torch.empty(self.out_features, self.rank, device=device)
        if tp_mesh is not None:
            assert isinstance(self.weight, DTensor)
            a_placement: Placement = Shard(1)
            b_placement: Placement = Replicate()
            if self.weight.placements[0].is_shard(0):
                a_placement = Replicate()
                b_placement = Shard(0)
            a_RI = distribute_tensor(a_RI, tp_mesh, [a_placement])
            b_OR = distribute_tensor(b_OR, tp_mesh, [b_placement])
        self.lora_A = nn.Parameter(a_RI)
        self.lora_B = nn.Parameter(b_OR)
        # OLMo-core looks for dropout modules, and only then replays random numbers when a block is
        # recomputed.
        self.dropout = nn.Dropout(self._dropped_share)

    def remove_adapter(self) -> None:
        del self.lora_A, self.lora_B, self.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.is_off:
            return y
        # What is left of x has no name here: a recomputed block then frees it at once.
        low = F.linear(self._drop_features(x), self.lora_A.to(x.dtype))
        return y + F.linear(low, self.lora_B.to(x.dtype)) * self.scale

    def _drop_features(self, x: torch.Tensor) -> torch.Tensor:
        # ZeRO prefetches weights only for modules that are called.
        if not self._dropped_share:
            return x
        dropped: torch.Tensor = self.dropout(x)
        return dropped


def add_adapters(model: Transformer, lora: LoRASection, *, dtype: torch.dtype) -> None:
    """Add adapters to `model` before it is sharded; its own parameters are frozen and cast to
    `dtype`.

    :raises InputError: a matrix cannot have an adapter, or cannot be held in 4 bits.
    """
    wanted = {MODULES_OF_TARGETS[target] for target in lora.targets}
    names_experts = ALL_LINEAR not in lora.lora_target_modules and any(
        "feed_forward" in each for each in wanted
    )
    for block in model.blocks.values():
        if names_experts and isinstance(block.feed_forward, RoutedFeedForward):
            raise InputError(
                "--lora_target_modules: experts have no adapters, as they lie in stacks; leave "
                "out gate_proj, up_proj and down_proj, or name all-linear",
                kind="conflict",
            )
        modules: dict[str, Any] = dict(block.named_modules())
        replaced = IN_4_BITS if lora.use_qlora else wanted
        # Mixers of other kinds have others.
        for name in sorted(modules.keys() & replaced):
            linear = modules[name]
            columns = linear.in_features
            if lora.use_qlora and columns % BLOCK:
                problem = f"{name} has {columns} columns, no multiple of {BLOCK}; leave it out"
                raise InputError(f"--use_qlora: {problem}", kind="conflict")
            if name in wanted:
                block.set_submodule(name, AdaptedLinear(linear, lora, dtype=dtype))
            else:
                block.set_submodule(name, FrozenLinear(linear, in_4_bits=True, dtype=dtype))
    for name, parameter in model.named_parameters():
        # The head of a score, or of classes, is new too, and therefore trained whole.
        is_of_head = clean_name(name) in (LM_HEAD, LM_HEAD_BIAS)
        is_new = is_adapter_name(name) or (is_of_head and isinstance(model.lm_head, ValueHead))
        parameter.requires_grad_(is_new)
        if not is_new and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def find_adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers that have adapters, by OLMo-core's names: `blocks.3.attention.w_q`."""
    return {
        clean_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, AdaptedLinear)
    }


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which `model` computes without its adapters."""
    layers = find_adapted_layers(model).values()
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


@torch.no_grad()
def fill_adapter(
    model: nn.Module,
    lora: LoRASection,
    *,
    seed: int,
    start: Mapping[str, torch.Tensor] | None,
) -> None:
    """Load this rank's parts from `start`; or, where that is None, draw A and set B to zero.

    Each matrix is drawn whole, from a seed of its name, so that it is the same on any number of
    ranks.

    :param start: whole matrices by OLMo-core's names.
    """
    layers = find_adapted_layers(model)
    for full_name, parameter in model.named_parameters():
        name = clean_name(full_name)
        shard = find_local_shard(parameter)
        if start is not None and parameter.requires_grad:
            shard.local.copy_(shard.values(start[name]))
        elif name.endswith(A):
            layer = name.removesuffix(f".{A}")
            whole = _draw_first_half(layers[layer], layer, lora, seed)
            shard.local.copy_(shard.values(whole))
        elif name.endswith(B):
            shard.local.zero_()


def _draw_first_half(
    layer: AdaptedLinear,
    name: str,
    lora: LoRASection,
    seed: int,
) -> torch.Tensor:
    """Draw A by one of peft's two ways.

    It is uniform within 1 / sqrt(I), or normal with standard deviation 1 / R.
    """
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    a_RI = torch.empty(layer.rank, layer.in_features)
    if lora.lora_init == "gaussian":
        return a_RI.normal_(std=1 / layer.rank, generator=generator)
    bound = 1 / math.sqrt(layer.in_features)
    return a_RI.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def gather_adapter(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather every trained matrix whole, by OLMo-core's names.

    Collective: every rank iterates to the end.
    """
    reshard(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield clean_name(name), gather_full(parameter)


@torch.no_grad()
def scale_adapters(model: nn.Module) -> dict[str, LocalShard]:
    """This rank's parts of the adapters' matrices, A and `scale` x B, by OLMo-core's names."""
    scales = {f"{name}.{B}": layer.scale for name, layer in find_adapted_layers(model).items()}
    shards = find_local_shards(model, adapters_only=True)
    return {
        name: replace(shard, stored=shard.local * scales.get(name, 1))
        for name, shard in shards.items()
    }


@torch.no_grad()
def find_merged_weights(model: nn.Module) -> Mapping[str, LocalShard]:
    """The weights for a checkpoint of `model`, with any adapters merged into them. Collective."""
    layers = find_adapted_layers(model)
    if not layers:
        return find_local_shards(model)
    reshard(model)
    halves: dict[str, torch.Tensor] = {}
    scale = next(iter(layers.values())).scale
    for name, layer in layers.items():
        halves[f"{name}.{A}"] = gather_full(layer.lora_A)
        # A rank holds the same rows of B as of the matrix.
        is_cut = isinstance(layer.lora_B, DTensor)
        halves[f"{name}.{B}"] = local_part(layer.lora_B) if is_cut else gather_full(layer.lora_B)
    return MergedWeights(find_local_shards(model), halves, scale=scale)


class MergedWeights(Mapping[str, LocalShard]):
    """`plain` with adapters added, in float32; each matrix is made when it is asked for.

    :param halves: of adapters, by OLMo-core's names: the first whole; the second whole, or the rows
        held of the matrix.
    :param in_4_bits: names of matrices that a run held in 4 bits, unlike `plain`, with the dtype of
        their scales; what rounding changes is measured by the `meter`.
    """

    def __init__(
        self,
        plain: Mapping[str, LocalShard],
        halves: Mapping[str, torch.Tensor],
        *,
        scale: float,
        in_4_bits: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._plain = plain
        self._halves = halves
        self._scale = scale
        self._in_4_bits = in_4_bits or {}
        self.meter = RoundingMeter()

    @torch.no_grad()
    def __getitem__(self, name: str) -> LocalShard:
        plain = self._plain[name]
        if name in self._in_4_bits:
            codes, scales = quantize(plain.stored, self._in_4_bits[name])
            self.meter.add(name, plain.stored, dequantize(codes, scales))
            plain = replace(plain, stored=codes, scales=scales)
        layer = name.removesuffix(".weight")
        if f"{layer}.{A}" not in self._halves:
            return plain
        a_RI = self._halves[f"{layer}.{A}"].to(plain.stored.device, torch.float32)
        b_OR = self._halves[f"{layer}.{B}"].to(plain.stored.device, torch.float32)
        if len(plain.box) == 1:
            return self._merge_run(plain, a_RI, b_OR)
        merged = plain.local.float().addmm(b_OR, a_RI[:, plain.box[1]], alpha=self._scale)
        return replace(plain, stored=merged, scales=None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def _merge_run(self, plain: LocalShard, a_RI: torch.Tensor, b_OR: torch.Tensor) -> LocalShard:
        """Merge a run of values, which may begin and end within a row."""
        assert plain.num_slabs == 1
        (values,) = plain.box
        width = a_RI.shape[1]
        first = values.start // width
        last = -(-values.stop // width)
        run = slice(values.start - first * width, values.stop - first * width)
        rows = plain.local.new_zeros((last - first) * width, dtype=torch.float32)
        rows[run] = plain.local.float()
        merged = rows.view(-1, width).addmm(b_OR[first:last], a_RI, alpha=self._scale)
        return replace(plain, stored=merged.flatten()[run])

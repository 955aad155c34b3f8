"""A rank's part of a model on DeepSpeed: matrices that AutoTP splits, and what ZeRO shares of
weights and optimizer.

Where T ranks split each pair of matrices, a rank computes with rows of the first ones, and with
columns of the second: the layers of DeepSpeed's AutoTP take the place of OLMo-core's matrices,
chosen by name.

The optimizer trains flat float32 weights, a range of each parameter on each rank. A parameter's
`held` attribute is this rank's range, so loading, saving and exporting read and write the ranges,
and never gather. The forward pass computes with copies of these weights in its own dtype.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from olmo_core.nn.attention import Attention
from olmo_core.nn.feed_forward import FeedForward
from olmo_core.nn.layer_norm import LayerNorm, QwenRMSNorm
from olmo_core.nn.transformer import Transformer
from torch import nn

from open_instruct.models.box_files import Part
from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.models.hf.names import clean_name
from open_instruct.models.shards import held_run
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.parallel.process import gathered
from open_instruct.training.deepspeed.library import deepspeed

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a parameter that a rank has: number `index` of `degree` parts along `dim`.

    Example: the right half of a matrix, `Cut(dim=1, index=1, degree=2)`.
    """

    dim: int
    index: int
    degree: int

    def whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all parts together."""
        return tuple(
            size * self.degree if dim == self.dim else size for dim, size in enumerate(part)
        )


UNCUT = Cut(dim=0, index=0, degree=1)


def split_matrices(model: Transformer, degree: int) -> None:
    """Have this rank compute with its part of every matrix of `model`, which is on the meta device.

    A parameter that is cut gets a `cut` attribute. A head that is tied, or whose rows cannot be
    divided evenly, stays whole on every rank, and so do embeddings and norms.
    """
    groups = deepspeed.utils.groups
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)
    # Of this rank and its neighbours, made once a run.
    group = groups.get_tensor_model_parallel_group()
    deepspeed.module_inject.layers.set_autotp_mode(training=True)
    for block in model.blocks.values():
        mixer, feed_forward = block.attention, cast(FeedForward, block.feed_forward)
        (_split_attention if isinstance(mixer, Attention) else _split_remembering)(
            mixer, group, degree
        )
        if feed_forward.w1.weight.shape[0] % degree == 0:
            _split_pair(feed_forward, ("w1", "w3"), "w2", group)
    head = model.lm_head
    if (
        isinstance(head, LogprobHead)
        and not model.tie_word_embeddings
        and head.vocab_size % degree == 0
    ):
        head.w_out = _column_parallel(head.w_out, group, gather_output=True)
    vars(model)["ds_autotp_parsed"] = True  # else DeepSpeed would look for matrices itself


def _split_attention(attention: Any, group: Any, degree: int) -> None:
    _split_pair(attention, ("w_q", "w_k", "w_v"), "w_out", group)
    attention.n_heads //= degree
    attention.n_kv_heads //= degree
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name)
        if norm is not None and attention.use_head_qk_norm:
            norm.weight.sums_over = group  # every rank has the gradient of its own heads
        elif norm is not None:
            setattr(attention, name, SplitNorm(norm, group))


def _split_remembering(mixer: Any, group: Any, degree: int) -> None:
    for module, name, parameter in mixer.small:
        if module is not mixer.o_norm:
            setattr(module, name, _part(parameter, group, degree))
    mixer.o_norm.weight.sums_over = group
    _split_pair(mixer, mixer.firsts, mixer.shape.output, group)


def _split_pair(module: Any, firsts: Sequence[str], second: str, group: Any) -> None:
    for name in firsts:
        setattr(module, name, _column_parallel(getattr(module, name), group))
    row_parallel = deepspeed.module_inject.layers.LinearAllreduce(getattr(module, second), group)
    _mark(row_parallel.weight, 1, group)
    setattr(module, second, row_parallel)


def _column_parallel(linear: nn.Module, group: Any, **more: Any) -> Any:
    layer = deepspeed.module_inject.layers.LinearLayer(linear, group, **more)
    for parameter in layer.parameters():
        _mark(parameter, 0, group)
    return layer


def _part(whole: torch.Tensor, group: Any, degree: int) -> Any:
    """A rank's rows of a parameter on the meta device, for a layer that is none of AutoTP's."""
    part: Any = nn.Parameter(whole.detach().chunk(degree)[0].clone())
    _mark(part, 0, group)
    part.tensor_model_parallel = True
    return part


def _mark(parameter: Any, dim: int, group: Any) -> None:
    parameter.cut = Cut(dim=dim, index=dist.get_rank(group), degree=dist.get_world_size(group))


class SplitNorm(nn.Module):
    """OLMo-core's norm over all heads, for a rank that has some of them: ranks exchange sums of
    squares only.
    """

    def __init__(self, norm: LayerNorm, group: Any) -> None:
        super().__init__()
        assert norm.bias is None and norm.full_precision
        self.eps: float = norm.eps
        self.group: Any = group
        self.casts_first: bool = isinstance(norm, QwenRMSNorm)
        self.weight: Any = _part(norm.weight, group, dist.get_world_size(group))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        exact_BTD = x_BTD.float()
        squares_BT1 = _summed(exact_BTD.pow(2).mean(-1, keepdim=True), self.group)
        exact_BTD = exact_BTD * torch.rsqrt(
            squares_BT1 / dist.get_world_size(self.group) + self.eps
        )
        if self.casts_first:
            exact_BTD = exact_BTD.type_as(x_BTD)
        return (self.weight.type_as(exact_BTD) * exact_BTD).type_as(x_BTD)


def _summed(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over the ranks of `group`; backward sums the gradients of these ranks too."""
    layers = deepspeed.module_inject.layers
    summed: torch.Tensor = layers.ColumnParallel.apply(
        group, layers.RowParallel.apply(group, values, False)
    )
    return summed


def without_weights(settings: Mapping[str, Any], *, dtype: torch.dtype) -> Callable[..., None]:
    """A substitute for `Transformer.init_weights` that makes every parameter this rank's part, not
    yet filled.

    `deepspeed.zero.Init` partitions modules while they are constructed, and patches torch for the
    whole process. It is never entered here: only its function that partitions one parameter is
    called.
    """
    degree, stage = (
        settings["tensor_parallel"]["autotp_size"],
        settings["zero_optimization"]["stage"],
    )

    def init_weights(
        model: SegmentTransformer,
        *,
        max_seq_len: int | None = None,
        device: torch.device,
        **_: object,
    ) -> None:
        group = None
        if degree > 1:
            split_matrices(model, degree)
            group = deepspeed.utils.groups.get_data_parallel_group()
        if stage == 3:
            init = deepspeed.zero.Init(
                config_dict_or_path=dict(settings), dtype=dtype, data_parallel_group=group
            )
        made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
        for meta in model.parameters():
            # NaN shows up in the loss if a weight is not read from the checkpoint.
            whole = (
                nn.Parameter(torch.full(meta.shape, torch.nan, dtype=dtype, device=device))
                if stage < 3
                else None
            )
            made[meta] = _shard(meta, init, dtype) if whole is None else whole
            _take_over(meta, made[meta])
        for module in model.modules():
            for name, meta in [*module.named_parameters(recurse=False)]:
                setattr(module, name, made[meta])
        model.settle_on(device, max_seq_len=max_seq_len)

    return init_weights


def _take_over(meta: nn.Parameter, made: nn.Parameter) -> None:
    """Copy the attributes of the meta device's parameter to the one that takes its place."""
    vars(made).update({name: value for name, value in vars(meta).items() if name not in vars(made)})
    if group := getattr(made, "sums_over", None):
        sum_over = deepspeed.module_inject.layers.RowParallel.apply
        made.register_hook(lambda gradient: sum_over(group, gradient.contiguous(), False))


def _shard(meta: nn.Parameter, init: Any, dtype: torch.dtype) -> nn.Parameter:
    """A parameter with this rank's part, not yet filled; the whole parameter is never allocated."""
    placeholder = torch.empty((), dtype=dtype, device=init.local_device).expand(meta.shape)
    shard: Any = nn.Parameter(placeholder, requires_grad=meta.requires_grad)
    init._convert_to_deepspeed_param(shard)
    size = -(-shard.ds_numel // shard.ds_zero_partition_world_size)
    start, stop = _range_of(shard, size)
    part: Any = torch.zeros(size, dtype=dtype, device=init.remote_device)
    part[: stop - start].fill_(float("nan"))  # shows up in the loss if it is not read
    available = deepspeed.runtime.zero.partition_parameters.PartitionedParamStatus.AVAILABLE
    part.ds_numel, part.status, part.final_location = size, available, None
    shard.ds_tensor, shard.ds_numel_aligned = part, size * shard.ds_zero_partition_world_size
    init._partition_param(shard)
    return shard


def _range_of(shard: Any, size: int) -> tuple[int, int]:
    """Start and stop of this rank's part of a parameter; the last ranks' parts are padded, or
    empty.
    """
    rank = shard.ds_zero_partition_rank
    return min(rank * size, shard.ds_numel), min((rank + 1) * size, shard.ds_numel)


def _frozen(shard: Any) -> tuple[int, torch.Tensor]:
    """This rank's range of a frozen parameter, as its start and its values in the compute dtype."""
    start, stop = _range_of(shard, shard.ds_tensor.ds_numel)
    return start, shard.ds_tensor[: stop - start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """This rank's part of a parameter in the optimizer: float32 weights from `start` on, and their
    moments.

    Example: `Master(start=4096, weights=…, moments={"exp_avg": …, "exp_avg_sq": …})`.
    """

    start: int
    weights: torch.Tensor
    moments: Mapping[str, torch.Tensor]


class Masters:
    """This rank's float32 weights and moments, as views of the optimizer's flat tensors.

    Collective.
    """

    def __init__(self, engine: Any, *, rank: int) -> None:
        self._engine = engine
        stage = engine.zero_optimization_stage()
        self._optimizer = engine.optimizer if stage == 0 else engine.optimizer.optimizer
        named = {
            clean_name(name): parameter for name, parameter in engine.module.named_parameters()
        }
        cuts: dict[str, Cut] = {name: getattr(each, "cut", UNCUT) for name, each in named.items()}
        parts = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in named.items()}
        self.shapes = {name: cuts[name].whole(part) for name, part in parts.items()}
        name_of = {parameter: name for name, parameter in named.items()}
        # The parts of a matrix that ranks split follow one another in the flat order of a
        # checkpoint.
        before = {name: cuts[name].index * math.prod(part) for name, part in parts.items()}
        self.own = {
            (name := name_of[parameter]): self._master(
                flat, at, before[name] + start, before[name] + stop
            )
            for parameter, flat, at, start, stop in _places(engine)
        }
        held = {name: (master.start, master.weights) for name, master in self.own.items() if stage}
        if stage == 3:
            held |= {name: _frozen(each) for name, each in named.items() if not each.requires_grad}
        rank_ranges = gathered(
            {name: (start, start + local.numel()) for name, (start, local) in held.items()}
        )
        # An empty tensor on the device of the other ranks' weights, which is the host with
        # --adam_offload.
        nothing = next(
            (each.weights[:0] for each in self.own.values()), torch.empty(0, device=engine.device)
        )
        for name in set[str]().union(*rank_ranges):
            ranges, shape = [ranges.get(name, (0, 0)) for ranges in rank_ranges], self.shapes[name]
            local, slabs = (
                held[name][1] if name in held else nothing,
                cuts[name].degree if cuts[name].dim else 1,
            )
            named[name].held = held_run(local, shape, ranges, rank=rank, num_slabs=slabs)

    def _master(self, flat: torch.Tensor, at: int, start: int, stop: int) -> Master:
        state = self._optimizer.state[flat]
        # Made here as the first step would, so that a state can be saved and loaded before it.
        if not state:
            state |= {moment: torch.zeros_like(flat.detach()) for moment in MOMENTS}
            # PyTorch's optimizer counts steps in a tensor, DeepSpeed's in an int.
            where = flat.device if self._optimizer.defaults.get("fused") else "cpu"
            state["step"] = (
                torch.tensor(0.0, device=where)
                if isinstance(self._optimizer, torch.optim.AdamW)
                else 0
            )
        views = [
            values.detach().view(-1)[at : at + stop - start]
            for values in (flat, *(state[m] for m in MOMENTS))
        ]
        return Master(
            start=start, weights=views[0], moments=dict(zip(MOMENTS, views[1:], strict=True))
        )

    def parts(self, values: Mapping[str, torch.Tensor]) -> dict[str, Part]:
        """The parts of a checkpoint for `values`, which are laid out as the weights are."""
        return {
            name: Part(
                local=tensor, start=(self.own[name].start,), shape=(math.prod(self.shapes[name]),)
            )
            for name, tensor in values.items()
        }

    @property
    def num_steps(self) -> float:
        """Steps that the optimizer has taken."""
        return float(next(iter(self._optimizer.state.values()))["step"])

    def changed(self, *, num_steps: float | None = None) -> None:
        """Have the forward pass compute with weights that were written from outside; set the
        optimizer's step count.
        """
        for state in self._optimizer.state.values():
            if num_steps is not None:
                state["step"] = (
                    int(num_steps)
                    if isinstance(state["step"], int)
                    else state["step"].fill_(num_steps)
                )
        zero, stage = self._engine.optimizer, self._engine.zero_optimization_stage()
        if stage in (1, 2):
            zero.update_lp_params()
        elif stage == 3:
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            zero.empty_partition_cache()
            zero.invalidate_secondary_tensor()


def _places(engine: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor, int, int, int]]:
    """Yields (parameter, flat tensor, offset in it, start, stop) for each parameter that this rank
    has a part of.
    """
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        for group in zero.param_groups:
            for parameter in group["params"]:
                yield parameter, parameter, 0, 0, parameter.numel()
    elif stage < 3:
        # `BF16_Optimizer`, which DeepSpeed takes at stage 1.
        in_bfloat16 = hasattr(zero, "fp32_groups_flat_partition")
        flats = (
            zero.fp32_groups_flat_partition if in_bfloat16 else zero.single_partition_of_fp32_groups
        )
        for flat, parameters in zip(
            flats, zero.bf16_groups if in_bfloat16 else zero.bit16_groups, strict=True
        ):
            for parameter in parameters:
                if (mapping := parameter._hp_mapping) is not None:
                    there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield parameter, flat, here.start, there.start, there.start + there.numel
    else:
        for flat, parameters in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True
        ):
            at = 0
            for parameter in parameters:
                start, stop = _range_of(parameter, parameter.ds_tensor.ds_numel)
                yield parameter, flat, at, start, stop
                at += parameter.ds_tensor.ds_numel

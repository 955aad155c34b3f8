"""A rank's part of a model on DeepSpeed: what ZeRO shares of weights and optimizer.

The optimizer trains flat float32 weights, a range of each parameter on each rank. A parameter's
`local_shard` attribute is this rank's range, so loading, saving and exporting read and write the
ranges, and never gather. The forward pass computes with copies of these weights in its own dtype.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from open_instruct.models.box_files import Part
from open_instruct.models.hf.names import clean_name
from open_instruct.models.shards import flat_shard
from open_instruct.models.storages import list_nested_tensors
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.parallel.process import gather_objects
from open_instruct.training.deepspeed.library import deepspeed
from open_instruct.training.deepspeed.split_matrices import UNCUT, Cut, split_matrices

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_init_weights(settings: Mapping[str, Any], *, dtype: torch.dtype) -> Callable[..., None]:
    """A substitute for `Transformer.init_weights`: every parameter is this rank's part, unfilled.

    `deepspeed.zero.Init` partitions modules while they are constructed, and patches torch for the
    whole process. It is never entered here: only its function that partitions one parameter is
    called.
    """
    degree = settings["tensor_parallel"]["autotp_size"]
    stage = settings["zero_optimization"]["stage"]

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
        substitutes: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
        for meta in model.parameters():
            if stage == 3:
                substitute = _shard(meta, init, dtype)
            else:
                # NaN shows up in the loss if a weight is not read from the checkpoint.
                values = torch.full(meta.shape, torch.nan, dtype=dtype, device=device)
                substitute = nn.Parameter(values)
            _copy_attributes(meta, substitute)
            substitutes[meta] = substitute
        for module in model.modules():
            for name, meta in [*module.named_parameters(recurse=False)]:
                setattr(module, name, substitutes[meta])
        model.set_device(device, max_seq_len=max_seq_len)

    return init_weights


def _copy_attributes(meta: nn.Parameter, substitute: nn.Parameter) -> None:
    """Copy the attributes of the meta device's parameter to the one that takes its place."""
    vars(substitute).update(vars(meta) | vars(substitute))
    group = getattr(substitute, "sums_over", None)
    if group:
        sum_over = deepspeed.module_inject.layers.RowParallel.apply
        substitute.register_hook(lambda gradient: sum_over(group, gradient.contiguous(), False))


def _shard(meta: nn.Parameter, init: Any, dtype: torch.dtype) -> nn.Parameter:
    """A parameter with this rank's part, unfilled; the whole parameter is never allocated."""
    placeholder = torch.empty((), dtype=dtype, device=init.local_device).expand(meta.shape)
    shard: Any = nn.Parameter(placeholder, requires_grad=meta.requires_grad)
    init._convert_to_deepspeed_param(shard)
    size = -(-shard.ds_numel // shard.ds_zero_partition_world_size)
    start, stop = _find_range(shard, size)
    part: Any = torch.zeros(size, dtype=dtype, device=init.remote_device)
    part[: stop - start].fill_(float("nan"))  # shows up in the loss if it is not read
    available = deepspeed.runtime.zero.partition_parameters.PartitionedParamStatus.AVAILABLE
    part.ds_numel = size
    part.status = available
    part.final_location = None
    shard.ds_tensor = part
    shard.ds_numel_aligned = size * shard.ds_zero_partition_world_size
    init._partition_param(shard)
    return shard


def _find_range(shard: Any, size: int) -> tuple[int, int]:
    """Start and stop of this rank's part of a parameter; the last may be shorter, or empty."""
    rank = shard.ds_zero_partition_rank
    num_values = shard.ds_numel
    return min(rank * size, num_values), min((rank + 1) * size, num_values)


def _frozen_range(shard: Any) -> tuple[int, torch.Tensor]:
    """Start and values of this rank's range of a frozen parameter, in the compute dtype."""
    start, stop = _find_range(shard, shard.ds_tensor.ds_numel)
    return start, shard.ds_tensor[: stop - start]


class Place(NamedTuple):
    """Where the optimizer has this rank's part of a parameter.

    The values from `start` to `stop` of `parameter` lie in `flat`, from `offset` on.
    """

    parameter: nn.Parameter
    flat: torch.Tensor
    offset: int
    start: int
    stop: int

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that is laid out as `flat` is."""
        num_values = self.stop - self.start
        return values.detach().view(-1)[self.offset : self.offset + num_values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """This rank's part of a parameter in the optimizer: float32 weights from `start` on.

    Example: `Master(start=4096, weights=…, moments={"exp_avg": …, "exp_avg_sq": …})`.
    """

    start: int
    weights: torch.Tensor
    moments: Mapping[str, torch.Tensor]


class Masters:
    """This rank's float32 weights and moments, as views of the optimizer's flat tensors.

    It is built collectively, and gives every parameter of the model its `local_shard` attribute.
    """

    def __init__(self, engine: Any, *, rank: int) -> None:
        self._engine = engine
        stage = engine.zero_optimization_stage()
        self._optimizer = engine.optimizer if stage == 0 else engine.optimizer.optimizer
        parameters = {clean_name(name): each for name, each in engine.module.named_parameters()}
        names = {parameter: name for name, parameter in parameters.items()}
        cuts: dict[str, Cut] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        num_before: dict[str, int] = {}
        for name, parameter in parameters.items():
            cut = getattr(parameter, "cut", UNCUT)
            part_shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            cuts[name] = cut
            self.shapes[name] = cut.whole(part_shape)
            # The parts of a matrix that ranks split follow one another in the flat order of a
            # checkpoint.
            num_before[name] = cut.index * math.prod(part_shape)
        self.parts: dict[str, Master] = {}
        for place in _find_places(engine):
            name = names[place.parameter]
            self.parts[name] = self._view_part(place, num_before[name])
        local_ranges: dict[str, tuple[int, torch.Tensor]] = {}
        if stage > 0:
            local_ranges = {name: (part.start, part.weights) for name, part in self.parts.items()}
        if stage == 3:
            for name, parameter in parameters.items():
                if not parameter.requires_grad:
                    local_ranges[name] = _frozen_range(parameter)
        rank_ranges = gather_objects(
            {name: (start, start + local.numel()) for name, (start, local) in local_ranges.items()}
        )
        # An empty tensor on the device of the other ranks' weights, which is the host with
        # --adam_offload.
        nothing = torch.empty(0, device=engine.device)
        if self.parts:
            nothing = next(iter(self.parts.values())).weights[:0]
        for name in set[str]().union(*rank_ranges):
            ranges = [ranges.get(name, (0, 0)) for ranges in rank_ranges]
            local = local_ranges[name][1] if name in local_ranges else nothing
            num_slabs = cuts[name].degree if cuts[name].dim else 1
            parameters[name].local_shard = flat_shard(
                local, self.shapes[name], ranges, rank=rank, num_slabs=num_slabs
            )

    def _view_part(self, place: Place, num_before: int) -> Master:
        """The optimizer's part at `place`, of a parameter with values of other ranks before it."""
        flat = place.flat
        state = self._optimizer.state[flat]
        # Made here as the first step would, so that a state can be saved and loaded before it.
        if not state:
            state |= {moment: torch.zeros_like(flat.detach()) for moment in MOMENTS}
            # PyTorch's optimizer counts steps in a tensor, DeepSpeed's in an int.
            where = flat.device if self._optimizer.defaults.get("fused") else "cpu"
            state["step"] = 0
            if isinstance(self._optimizer, torch.optim.AdamW):
                state["step"] = torch.tensor(0.0, device=where)
        return Master(
            start=num_before + place.start,
            weights=place.view(flat),
            moments={moment: place.view(state[moment]) for moment in MOMENTS},
        )

    def list_parts(self, values: Mapping[str, torch.Tensor]) -> dict[str, Part]:
        """The parts of a checkpoint for `values`, which are laid out as the weights are."""
        parts: dict[str, Part] = {}
        for name, tensor in values.items():
            num_values = math.prod(self.shapes[name])
            parts[name] = Part(local=tensor, start=(self.parts[name].start,), shape=(num_values,))
        return parts

    @property
    def num_steps(self) -> float:
        """Steps that the optimizer has taken."""
        return float(next(iter(self._optimizer.state.values()))["step"])

    def refresh_computing_weights(self, *, num_steps: float | None = None) -> None:
        """Have the forward pass compute with weights that were written from outside.

        :param num_steps: that the optimizer is to have taken; None leaves it its own number.
        """
        if num_steps is not None:
            for state in self._optimizer.state.values():
                if isinstance(state["step"], int):
                    state["step"] = int(num_steps)
                else:
                    state["step"].fill_(num_steps)
        zero = self._engine.optimizer
        stage = self._engine.zero_optimization_stage()
        if stage in (1, 2):
            zero.update_lp_params()
        elif stage == 3:
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            zero.empty_partition_cache()
            zero.invalidate_secondary_tensor()


def list_zero_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """The tensors that ZeRO keeps beside the model and the optimizer's states.

    They are flat weights, buffers of gradients, and each rank's part of frozen parameters.
    """
    zero = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return
    if stage == 3:
        zero.empty_partition_cache()
        for parameter in engine.module.parameters():
            yield parameter.ds_tensor
            if parameter.ds_secondary_tensor is not None:
                yield parameter.ds_secondary_tensor
        for bucket in zero.ipg_buckets.values():
            yield from list_nested_tensors(bucket.buffer)
    yield from list_nested_tensors(vars(zero))


def _find_places(engine: Any) -> Iterator[Place]:
    """The place of each parameter that this rank has a part of."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        for group in engine.optimizer.param_groups:
            for parameter in group["params"]:
                yield Place(parameter, parameter, 0, 0, parameter.numel())
    elif stage < 3:
        yield from _find_fragments(engine.optimizer)
    else:
        yield from _find_partitions(engine.optimizer)


def _find_fragments(zero: Any) -> Iterator[Place]:
    """Stages 1 and 2: a rank has a range of all parameters laid end to end."""
    if hasattr(zero, "fp32_groups_flat_partition"):  # `BF16_Optimizer`, at stage 1
        flats = zero.fp32_groups_flat_partition
        groups = zero.bf16_groups
    else:
        flats = zero.single_partition_of_fp32_groups
        groups = zero.bit16_groups
    for flat, parameters in zip(flats, groups, strict=True):
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:
                there = mapping.lp_fragment_address
                offset = mapping.hp_fragment_address.start
                yield Place(parameter, flat, offset, there.start, there.start + there.numel)


def _find_partitions(zero: Any) -> Iterator[Place]:
    """Stage 3: a rank has a range of each parameter."""
    for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        offset = 0
        for parameter in parameters:
            size = parameter.ds_tensor.ds_numel
            start, stop = _find_range(parameter, size)
            yield Place(parameter, flat, offset, start, stop)
            offset += size

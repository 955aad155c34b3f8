"""Which part of a tensor each rank holds, and how the parts come together on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from open_instruct.models.names import clean_name, is_of_adapter

Box = tuple[slice, ...]
"""One range for every dim of a tensor."""


def shard_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """The part of a tensor of `shape` that the rank at `coordinate` of the mesh holds, always one box.

    Tensor parallelism cuts a parameter before FSDP cuts what is left of it, although FSDP's axis comes
    first in the mesh; where both cut the same dim, FSDP marks its own cut as strided. Every cut is
    `torch.chunk`'s: ceil(size / ranks) each, the last ones shorter or empty.

    Example: 8 rows over tensor degree 2, then FSDP degree 2; the mesh is (FSDP, tensor)::

        >>> shard_box((8,), (2, 2), (1, 0), (_StridedShard(0, split_factor=2), Shard(0)))
        (slice(2, 4),)
    """
    starts, stops = [0] * len(shape), list(shape)
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    for axis in sorted(axes, key=lambda axis: isinstance(placements[axis], _StridedShard)):
        dim = getattr(placements[axis], "dim", None)
        assert dim is not None, f"a parameter is sharded or replicated, never {placements[axis]}"
        size = -(-(stops[dim] - starts[dim]) // mesh_shape[axis])
        start = min(starts[dim] + coordinate[axis] * size, stops[dim])
        starts[dim], stops[dim] = start, min(start + size, stops[dim])
    return tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def local_part(tensor: Held) -> torch.Tensor:
    """What this rank holds of `tensor`; an ordinary tensor itself. Shares storage."""
    if isinstance(tensor, FlatRange):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def own_box(tensor: Held) -> Box:
    """The part of `tensor` that this rank holds: of an ordinary tensor, the whole. A range is one of a single row."""
    if isinstance(tensor, FlatRange):
        return (slice(*tensor.ranges[tensor.rank]),)
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the tensor's mesh"
    box = shard_box(tensor.shape, tuple(tensor.device_mesh.shape), coordinate, tensor.placements)
    assert box_shape(box) == tuple(tensor.to_local().shape), "the shard's shape does not follow from its placements"
    return box


def reshard(model: nn.Module) -> None:
    """Make every parameter a shard again.

    FSDP2 leaves the parameters of the root module gathered after a forward without a backward: whoever
    reads parameters (export, weight sync, checkpoints) calls this first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRange:
    """What this rank holds of a tensor of `shape`: a run of its values, counted row by row. `ranges` are all ranks'.

    A matrix may be cut along its columns into `num_slabs`, whose values are counted slab by slab.

    Example: the last two of three values on rank 1, `FlatRange(local=…, shape=(3,), ranges=((0, 1), (1, 3)), rank=1)`.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    ranges: Sequence[tuple[int, int]]
    rank: int
    num_slabs: int = 1

    def counted(self, whole: torch.Tensor) -> torch.Tensor:
        """The values of `whole` in the order in which `ranges` count them."""
        return whole.unflatten(-1, (self.num_slabs, -1)).movedim(-2, 0).reshape(-1)


def in_order(values: torch.Tensor, num_slabs: int) -> torch.Tensor:
    """Of values that were counted slab by slab the tensor; it has the shape already. Of a single slab a view."""
    return values.view(num_slabs, *values.shape[:-1], -1).movedim(0, -2).reshape(values.shape)


Held = torch.Tensor | FlatRange
"""What a rank holds of a parameter: the whole, the box of a DTensor, or a range."""


def held(parameter: torch.Tensor) -> Held:
    """What this rank holds of a parameter: the parameter itself, or the `flat_range` that it has beside it."""
    beside: Held = getattr(parameter, "flat_range", parameter)
    return beside


def held_of(model: nn.Module, *, of_adapters: bool = False) -> dict[str, Held]:
    """`held` of each parameter, by OLMo-core's names.

    Adapters are no part of the model that a checkpoint is read into, and written from; `of_adapters` are theirs alone.
    """
    parameters = model.named_parameters()
    return {clean_name(name): held(each) for name, each in parameters if is_of_adapter(name) == of_adapters}


def own_values(tensor: Held, whole: torch.Tensor) -> torch.Tensor:
    """Of `whole`, of which this rank holds `tensor`: the values that go there, in the shape of `local_part`."""
    return (tensor.counted(whole) if isinstance(tensor, FlatRange) else whole)[own_box(tensor)]


def whole_of(tensor: Held) -> torch.Tensor:
    """The whole, on every rank, where it is held. Collective; of a range, no two ranks may hold the same values."""
    if not isinstance(tensor, FlatRange):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    assert sum(stop - start for start, stop in tensor.ranges) == math.prod(tensor.shape)
    whole = tensor.local.new_zeros(math.prod(tensor.shape))
    whole[own_box(tensor)] = tensor.local
    dist.all_reduce(whole)
    return in_order(whole.view(tensor.shape), tensor.num_slabs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A tensor that is to come together, cast to `dtype`, on the CPU of global rank `owner`."""

    owner: int
    tensor: Held
    dtype: torch.dtype


@torch.no_grad()
def deliver(deliveries: Sequence[Delivery]) -> torch.Tensor | None:
    """Bring several tensors together at once, each on an owner of its own; return this rank's, if it has one.

    Shards are cast before they travel, and go point to point from the ranks that share one copy of the
    model with the owner; other replicas do nothing. All sends and receives are posted together, so no
    order of them can make ranks wait in a circle. Every rank calls this with the same owners, parameters
    and dtypes. Peak memory beside the shards: the rank's own whole tensor, and its shards of the others.
    """
    assert len({delivery.owner for delivery in deliveries}) == len(deliveries), "one tensor an owner"
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole: torch.Tensor | None = None
    mine: Held | None = None
    posted: list[dist.P2POp] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for delivery in deliveries:
        tensor = delivery.tensor
        if not isinstance(tensor, DTensor | FlatRange):
            if rank == delivery.owner:
                whole = tensor.detach().to("cpu", delivery.dtype).contiguous()
            continue
        boxes = boxes_beside(tensor, delivery.owner)
        if rank not in boxes:
            continue
        local = local_part(tensor)
        if rank != delivery.owner:
            if local.numel() > 0:
                posted.append(dist.P2POp(dist.isend, _as_bytes(local.to(delivery.dtype).contiguous()), delivery.owner))
            continue
        whole = torch.empty(tensor.shape, dtype=delivery.dtype, device="cpu")
        target, mine = whole.view(-1) if isinstance(tensor, FlatRange) else whole, tensor
        for peer, box in boxes.items():
            part = target[box]
            if peer == rank:
                part.copy_(local)
            elif part.numel() > 0:
                in_place = local.device.type == "cpu" and part.is_contiguous()
                received = part if in_place else torch.empty(part.shape, dtype=part.dtype, device=local.device)
                posted.append(dist.P2POp(dist.irecv, _as_bytes(received), peer))
                if not in_place:
                    arriving.append((part, received))
    if posted:
        for work in dist.batch_isend_irecv(posted):
            work.wait()
    for part, received in arriving:
        part.copy_(received)
    return in_order(whole, mine.num_slabs) if isinstance(mine, FlatRange) and whole is not None else whole


def boxes_beside(tensor: Held, owner: int) -> dict[int, Box]:
    """The box of every rank that shares one copy of `tensor` with `owner`; none if its mesh has no `owner`.

    (With tensor parallelism, a parameter that it leaves whole has a mesh for each tensor rank, and the
    owner gathers in its own.)
    """
    if isinstance(tensor, FlatRange):
        # Where ranks split other matrices, several hold the same values of this one.
        holder = {both: rank for rank, both in enumerate(tensor.ranges)} | {tensor.ranges[owner]: owner}
        return {rank: (slice(*both),) for both, rank in holder.items()}
    if not isinstance(tensor, DTensor):
        return {owner: own_box(tensor)}
    ranks = tensor.device_mesh.mesh
    places = dict(zip(ranks.flatten().tolist(), product(*map(range, ranks.shape)), strict=True))
    if owner not in places:
        return {}
    mesh_shape = tuple(tensor.device_mesh.shape)
    replicated = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return {
        peer: shard_box(tensor.shape, mesh_shape, place, tensor.placements)
        for peer, place in places.items()
        if all(place[axis] == places[owner][axis] for axis in replicated)
    }


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)

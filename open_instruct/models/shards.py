"""Which part of a tensor each rank holds, and how the parts come together on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

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


def own_box(tensor: DTensor) -> Box:
    """The part of `tensor` that this rank holds."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the tensor's mesh"
    box = shard_box(tensor.shape, tuple(tensor.device_mesh.shape), coordinate, tensor.placements)
    assert box_shape(box) == tuple(tensor.to_local().shape), "the shard's shape does not follow from its placements"
    return box


def coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Place in the mesh of every global rank in it, in the mesh's order."""
    return {int(mesh.mesh[tuple(place)]): tuple(place) for place in (mesh.mesh >= 0).nonzero().tolist()}


def reshard(model: nn.Module) -> None:
    """Make every parameter a shard again.

    FSDP2 leaves the parameters of the root module gathered after a forward without a backward: whoever
    reads parameters (export, weight sync, checkpoints) calls this first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather_to(owner: int, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The whole of `tensor`, cast to `dtype`, on the CPU of global rank `owner`; None on the other ranks.

    Shards are cast before they travel, and go point to point from the ranks that share one copy of the
    model with the owner; other replicas do nothing. Every rank calls this for the same tensors in the
    same order. Peak memory beside the shards: the whole tensor on the owner, and one shard of it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", dtype).contiguous() if rank == owner else None
    places = coordinates(tensor.device_mesh)
    if owner not in places:
        return None  # the owner has a copy in a mesh of its own

    def copy_of_model(peer: int) -> list[int]:
        return [places[peer][axis] for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]

    if copy_of_model(rank) != copy_of_model(owner):
        return None
    local = tensor.to_local()
    if rank != owner:
        if local.numel() > 0:
            dist.send(_as_bytes(local.to(dtype).contiguous()), owner)
        return None
    whole = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    mesh_shape = tuple(tensor.device_mesh.shape)
    for peer, place in places.items():
        box = shard_box(tensor.shape, mesh_shape, place, tensor.placements)
        part = whole[box]
        if copy_of_model(peer) != copy_of_model(owner) or part.numel() == 0:
            continue
        if peer == owner:
            part.copy_(local)
        elif local.device.type == "cpu" and part.is_contiguous():
            dist.recv(_as_bytes(part), peer)
        else:
            received = torch.empty(part.shape, dtype=dtype, device=local.device)
            dist.recv(_as_bytes(received), peer)
            part.copy_(received)
    return whole


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)

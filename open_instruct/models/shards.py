"""Which part of a tensor each rank holds, and how the parts come together on one rank."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from open_instruct.core.boxes import Box, box_shape
from open_instruct.models.hf.names import (
    CODES,
    SCALES,
    clean_name,
    is_adapter_name,
    is_expert_stack,
)
from open_instruct.models.nf4 import dequantize, quantize


def shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """The box of a tensor of `shape` that the rank at `coordinate` of the mesh holds.

    Tensor parallelism cuts a parameter first, and FSDP cuts the remaining part, although FSDP's
    axis comes first in the mesh; where both cut the same dim, FSDP marks its own cut as strided.
    Every cut is `torch.chunk`'s: ceil(size / ranks) each, the last ones shorter or empty.

    Example: 8 rows over tensor degree 2, then FSDP degree 2; the mesh is (FSDP, tensor)::

        >>> shard_box((8,), (2, 2), (1, 0), (_StridedShard(0, split_factor=2), Shard(0)))
        (slice(2, 4),)
    """
    starts = [0] * len(shape)
    stops = list(shape)
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    axes.sort(key=lambda axis: isinstance(placements[axis], _StridedShard))
    for axis in axes:
        dim = getattr(placements[axis], "dim", None)
        assert dim is not None, f"a parameter is sharded or replicated, never {placements[axis]}"
        size = -(-(stops[dim] - starts[dim]) // mesh_shape[axis])
        start = min(starts[dim] + coordinate[axis] * size, stops[dim])
        starts[dim] = start
        stops[dim] = min(start + size, stops[dim])
    return tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))


def select_box(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of `whole` in `box`.

    A box of one range is a run of the flattened values of any tensor.
    """
    values = whole if len(box) == whole.dim() else whole.view(-1)
    return values[box]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds, sharing storage; an ordinary tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.detach()


def find_local_box(tensor: torch.Tensor) -> Box:
    """The box of `tensor` that this rank holds; all of an ordinary tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the tensor's mesh"
    box = shard_box(tensor.shape, tuple(tensor.device_mesh.shape), coordinate, tensor.placements)
    assert box_shape(box) == tuple(tensor.to_local().shape), (
        "the shard's shape does not follow from its placements"
    )
    return box


def reshard(model: nn.Module) -> None:
    """Make every parameter a shard again.

    FSDP2 leaves the parameters of the root module gathered after a forward without a backward:
    whoever reads parameters (export, weight sync, checkpoints) calls this first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    eq=False,
)
class LocalShard:
    """This rank's part of a tensor: the values in `box` of it (see `select_box`).

    A matrix may be cut along its columns into `num_slabs`, whose values then lie slab after slab.

    Example: row 1 of two,
    `LocalShard(stored=tensor([3, 4]), shape=(2, 2), box=(slice(1, 2), slice(0, 2)), find_boxes=…)`.

    :param shape: of the whole tensor.
    :param find_boxes: given a rank, the box of each rank that shares a copy of the tensor with it;
        see `find_copy_boxes`.
    :param scales: of a matrix in 4 bits, which is stored as codes; see `nf4.py`.
    """

    stored: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    find_boxes: Callable[[int], Mapping[int, Box]]
    num_slabs: int = 1
    scales: torch.Tensor | None = None

    @property
    def local(self) -> torch.Tensor:
        """The values: of a matrix in 4 bits new ones at each call, else those that are stored."""
        if self.scales is None:
            return self.stored
        return dequantize(self.stored, self.scales)

    @property
    def values_to_check(self) -> torch.Tensor:
        """Values, cheap to get, that are all finite where those of `local` are, else NaN or inf."""
        return self.stored if self.scales is None else self.scales

    def fill(self, rows: slice, values: torch.Tensor) -> None:
        """Store `values` in some rows of `local`."""
        if self.scales is not None:
            values, scales = quantize(values.to(self.stored.device), self.scales.dtype)
            self.scales[rows].copy_(scales)
        self.stored[rows].copy_(values)

    def split_rows(self, name: str) -> Iterator[tuple[str, "LocalShard"]]:
        """This rank's part of each tensor that the parameter is in files."""
        stack = replace(self, find_boxes=cache(self.find_boxes))
        for row_name, index in find_stack_rows(name, self.shape).items():
            yield row_name, self if index is None else stack._row(index)

    def _row(self, index: int) -> "LocalShard":
        assert self.num_slabs == 1, "stacks are not cut along their columns"
        num_values = math.prod(self.shape[1:])
        if len(self.box) == 1:
            start = index * num_values - self.box[0].start
            local = self.local.view(-1)[max(start, 0) : max(start + num_values, 0)]
        else:
            local_index = index - self.box[0].start
            if 0 <= local_index < len(self.local):
                local = self.local[local_index]
            else:
                local = self.local[:0].flatten(0, 1)

        def find_boxes(owner: int) -> Mapping[int, Box]:
            boxes = self.find_boxes(owner)
            return {rank: _cut_row(box, index, num_values) for rank, box in boxes.items()}

        return LocalShard(
            stored=local,
            shape=self.shape[1:],
            box=_cut_row(self.box, index, num_values),
            find_boxes=find_boxes,
        )

    def read_rows(self, read: Callable[[Box], torch.Tensor], rows: slice) -> torch.Tensor:
        """The values of some rows of `local`, which `read` reads as a box of the whole tensor.

        Of a shard that is a run of values, a row is one of them.
        """
        assert self.num_slabs == 1, "columns of slabs are cut from the whole tensor"
        first, *others = self.box
        cut = slice(first.start + rows.start, min(first.start + rows.stop, first.stop))
        if len(self.box) == len(self.shape):
            return read((cut, *others))
        num_values = math.prod(self.shape[1:])
        top = cut.start // num_values
        bottom = -(-cut.stop // num_values)
        columns = (slice(0, size) for size in self.shape[1:])
        run = slice(cut.start - top * num_values, cut.stop - top * num_values)
        return read((slice(top, bottom), *columns)).reshape(-1)[run]

    def values(self, whole: torch.Tensor) -> torch.Tensor:
        """The values of the contiguous tensor `whole` that belong in `local`."""
        slabs = whole.unflatten(-1, (self.num_slabs, -1)).movedim(-2, 0)
        return select_box(slabs.reshape(whole.shape), self.box)


def _cut_row(box: Box, index: int, num_values: int) -> Box:
    """The part of row `index`, of `num_values`, that a box of the tensor has; it may be empty."""
    if len(box) == 1:
        first = index * num_values
        start = min(max(box[0].start - first, 0), num_values)
        stop = min(max(box[0].stop - first, 0), num_values)
        return (slice(start, stop),)
    if box[0].start <= index < box[0].stop:
        return box[1:]
    return (slice(0, 0), *box[2:])


def join_slabs(values: torch.Tensor, num_slabs: int) -> torch.Tensor:
    """Put values that lie slab after slab in the tensor's order; a view for one slab."""
    return values.view(num_slabs, *values.shape[:-1], -1).movedim(0, -2).reshape(values.shape)


def find_local_shard(parameter: torch.Tensor) -> LocalShard:
    """This rank's part of a parameter; a backend may have attached it as `local_shard`."""
    attached: LocalShard | None = getattr(parameter, "local_shard", None)
    if attached is not None:
        return attached
    find_boxes = partial(find_copy_boxes, parameter)
    return LocalShard(
        stored=local_part(parameter),
        shape=tuple(parameter.shape),
        box=find_local_box(parameter),
        find_boxes=find_boxes,
    )


def make_4_bit_shard(codes: torch.Tensor, scales: torch.Tensor) -> LocalShard:
    """This rank's part of the matrix that two parameters of a `FrozenLinear` hold.

    Both are cut alike, by rows alone.
    """
    shard = find_local_shard(codes)
    columns = slice(0, 2 * codes.shape[1])

    def find_boxes(owner: int) -> Mapping[int, Box]:
        return {rank: (rows, columns) for rank, (rows, _) in shard.find_boxes(owner).items()}

    shape = (codes.shape[0], columns.stop)
    return replace(
        shard,
        shape=shape,
        box=(shard.box[0], columns),
        find_boxes=find_boxes,
        scales=local_part(scales),
    )


def flat_shard(
    local: torch.Tensor,
    shape: tuple[int, ...],
    ranges: Sequence[tuple[int, int]],
    *,
    rank: int,
    num_slabs: int = 1,
) -> LocalShard:
    """This rank's part of a tensor of which each rank has a run of values, `ranges[rank]`.

    Ranks may share one.

    Example: the last two of three values, `flat_shard(…, (3,), ((0, 1), (1, 3)), rank=1)`.
    """

    def find_boxes(owner: int) -> Mapping[int, Box]:
        holder = {run: rank for rank, run in enumerate(ranges)} | {ranges[owner]: owner}
        return {rank: (slice(*run),) for run, rank in holder.items()}

    box = (slice(*ranges[rank]),)
    return LocalShard(
        stored=local,
        shape=shape,
        box=box,
        find_boxes=find_boxes,
        num_slabs=num_slabs,
    )


def find_local_shards(model: nn.Module, *, adapters_only: bool = False) -> dict[str, LocalShard]:
    """This rank's shard of each tensor of `model`, by OLMo-core's names.

    A stack of experts' matrices is a tensor for each expert. A checkpoint is read into, and
    written from, the model without its adapters; with `adapters_only`, theirs alone.
    """
    parameters = {clean_name(name): each for name, each in model.named_parameters()}
    names = [name for name in parameters if is_adapter_name(name) == adapters_only]
    shards = {
        name: find_local_shard(parameters[name])
        for name in names
        if not name.endswith((CODES, SCALES))
    }
    for name in names:
        if name.endswith(CODES):
            layer = name.removesuffix(CODES)
            scales = parameters[f"{layer}{SCALES}"]
            shards[f"{layer}.weight"] = make_4_bit_shard(parameters[name], scales)
    rows: dict[str, LocalShard] = {}
    for name, shard in shards.items():
        rows.update(shard.split_rows(name))
    return rows


def find_stack_rows(name: str, shape: Sequence[int]) -> dict[str, int | None]:
    """The names that a parameter has in files, each with its row of a stack of matrices.

    A parameter that is no stack has its own name, and no row.
    """
    if not is_expert_stack(name):
        return {name: None}
    return {f"{name}.{index}": index for index in range(shape[0])}


def gather_full(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Gather the whole parameter on every rank, on its device. Collective.

    :param dtype: that it is cast to before it travels; default: its own.
    """
    shard = getattr(parameter, "local_shard", None)
    if isinstance(shard, LocalShard):
        whole = shard.local.new_zeros(shard.shape, dtype=dtype)
        if dist.get_rank() in shard.find_boxes(0):
            select_box(whole, shard.box).copy_(shard.local)
        dist.all_reduce(whole)
        return join_slabs(whole, shard.num_slabs)
    local = parameter.detach().to(dtype or parameter.dtype)
    return local.full_tensor() if isinstance(local, DTensor) else local


@torch.no_grad()
def gather_to_owner(tensors: Mapping[int, tuple[LocalShard, torch.dtype]]) -> torch.Tensor | None:
    """Gather each tensor on the CPU of the rank that owns it; returns this rank's, if any.

    Shards are cast before they travel, and go point to point from the ranks that share one copy of
    the model with the owner; other replicas do nothing. All sends and receives are posted together,
    so no order of them can make ranks wait in a circle. Every rank calls this with the same owners
    (global ranks), parameters and dtypes. Peak memory beside the shards: the rank's own whole
    tensor, and its shards of the others.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole: torch.Tensor | None = None
    num_slabs = 1
    posted: list[dist.P2POp] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for owner, (tensor, dtype) in tensors.items():
        boxes = tensor.find_boxes(owner)
        if rank not in boxes:
            continue
        local = tensor.local
        if rank != owner:
            if local.numel() > 0:
                sent = _view_bytes(local.to(dtype).contiguous())
                posted.append(dist.P2POp(dist.isend, sent, owner))
            continue
        whole = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        num_slabs = tensor.num_slabs
        for peer, box in boxes.items():
            part = select_box(whole, box)
            if peer == rank:
                part.copy_(local)
            elif part.numel() > 0:
                received = part
                if local.device.type != "cpu" or not part.is_contiguous():
                    received = torch.empty(part.shape, dtype=part.dtype, device=local.device)
                    arriving.append((part, received))
                posted.append(dist.P2POp(dist.irecv, _view_bytes(received), peer))
    if posted:
        for work in dist.batch_isend_irecv(posted):
            work.wait()
    for part, received in arriving:
        part.copy_(received)
    return None if whole is None else join_slabs(whole, num_slabs)


def find_copy_boxes(tensor: torch.Tensor, owner: int) -> dict[int, Box]:
    """The box of every rank that shares one copy of `tensor` with `owner`.

    There is none if its mesh has no `owner`: with tensor parallelism, a parameter that it leaves
    whole has a mesh for each tensor rank, and the owner gathers in its own.
    """
    if not isinstance(tensor, DTensor):
        return {owner: find_local_box(tensor)}
    ranks = tensor.device_mesh.mesh
    coordinates = product(*(range(size) for size in ranks.shape))
    places = dict(zip(ranks.flatten().tolist(), coordinates, strict=True))
    if owner not in places:
        return {}
    mesh_shape = tuple(tensor.device_mesh.shape)
    replicated = [
        axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()
    ]
    boxes = {}
    for peer, place in places.items():
        if all(place[axis] == places[owner][axis] for axis in replicated):
            boxes[peer] = shard_box(tensor.shape, mesh_shape, place, tensor.placements)
    return boxes


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)

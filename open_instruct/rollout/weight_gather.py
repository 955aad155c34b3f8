"""A rank's shards into a bucket: where all ranks share memory, and where rank 0 gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from open_instruct.models.shards import Box, as_bytes, boxes_beside

GATHERER = 0
"""The global rank that holds whole buckets; the ranks that share its copy of the model are the ones that bring it."""


@dataclass(frozen=True, slots=True)
class Shards:
    """A parameter, and the box that each rank brings of it.

    A parameter that is not sharded is the gatherer's alone to bring.
    """

    parameter: torch.Tensor
    boxes: Mapping[int, Box]
    is_cut_across_rows: bool

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Shards:
        if not isinstance(parameter, DTensor):
            whole = tuple(slice(0, size) for size in parameter.shape)
            return cls(parameter, {GATHERER: whole}, False)
        dims = [getattr(placement, "dim", 0) for placement in parameter.placements]
        return cls(parameter, boxes_beside(parameter, GATHERER), any(dim > 0 for dim in dims))

    def local(self) -> torch.Tensor:
        tensor = self.parameter.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write_own(shards: Shards, whole: torch.Tensor, *, rank: int) -> None:
    """Copy what `rank` brings to its place in `whole`, cast to its dtype."""
    box = shards.boxes.get(rank)
    if box is not None:
        whole[box].copy_(shards.local())


@torch.no_grad()
def gather(
    tensors: Sequence[Shards],
    wholes: Sequence[torch.Tensor] | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
) -> None:
    """Bring `tensors` together in `wholes` on the gatherer, point to point, cast before they travel.

    Every rank calls this with the same tensors, the gatherer alone with `wholes`. All transfers are posted
    together, except that a tensor that is cut across its rows, whose parts need memory of their own until they
    are in place, ends a batch.

    Args:
        device: that parts are sent from and received on.
    """
    posted: list[dist.P2POp] = []
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, shards in enumerate(tensors):
        if wholes is not None:
            whole = wholes[index]
            write_own(shards, whole, rank=rank)
            for peer, box in shards.boxes.items():
                part = whole[box]
                if peer == rank or part.numel() == 0:
                    continue
                received = part if part.is_contiguous() else torch.empty(part.shape, dtype=dtype, device=device)
                posted.append(dist.P2POp(dist.irecv, as_bytes(received), peer))
                if received is not part:
                    staged.append((part, received))
        elif rank in shards.boxes and (local := shards.local()).numel() > 0:
            posted.append(dist.P2POp(dist.isend, as_bytes(local.to(device, dtype).contiguous()), GATHERER))
        if shards.is_cut_across_rows:
            _finish(posted, staged)
    _finish(posted, staged)


def _finish(posted: list[dist.P2POp], staged: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if posted:
        for work in dist.batch_isend_irecv(posted):
            work.wait()
    for part, received in staged:
        part.copy_(received)
    posted.clear()
    staged.clear()

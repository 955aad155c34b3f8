"""Muon for matrices and AdamW for the rest, as one optimizer with one state."""

from collections.abc import Callable, Mapping
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed.utils import get_rank
from torch import nn

from open_instruct.core.boxes import box_shape
from open_instruct.models.shards import find_copy_boxes, local_part

MOMENTUM = "momentum_buffer"  # torch's name


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon on the groups marked `use_muon`, torch's AdamW on the others.

    Muon orthogonalises the momentum of each matrix (Jordan et al., "Muon: an optimizer for hidden
    layers", 2024; step size matched to AdamW's as in Moonlight, arXiv 2502.16982, section 2.2). It
    is written for matrices only, so embeddings, head and norms stay with AdamW. Both run on the
    state and the groups of this one optimizer, which is what checkpoints save.

    A sharded matrix is gathered on one rank. The N ranks of a shard group take N matrices at a
    time: each rank receives all parts of one matrix, in the bfloat16 that torch computes in,
    orthogonalises it, and sends the parts back. So a step of float32 weights equals torch's on
    whole matrices, bit for bit. Every replica does the same work.
    """

    def __init__(self, params: Any, *, eps: float = 1e-8, **defaults: Any) -> None:
        super().__init__(params, defaults | {"use_muon": False})
        # torch's constructors fill the missing defaults into our groups.
        muon_groups = self._select_groups(use_muon=True)
        if muon_groups:
            torch.optim.Muon(muon_groups, adjust_lr_fn="match_rms_adamw")
        self._adamw: torch.optim.AdamW | None = None
        adamw_groups = self._select_groups(use_muon=False)
        if adamw_groups:
            self._adamw = torch.optim.AdamW(adamw_groups, eps=eps, foreach=False)

    def _select_groups(self, *, use_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"] is use_muon]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the train module computes the loss itself"
        for group in self._select_groups(use_muon=True):
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if not matrices:
                continue
            # Largest first: matrices that are taken together have similar sizes, so no rank waits
            # long for another.
            matrices.sort(key=lambda matrix: -matrix.numel())
            owners = list(find_copy_boxes(matrices[0], get_rank()))
            for first in range(0, len(matrices), len(owners)):
                by_owner = dict(zip(owners, matrices[first:], strict=False))
                self._step_together(by_owner, group)
        if self._adamw is not None:
            # Loading a checkpoint replaces our groups and state, so both are shared anew.
            self._adamw.param_groups = self._select_groups(use_muon=False)
            self._adamw.state = self.state
            self._adamw.step()

    def _step_together(self, by_owner: dict[int, Any], group: dict[str, Any]) -> None:
        """Step matrices that the same ranks share; each rank owns one of them, or none."""
        any_matrix = by_owner[min(by_owner)]
        matrix_here = by_owner.get(get_rank())  # the one that this rank owns
        boxes: Mapping[int, Any] = {}
        if matrix_here is not None:
            boxes = find_copy_boxes(matrix_here, get_rank())
        box_shapes = {rank: box_shape(box) for rank, box in boxes.items()}
        local_shapes = {owner: local_part(each).shape for owner, each in by_owner.items()}
        parts = {owner: self._update_momentum(each, group) for owner, each in by_owner.items()}
        parts = _exchange(parts, box_shapes, any_matrix)
        if matrix_here is not None:
            whole = parts[get_rank()].new_empty(matrix_here.shape)
            for rank, box in boxes.items():
                whole[box] = parts.pop(rank)
            whole = _orthogonalise(whole, group)
            parts = {rank: whole[box] for rank, box in boxes.items()}
        parts = _exchange(parts, local_shapes, any_matrix)
        for owner, matrix in by_owner.items():
            local = local_part(matrix)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(parts[owner], alpha=group["lr"] * _scale(matrix))

    def _update_momentum(self, matrix: Any, group: dict[str, Any]) -> torch.Tensor:
        """Add the gradient to this rank's momentum; returned is it with Nesterov's look-ahead."""
        if MOMENTUM not in self.state[matrix]:
            self.state[matrix][MOMENTUM] = torch.zeros_like(matrix.grad)
        gradient = local_part(matrix.grad)
        momentum = local_part(self.state[matrix][MOMENTUM])
        momentum.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            momentum = gradient.lerp(momentum, group["momentum"])
        return momentum.bfloat16()


def _exchange(
    parts: dict[int, torch.Tensor], shapes: dict[int, Any], matrix: Any
) -> dict[int, torch.Tensor]:
    """Exchange tensors among the ranks that share `matrix`.

    Sent are `parts` by rank, and received are tensors of `shapes` by rank.
    """
    placements = getattr(matrix, "placements", ())
    axes = [axis for axis, cut in enumerate(placements) if not cut.is_replicate()]
    if not axes:
        return parts
    # FSDP's and tensor parallelism's axes have no joint group, so there all ranks enter, and others
    # send nothing.
    group = matrix.device_mesh.get_group(axes[0]) if len(axes) == 1 else None
    ranks = dist.get_process_group_ranks(group)
    nothing = local_part(matrix).new_empty(0, dtype=torch.bfloat16)
    sent_parts = [parts.get(rank, nothing).flatten() for rank in ranks]
    sizes = [prod(shapes.get(rank, nothing.shape)) for rank in ranks]
    sent_sizes = [len(each) for each in sent_parts]
    received_parts = nothing.new_empty(sum(sizes))
    dist.all_to_all_single(received_parts, torch.cat(sent_parts), sizes, sent_sizes, group)
    by_rank = zip(ranks, received_parts.split(sizes), strict=True)
    return {rank: values.view(shapes[rank]) for rank, values in by_rank if rank in shapes}


def _orthogonalise(whole: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The orthogonalised matrix: torch's step from zero, at the rate that makes its scale 1.

    So nothing is rounded.
    """
    step = nn.Parameter(torch.zeros_like(whole))
    step.grad = whole
    settings = {
        "params": [step],
        "lr": 1 / _scale(whole),
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
    }
    torch.optim.Muon([group | settings]).step()
    return step.detach()


def _scale(matrix: torch.Tensor) -> float:
    """The factor that makes Muon's steps as large as AdamW's (`match_rms_adamw`)."""
    return 0.2 * sqrt(max(matrix.shape))

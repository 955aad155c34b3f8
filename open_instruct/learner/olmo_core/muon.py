"""Muon for matrices and AdamW for the rest, as one optimizer with one state."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from open_instruct.models.shards import own_box

MOMENTUM = "momentum_buffer"  # torch's name


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon on the groups marked `use_muon`, torch's AdamW on the others.

    Muon orthogonalises the momentum of each matrix (Jordan et al., "Muon: an optimizer for hidden
    layers", 2024; step size matched to AdamW's as in Moonlight, arXiv 2502.16982, section 2.2). It is
    written for matrices only, so embeddings, head and norms stay with AdamW. Both run on the state and
    the groups of this one optimizer, which is what checkpoints save.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "use_muon": False})
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        for use_muon in (True, False):
            # Each part fills the defaults it needs into our groups, which it shares.
            groups = self._groups(use_muon)
            if groups and use_muon:
                self._parts[True] = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")
            elif groups:
                self._parts[False] = torch.optim.AdamW(groups, foreach=False)

    def _groups(self, use_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"] is use_muon]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the train module computes the loss itself"
        for use_muon, part in self._parts.items():
            # Loading a checkpoint replaces our groups and state, so both are shared anew.
            part.param_groups = self._groups(use_muon)
            part.state = self.state
            if use_muon:
                part.param_groups = [self._without_few_rows(group) for group in part.param_groups]
            part.step()

    def _without_few_rows(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group without the matrices that have fewer rows than shards, whose step is taken here.

        Where ranks hold nothing of a matrix, DTensor cannot put torch's whole update back into shards. These are small:
        every rank takes the step of the whole, and keeps its rows.
        """
        by_kind: dict[bool, list[Any]] = {True: [], False: []}
        for matrix in group["params"]:
            by_kind[matrix.grad is not None and _has_few_rows(matrix)].append(matrix)
        if few := by_kind[True]:
            wholes = [nn.Parameter(matrix.full_tensor()) for matrix in few]
            muon = torch.optim.Muon([{**group, "params": wholes}])
            for matrix, whole in zip(few, wholes, strict=True):
                whole.grad = matrix.grad.full_tensor()
                momentum = self.state[matrix].setdefault(MOMENTUM, torch.zeros_like(matrix.grad))
                muon.state[whole][MOMENTUM] = momentum.full_tensor()
            muon.step()
            for matrix, whole in zip(few, wholes, strict=True):
                own = own_box(matrix)
                matrix.to_local().copy_(whole[own])
                self.state[matrix][MOMENTUM].to_local().copy_(muon.state[whole][MOMENTUM][own])
        return {**group, "params": by_kind[False]}


def _has_few_rows(matrix: torch.Tensor) -> bool:
    if not isinstance(matrix, DTensor):
        return False
    cuts = zip(matrix.placements, matrix.device_mesh.shape, strict=True)
    return matrix.shape[0] < prod(size for placement, size in cuts if placement.is_shard(0))

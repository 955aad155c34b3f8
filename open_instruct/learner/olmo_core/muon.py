"""Muon for matrices and AdamW for the rest, as one optimizer with one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
            part.step()

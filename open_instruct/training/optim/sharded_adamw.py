"""torch's AdamW, on the parts of sharded weights that this rank holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.optim import AdamWConfig
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from open_instruct.models.shards import local_part


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, whose kernel is given this rank's parts of weights and moments.

    It works value by value, so the steps are torch's own, to the bit. Given the DTensors
    themselves, torch would first work out for every weight how it may be sharded in such a call, in
    the first step of every rank.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the train module computes the loss itself"
        for group in self.param_groups:
            assert not group["amsgrad"], "its third moment is not kept"
            weights = [weight for weight in group["params"] if weight.grad is not None]
            states = [self._prepare_state(weight) for weight in weights]
            beta, beta_sq = group["betas"]
            adamw(
                [local_part(weight) for weight in weights],
                [_find_gradient(weight) for weight in weights],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=group["fused"],
                amsgrad=False,
                beta1=beta,
                beta2=beta_sq,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )

    def _prepare_state(self, weight: torch.Tensor) -> dict[str, Any]:
        """The state of a weight, which its first step makes as torch's AdamW does."""
        state: dict[str, Any] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state


def _find_gradient(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, which FSDP2 shards as the weight."""
    gradient = weight.grad
    assert gradient is not None
    if isinstance(weight, DTensor):
        assert isinstance(gradient, DTensor) and gradient.placements == weight.placements
    return local_part(gradient)


@dataclass
class ShardedAdamWConfig(AdamWConfig):
    """OLMo-core's settings, for our `ShardedAdamW`."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.AdamW]:
        return ShardedAdamW

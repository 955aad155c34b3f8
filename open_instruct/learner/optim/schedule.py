"""The learning rate of the step that comes, as OLMo-core's schedulers have it."""

from __future__ import annotations

import torch
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train import Trainer


def set_learning_rate(
    optim: torch.optim.Optimizer | None, scheduler: Scheduler | None, trainer: Trainer
) -> float | torch.Tensor:
    """Give every group of the optimizer its own; returns that of the first group, which has most of the weights."""
    assert optim is not None
    rates = [group["lr"] if scheduler is None else scheduler.set_lr(group, trainer) for group in optim.param_groups]
    return rates[0]

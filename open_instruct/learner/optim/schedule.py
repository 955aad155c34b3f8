"""The learning rate of the coming step, from OLMo-core's schedulers."""

from __future__ import annotations

import torch
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train import Trainer


def set_learning_rate(
    optim: torch.optim.Optimizer | None, scheduler: Scheduler | None, trainer: Trainer
) -> float | torch.Tensor:
    """Set the learning rate of every group of the optimizer. Returns that of the first, which has most weights."""
    assert optim is not None
    rates = [group["lr"] if scheduler is None else scheduler.set_lr(group, trainer) for group in optim.param_groups]
    return rates[0]

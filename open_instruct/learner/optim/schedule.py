"""The learning rate of the step that comes, as OLMo-core's schedulers have it."""

from __future__ import annotations

import torch
from olmo_core.train.train_module import TransformerTrainModule


def set_learning_rate(module: TransformerTrainModule) -> float | torch.Tensor:
    """Give every group of the optimizer its own; returns that of the first group, which has most of the weights."""
    assert module.optim is not None
    rates = [
        group["lr"] if module.scheduler is None else module.scheduler.set_lr(group, module.trainer)
        for group in module.optim.param_groups
    ]
    return rates[0]

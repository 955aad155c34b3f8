"""Every use of OLMo-core's private attributes is in this file, with the reason for it.

OLMo-core's `Trainer.fit` asks a loader for batches and reads one metric record a step. GRPO's steps come from a driver,
have several updates each, and send their metrics to another process. So the loop is ours, and the functions here do the
work that `fit` does between steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train import Trainer
from olmo_core.train.callbacks import Callback


def pass_on_metrics(trainer: Trainer) -> None:
    """Give the metrics recorded since the last call to the callbacks' `log_metrics`, as `fit` does after a step."""
    trainer._log_metrics()


@dataclass
class SkipStepHistory(Callback):
    """Carries a skip-step optimizer's rolling window over a restart; OLMo-core leaves it out of its state."""

    def _optimizer(self) -> SkipStepOptimizer | None:
        optimizer = getattr(self.trainer.train_module, "optim", None)
        return optimizer if isinstance(optimizer, SkipStepOptimizer) else None

    def state_dict(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        return {
            "losses": [float(loss) for loss in optimizer._losses],
            "grad_norms": [float(norm) for norm in optimizer._grad_norms],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not state_dict:
            return
        optimizer._losses = [torch.tensor(loss, device=optimizer.device) for loss in state_dict["losses"]]
        optimizer._grad_norms = [torch.tensor(norm, device=optimizer.device) for norm in state_dict["grad_norms"]]

"""`SFTTrainModule`, `DPOTrainModule`, `GRPOTrainModule`:

OLMo-core's train module with an objective bound to it.
"""

from typing import Any

from olmo_core.distributed.utils import get_local_rank

from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.objectives import dpo, policy_gradient
from open_instruct.objectives.objective import BoundLoss
from open_instruct.objectives.sft import CrossEntropy
from open_instruct.parallel.triton_cache import set_triton_cache
from open_instruct.training.backend import Metrics
from open_instruct.training.olmo_core.fsdp2 import FSDP2Backend
from open_instruct.training.policy import Policy


class ObjectiveTrainModule(FSDP2Backend):
    """A train module for OLMo-core's own `Trainer`: a batch is `{"step": StepBatch}`, see
    `batching/steps.py`.

    Args:
        loss: the objective's, bound to its settings.
        olmo_core: `FSDP2Backend`'s.
    """

    def __init__(self, *, loss: BoundLoss, **olmo_core: Any) -> None:
        super().__init__(**olmo_core)
        set_triton_cache(get_local_rank())
        self.policy = Policy(self, loss)

    def pre_train(self) -> None:
        """OLMo-core checks here that batches divide evenly in tokens; ours are planned in
        documents.
        """

    def global_num_flops_in_batch(self, batch: dict[str, Any]) -> int | None:
        return None

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        assert not dry_run, "the loader has no mock batch"
        self._record(self.policy.forward_backward(batch["step"]))

    def optim_step(self) -> None:
        self._record(self.policy.update())

    def _record(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.trainer.record_metric(name, value)


class SFTTrainModule(ObjectiveTrainModule):
    """Supervised tuning; every argument is `FSDP2Backend`'s."""

    def __init__(self, **olmo_core: Any) -> None:
        super().__init__(loss=CrossEntropy(), **olmo_core)


class DPOTrainModule(ObjectiveTrainModule):
    """Preference tuning; every other argument is `FSDP2Backend`'s.

    :param loss: which preference loss, and its settings.
    """

    def __init__(self, *, loss: PreferenceLossSection, **olmo_core: Any) -> None:
        super().__init__(loss=dpo.bind(loss), **olmo_core)


class GRPOTrainModule(ObjectiveTrainModule):
    """Policy gradients on sampled completions; every other argument is `FSDP2Backend`'s.

    :param loss: which policy loss, and its settings.
    :param temperature: of sampling; all log-probs are taken under it.
    :param response_length: tokens that a completion may have at most; the denominator of dr_grpo.
    """

    def __init__(
        self,
        *,
        loss: PolicyLossSection,
        temperature: float,
        response_length: int,
        **olmo_core: Any,
    ) -> None:
        bound = policy_gradient.bind(loss, temperature=temperature, response_length=response_length)
        super().__init__(loss=bound, **olmo_core)

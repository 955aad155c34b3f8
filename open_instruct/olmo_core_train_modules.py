"""`SFTTrainModule`, `DPOTrainModule`, `GRPOTrainModule`: OLMo-core's train module with an objective bound to it."""

from __future__ import annotations

from typing import Any

from open_instruct.config.rollout_sections import PolicyLossSection
from open_instruct.config.sections import PreferenceLossSection
from open_instruct.learner.olmo_core.train_module import ObjectiveTrainModule
from open_instruct.objectives import dpo, policy_gradient
from open_instruct.objectives.objective import BoundLoss
from open_instruct.objectives.sft import cross_entropy


class SFTTrainModule(ObjectiveTrainModule):
    """Supervised tuning; every argument is `TransformerTrainModule`'s."""

    def __init__(self, **olmo_core: Any) -> None:
        super().__init__(loss=BoundLoss(function=cross_entropy), **olmo_core)


class DPOTrainModule(ObjectiveTrainModule):
    """Preference tuning; every other argument is `TransformerTrainModule`'s.

    :param loss: which preference loss, and its settings.
    """

    def __init__(self, *, loss: PreferenceLossSection, **olmo_core: Any) -> None:
        super().__init__(loss=dpo.bind(loss), **olmo_core)


class GRPOTrainModule(ObjectiveTrainModule):
    """Policy gradients on sampled completions; every other argument is `TransformerTrainModule`'s.

    :param loss: which policy loss, and its settings.
    :param temperature: of sampling; all log-probs are taken under it.
    :param response_length: tokens that a completion may have at most; the denominator of dr_grpo.
    """

    def __init__(self, *, loss: PolicyLossSection, temperature: float, response_length: int, **olmo_core: Any) -> None:
        bound = policy_gradient.bind(loss, temperature=temperature, response_length=response_length)
        super().__init__(loss=bound, **olmo_core)

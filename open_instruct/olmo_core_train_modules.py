"""One optimisation step each: `DPOTrainModule`.

P preference pairs, S = 2P documents of a microbatch (chosen first).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from olmo_core.utils import move_to_device

from open_instruct.config.sections import PreferenceLossSection
from open_instruct.errors import RunError
from open_instruct.losses.preference import PreferenceLossInputs, PreferenceLossOutputs, preference_loss
from open_instruct.records import Metric, PreferenceBatch
from open_instruct.training.forward import sequence_logprobs
from open_instruct.training.preference_loader import PreferenceStep
from open_instruct.training.train_module import SegmentTrainModule


class DPOTrainModule(SegmentTrainModule):
    """Preference tuning on OLMo-core's train module; every other argument is `TransformerTrainModule`'s.

    :param loss: which preference loss, and its settings.
    """

    def __init__(self, *, loss: PreferenceLossSection, **olmo_core: Any) -> None:
        super().__init__(**olmo_core)
        self.loss = loss

    def microbatch_loss(
        self, microbatch: PreferenceBatch, step: PreferenceStep
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        outputs = self.preference_outputs(microbatch)
        loss = outputs.losses_P.sum() / step.num_pairs_global
        return loss, preference_metrics(outputs)

    def preference_outputs(self, microbatch: PreferenceBatch) -> PreferenceLossOutputs:
        """Losses and rewards of each pair of `microbatch` under the current policy."""
        logprobs = sequence_logprobs(self.model, microbatch.packed, device=self.device)
        chosen_logps_P, rejected_logps_P = logprobs.sums_S.view(2, -1)
        chosen_lengths_P, rejected_lengths_P = logprobs.lengths_S.view(2, -1)
        return preference_loss(
            self.loss.loss_type,
            PreferenceLossInputs(
                policy_chosen_logps_P=chosen_logps_P,
                policy_rejected_logps_P=rejected_logps_P,
                chosen_lengths_P=chosen_lengths_P,
                rejected_lengths_P=rejected_lengths_P,
                reference_chosen_logps_P=move_to_device(microbatch.reference_chosen_logps_P, self.device),
                reference_rejected_logps_P=move_to_device(microbatch.reference_rejected_logps_P, self.device),
            ),
            beta=self.loss.beta,
            label_smoothing=self.loss.label_smoothing,
            gamma_beta_ratio=self.loss.gamma_beta_ratio,
        )

    def _check(self, loss: float) -> None:
        super()._check(loss)
        expected = loss_at_reference(self.loss)
        if self.trainer.global_step != 1 or expected is None:
            return
        # Policy and reference are the same weights before the first update: the cheapest proof that
        # packing, labels and the reference cache agree.
        in_float32 = self.dp_config is None or self.dp_config.param_dtype == "float32"
        tolerance = (1e-3 if in_float32 else 5e-2) * max(1.0, expected)
        if abs(loss - expected) > tolerance:
            raise RunError(
                f"the first loss is {loss:.6f}, but a policy equal to its reference has {expected:.6f}: the "
                "reference log-probs do not belong to these weights and rows. Remove the folder "
                "'reference_logprobs' in --cache_dir and start again"
            )


def loss_at_reference(loss: PreferenceLossSection) -> float | None:
    """The loss of a policy that equals its reference; None where it depends on the policy."""
    return {
        "dpo": math.log(2.0),
        "dpo_norm": math.log(2.0),
        "hinge": 1.0,
        "ipo": 1.0 / (4.0 * loss.beta**2),
    }.get(loss.loss_type)


def preference_metrics(outputs: PreferenceLossOutputs) -> dict[str, Metric]:
    """Means over the pairs of a microbatch, weighted by their number."""
    num_pairs = float(outputs.losses_P.numel())
    margins_P = outputs.chosen_rewards_P - outputs.rejected_rewards_P
    values_P = {
        "loss": outputs.losses_P.detach(),
        "rewards/chosen": outputs.chosen_rewards_P,
        "rewards/rejected": outputs.rejected_rewards_P,
        "rewards/margin": margins_P,
        "rewards/accuracy": (margins_P > 0).float(),
        "logps/chosen": outputs.chosen_logps_P,
        "logps/rejected": outputs.rejected_logps_P,
    }
    return {
        name: Metric(value=value_P.sum() / max(num_pairs, 1.0), weight=num_pairs) for name, value_P in values_P.items()
    }

"""DPO with a loss of your own: the objective stays, and another loss is bound to it.

open-instruct tiny-model tiny --family olmo2 && python examples/own_loss.py tiny OUT
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.core.batch_values import PreferenceValues
from open_instruct.core.records import Batch, mean_metrics
from open_instruct.notebook import fit
from open_instruct.objectives.dpo import DPOConfig, DPOObjective, preference_inputs
from open_instruct.objectives.objective import BoundLoss, LossOutputs, TokenLogprobs

ANSWERS = {"Name a prime.": ("7", "8"), "Name a colour.": ("Red", "Bread")}


@dataclass(frozen=True, kw_only=True)
class SquaredMarginLoss(BoundLoss):
    """(1 - beta m)^2 / 2 for each pair, where m is the margin of log-ratios to the reference."""

    values_class = PreferenceValues
    beta: float

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        inputs = preference_inputs(scores, batch, ld_alpha=None)
        chosen_P, rejected_P = inputs.policy_logps_2P - inputs.reference_logps_2P
        losses_P = (1 - self.beta * (chosen_P - rejected_P)).square() / 2
        # Divided by the pairs of the global batch, so ranks and microbatches change nothing.
        loss = losses_P.sum() / counts["rows"]
        return LossOutputs(loss=loss, metrics=mean_metrics({"loss": losses_P.detach()}))

    def first_loss(self, counts: Mapping[str, int]) -> float:
        return 0.5


class SquaredMargin(DPOObjective):
    def bind(self, config: DPOConfig) -> BoundLoss:
        return SquaredMarginLoss(beta=config.loss.beta)


def make_row(question: str, good: str, bad: str) -> dict[str, Any]:
    user = {"role": "user", "content": question}
    replies = {"chosen": good, "rejected": bad}
    return {name: [user, {"role": "assistant", "content": text}] for name, text in replies.items()}


def main(model: str, output_dir: str) -> None:
    rows = [make_row(question, good, bad) for question, (good, bad) in ANSWERS.items()]
    flags = {"max_seq_length": 128, "learning_rate": 1e-5, "max_train_steps": 5}
    fitted = fit(SquaredMargin(), rows, model_name_or_path=model, output_dir=output_dir, **flags)
    print(fitted.metrics["loss"], fitted.model)


if __name__ == "__main__":
    main(*sys.argv[1:])

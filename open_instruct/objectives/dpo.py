"""Preference tuning, DPO and its relatives: a loss of the log-probs of a chosen and a rejected reply.

Legend: P pairs of a microbatch, S = 2P documents of it (chosen first), N pairs of a data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from open_instruct.config.dpo import DPOConfig, loss_problems, validate_dpo
from open_instruct.config.losses import PREFERENCE_LOSSES
from open_instruct.config.sections import PreferenceLossSection
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.objectives.objective import (
    REFERENCE,
    BoundLoss,
    Evaluation,
    LossOutputs,
    Objective,
    TokenLogprobs,
)
from open_instruct.parallel.wording import counted
from open_instruct.records import Batch, Metric

if TYPE_CHECKING:
    import numpy as np
    import torch

    from open_instruct.data.token_dataset import TokenDataset
    from open_instruct.losses.preference import PreferenceLossOutputs


def bind(loss: PreferenceLossSection) -> BoundLoss:
    """The loss that the flags name; raises InputError for flags that cannot work."""
    refuse([*limit_problems(loss), *loss_problems(loss)])
    first_loss = PREFERENCE_LOSSES[loss.loss_type].first_loss

    def function(scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]) -> LossOutputs:
        outputs = preference_outputs(scores, batch, loss)
        return LossOutputs(loss=outputs.losses_P.sum() / counts["rows"], metrics=preference_metrics(outputs))

    return BoundLoss(
        function=function,
        first_loss=None if first_loss is None else first_loss(loss.beta),
        remedy="the reference log-probs do not belong to these weights and rows. Remove the folder "
        "'reference_logprobs' in --cache_dir and start again",
    )


def preference_outputs(scores: TokenLogprobs, batch: Batch, loss: PreferenceLossSection) -> PreferenceLossOutputs:
    """Losses and rewards of each pair of a microbatch."""
    from open_instruct.losses.logprobs import sum_by_sequence

    logps_S, lengths_S = sum_by_sequence(scores.logprobs_N, scores.sequence_ids_N, batch.packed.num_sequences)
    return outputs_of(logps_S.view(2, -1), lengths_S.view(2, -1), batch.values.get(f"{REFERENCE}_S"), loss)


def outputs_of(
    logps_2P: torch.Tensor, lengths_2P: torch.Tensor, reference_S: torch.Tensor | None, loss: PreferenceLossSection
) -> PreferenceLossOutputs:
    """Losses and rewards from sums over the replies, chosen before rejected."""
    from open_instruct.losses.preference import PreferenceLossInputs, preference_loss

    reference_2P = (None, None) if reference_S is None else reference_S.view(2, -1)
    return preference_loss(
        loss,
        PreferenceLossInputs(
            policy_chosen_logps_P=logps_2P[0],
            policy_rejected_logps_P=logps_2P[1],
            chosen_lengths_P=lengths_2P[0],
            rejected_lengths_P=lengths_2P[1],
            reference_chosen_logps_P=reference_2P[0],
            reference_rejected_logps_P=reference_2P[1],
        ),
    )


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


def evaluate(
    dataset: TokenDataset, logps_N2: np.ndarray, reference_N2: np.ndarray | None, config: DPOConfig
) -> Evaluation:
    """Preference accuracy, and the loss and rewards on held-out pairs.

    `eval/preference_accuracy` is the share of pairs whose chosen reply has the higher log-prob (averaged
    over the reply where the loss averages too). It needs no reference, so it can be compared before
    and after training; `eval/rewards/accuracy` counts what has changed relative to the reference.
    """
    import torch

    logps_2N = torch.from_numpy(logps_N2).T
    lengths_2N = torch.as_tensor(dataset.label_lengths(), dtype=torch.float32).T
    reference_S = None if reference_N2 is None else torch.from_numpy(reference_N2).T.flatten()
    outputs = outputs_of(logps_2N, lengths_2N, reference_S, config.loss)
    if PREFERENCE_LOSSES[config.loss.loss_type].per_token:
        logps_2N = logps_2N / lengths_2N
    margins_N = outputs.chosen_rewards_P - outputs.rejected_rewards_P
    accuracy = float((logps_2N[0] > logps_2N[1]).float().mean())
    return Evaluation(
        row={
            "eval/preference_accuracy": accuracy,
            "eval/rewards/accuracy": float((margins_N > 0).float().mean()),
            "eval/rewards/margin": float(margins_N.mean()),
            "eval/loss": float(outputs.losses_P.mean()),
            "eval/num_pairs": len(dataset),
        },
        sentence=f"held-out preference accuracy {{when}}: {accuracy:.3f} of {counted(len(dataset), 'pair')}",
    )


DPO = Objective(
    name="dpo",
    config_class=DPOConfig,
    validate=validate_dpo,
    rows=PreferenceBuilder,
    bind=lambda config: bind(config.loss),
    needs_reference=lambda config: PREFERENCE_LOSSES[config.loss.loss_type].needs_reference,
    only_scores=lambda config: config.loss.cache_logprobs_only,
    prefix_sharing=lambda config: config.data.prefix_sharing,
    evaluate=evaluate,
)

"""Preference tuning, DPO and its relatives: a loss of the log-probs of a chosen and a rejected reply.

Legend: P pairs of a microbatch, S = 2P documents of it (chosen first), N pairs of a data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from open_instruct.config.dpo import DPOConfig, loss_problems, needs_reference, validate_dpo
from open_instruct.config.losses import PREFERENCE_LOSSES
from open_instruct.config.sections import PreferenceLossSection
from open_instruct.config.validation import idle_problems, limit_problems, refuse
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.objectives.objective import (
    REFERENCE,
    REFERENCE_TOKENS,
    BoundLoss,
    Evaluation,
    Gather,
    LossOutputs,
    Objective,
    TokenLogprobs,
)
from open_instruct.records import Batch, Metric, StepBatch, mean_metrics
from open_instruct.wording import counted

if TYPE_CHECKING:
    import numpy as np
    import torch

    from open_instruct.data.token_dataset import TokenDataset
    from open_instruct.losses.preference import PreferenceLossInputs, PreferenceLossOutputs

# The values that a microbatch has from other pairs of the global batch, see `matched_pairs`.
MATCHED = "matched_3P"


def bind(loss: PreferenceLossSection) -> BoundLoss:
    """The loss that the flags name; raises InputError for flags that cannot work."""
    refuse([*limit_problems(loss), *idle_problems(loss), *loss_problems(loss)])
    known = [PREFERENCE_LOSSES[name] for name in loss.names]
    first_losses = [
        weight * each.first_loss(loss.beta, loss.label_smoothing)
        for each, weight in zip(known, loss.loss_weights or [1.0] * len(known), strict=True)
        if each.first_loss is not None
    ]

    def function(scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]) -> LossOutputs:
        from open_instruct.losses.preference import preference_loss

        outputs = preference_loss(loss, preference_inputs(scores, batch, ld_alpha=loss.ld_alpha))
        return LossOutputs(loss=outputs.losses_P.sum() / counts["rows"], metrics=preference_metrics(outputs))

    return BoundLoss(
        function=function,
        prepare=partial(with_matched_pairs, ld_alpha=loss.ld_alpha)
        if any(each.needs_global_batch for each in known)
        else None,
        with_collisions=loss.weight_alignment,
        ld_alpha=loss.ld_alpha,
        first_loss=sum(first_losses) if len(first_losses) == len(known) else None,
    )


def preference_inputs(scores: TokenLogprobs, batch: Batch, *, ld_alpha: float | None) -> PreferenceLossInputs:
    """The inputs of the loss of a microbatch."""
    from open_instruct.losses.logprobs import sum_by_reply
    from open_instruct.losses.preference import PreferenceLossInputs
    from open_instruct.packing.documents import on_device

    def sums(values_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_by_reply(values_N, scores.sequence_ids_N, batch.packed.num_sequences, ld_alpha)

    logps_S, lengths_S = sums(scores.logprobs_N)
    reference_S = batch.values.get(f"{REFERENCE}_S")
    if REFERENCE_TOKENS in batch.values:
        reference_S, _ = sums(batch.values[REFERENCE_TOKENS])
    collisions_S = None if scores.collision_logprobs_N is None else sums(scores.collision_logprobs_N)[0]
    return PreferenceLossInputs(
        policy_logps_2P=logps_S.view(2, -1),
        lengths_2P=lengths_S.view(2, -1),
        reference_logps_2P=None if reference_S is None else on_device(reference_S, logps_S.device).view(2, -1),
        collision_logps_2P=None if collisions_S is None else collisions_S.view(2, -1),
        matched_3P=batch.values.get(MATCHED),
    )


def with_matched_pairs(
    step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather, *, ld_alpha: float | None
) -> StepBatch:
    """The step, with the values of `matched_pairs` added to its microbatches."""
    import torch

    from open_instruct.losses.preference import matched_pairs, to_match
    from open_instruct.packing.documents import on_device

    row_ids_P = torch.tensor([row for batch in step.microbatches for row in batch.row_ids], dtype=torch.float64)
    inputs = [preference_inputs(*each, ld_alpha=ld_alpha) for each in zip(scores, step.microbatches, strict=True)]
    own_3P = torch.cat([to_match(each) for each in inputs], dim=1)
    row_ids_P = on_device(row_ids_P, own_3P.device)
    all_P4 = gather(torch.cat([row_ids_P[None], own_3P]).T)
    # Sorted by row, so that the order of equal values does not depend on the ranks.
    all_4P = all_P4[all_P4[:, 0].argsort()].T.contiguous()
    places_P = torch.searchsorted(all_4P[0], row_ids_P)
    parts = matched_pairs(all_4P[1:])[:, places_P].split([len(batch.row_ids) for batch in step.microbatches], dim=1)
    microbatches = (
        replace(batch, values={**batch.values, MATCHED: part_3P})
        for batch, part_3P in zip(step.microbatches, parts, strict=True)
    )
    return replace(step, microbatches=tuple(microbatches))


def preference_metrics(outputs: PreferenceLossOutputs) -> dict[str, Metric]:
    """Means over the pairs of a microbatch, weighted by their number."""
    chosen_P, rejected_P = outputs.rewards_2P
    chosen_logps_P, rejected_logps_P = outputs.logps_2P
    values_P = {
        "loss": outputs.losses_P.detach(),
        **({f"loss/{name}": part_P for name, part_P in outputs.parts.items()} if len(outputs.parts) > 1 else {}),
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/margin": chosen_P - rejected_P,
        "rewards/accuracy": outputs.is_right_P,
        "logps/chosen": chosen_logps_P,
        "logps/rejected": rejected_logps_P,
    }
    return mean_metrics(values_P)


def evaluate(
    dataset: TokenDataset, logps_N2: np.ndarray, reference_N2: np.ndarray | None, config: DPOConfig
) -> Evaluation:
    """Preference accuracy, and the loss and rewards on held-out pairs.

    `eval/preference_accuracy` is the share of pairs whose chosen reply has the higher log-prob (averaged
    over the reply where the loss averages too). It needs no reference, so it can be compared before
    and after training; `eval/rewards/accuracy` counts what has changed relative to the reference.
    """
    import torch

    from open_instruct.losses.preference import PreferenceLossInputs, matched_pairs, preference_loss, to_match

    inputs = PreferenceLossInputs(
        policy_logps_2P=torch.tensor(logps_N2.T),
        lengths_2P=torch.tensor(dataset.label_lengths().T, dtype=torch.float32),
        reference_logps_2P=None if reference_N2 is None else torch.tensor(reference_N2.T),
    )
    if reference_N2 is not None:
        inputs = replace(inputs, matched_3P=matched_pairs(to_match(inputs)))
    # Held-out scores lack the collision log-probs that weight alignment needs.
    outputs = preference_loss(replace(config.loss, weight_alignment=False), inputs)
    margins_N = outputs.rewards_2P[0] - outputs.rewards_2P[1]
    accuracy = float((outputs.logps_2P[0] > outputs.logps_2P[1]).float().mean())
    return Evaluation(
        row={
            "eval/preference_accuracy": accuracy,
            "eval/rewards/accuracy": float(outputs.is_right_P.mean()),
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
    needs_reference=lambda config: needs_reference(config.loss),
    # TR-DPO, arXiv 2404.09656.
    reference_moves=lambda config: {"update_freq": config.loss.ref_policy_update_freq, "alpha": config.loss.alpha},
    only_scores=lambda config: config.loss.cache_logprobs_only,
    prefix_sharing=lambda config: config.data.prefix_sharing,
    evaluate=evaluate,
)

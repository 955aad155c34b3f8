"""Preference tuning, DPO and its relatives: a loss of the log-probs of a chosen and a rejected
reply.

Legend: P pairs of a microbatch, S = 2P documents of it (chosen first), N pairs of a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from open_instruct.config.flags import spell_value
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.config.sections import PreferenceDataSection, PrefixSharing
from open_instruct.config.training import TrainingConfig, with_held_out
from open_instruct.config.validation import idle_problems, limit_problems, refuse, validate_training
from open_instruct.core.batch_values import PreferenceValues
from open_instruct.core.errors import problems_of_kind
from open_instruct.core.records import Batch, Metric, StepBatch, mean_metrics
from open_instruct.core.text import spell_count
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.losses.logprobs import ROUNDING, per_token, sum_by_reply
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.losses.preference_loss import CHANGING_FLAGS, PreferenceLossInputs
from open_instruct.losses.rank_matching import RankPartners, match_by_rank
from open_instruct.objectives.objective import (
    BoundLoss,
    Evaluation,
    Gather,
    LossOutputs,
    Objective,
    TokenLogprobs,
)

EXO_SMOOTHING = 1e-3  # of the experiments in arXiv 2402.00856

if TYPE_CHECKING:
    import numpy as np
    import torch

    from open_instruct.data.token_dataset import TokenDataset


@dataclass(kw_only=True)
class DPOConfig(TrainingConfig):
    """Train a model on preference pairs with DPO or one of its relatives, sharded as HSDP, and
    export it.

    Examples:
        open-instruct dpo --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0 --output_dir
            runs/first
        open-instruct dpo dpo/olmo3_7b_8gpu --num_processes 8 --output_dir runs/olmo3
    """

    data: PreferenceDataSection
    loss: PreferenceLossSection

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        return (
            "eval/preference_accuracy",
            *with_held_out("loss", "rewards/accuracy", "rewards/margin"),
        )


def validate_dpo(config: DPOConfig) -> list[str]:
    """Check everything that the flags alone can tell, and return warnings.

    A flag counts as given when it is not at its default, so that a saved config.yaml, which
    spells out every flag, is judged as the command that wrote it.

    Raises:
        InputError: listing every problem, each with its remedy.
    """
    return validate_training(config, loss_problems(config.loss))


@problems_of_kind("conflict")
def loss_problems(loss: PreferenceLossSection) -> Iterator[str]:
    names = loss.names
    if unknown := [name for name in names if name not in PREFERENCE_LOSSES]:
        yield (
            f"--loss_type {spell_value(unknown)}: there is no such loss; choose one of "
            f"{', '.join(PREFERENCE_LOSSES)}"
        )
        return
    flag_words = f"--loss_type {spell_value(names)}"
    if len(set(names)) < len(names):
        yield f"{flag_words} names a loss twice: name it once, with the sum of its --loss_weights"
    if loss.loss_weights and (len(loss.loss_weights) != len(names) or min(loss.loss_weights) <= 0):
        yield (
            f"--loss_weights {spell_value(loss.loss_weights)}: give a number above 0 for each of "
            f"{flag_words}, in their order"
        )
    for flag, (what, off) in CHANGING_FLAGS.items():
        value = getattr(loss, flag)
        loss_names = [
            name
            for name, preference_loss in PREFERENCE_LOSSES.items()
            if flag in preference_loss.reads
        ]
        if value != off and not set(names) <= set(loss_names):
            yield (
                f"--{flag} {spell_value(value)}: {flag_words} has no {what}; use "
                f"{spell_value(off)}, or one of {', '.join(loss_names)}"
            )
    if "exo_pair" in names and loss.label_smoothing == 0:
        yield (
            "--loss_type exo_pair needs a --label_smoothing above 0, since it has no value for "
            f"certain labels; give --label_smoothing {EXO_SMOOTHING}, as its paper does"
        )
    for flag in ("cache_logprobs_only", "ref_policy_update_freq"):
        if getattr(loss, flag) and not needs_reference(loss):
            yield (
                f"--{flag}: {flag_words} has no reference, so there is nothing to compute; "
                "leave the flag out, or choose another loss"
            )


def needs_reference(loss: PreferenceLossSection) -> bool:
    return any(PREFERENCE_LOSSES[name].needs_reference for name in loss.names)


def bind(loss: PreferenceLossSection) -> BoundLoss:
    """The loss that the flags name; raises InputError for flags that cannot work."""
    refuse([*limit_problems(loss), *idle_problems(loss), *loss_problems(loss)])
    sorts_batch = any(PREFERENCE_LOSSES[name].sorts_batch for name in loss.names)
    return DPOLoss(
        section=loss,
        with_collisions=loss.weight_alignment,
        ld_alpha=loss.ld_alpha,
        scores_before_step=sorts_batch,
    )


@dataclass(frozen=True, kw_only=True)
class DPOLoss(BoundLoss):
    """DPO or one of its relatives, or the weighted sum of several."""

    values_class = PreferenceValues

    section: PreferenceLossSection

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        inputs = preference_inputs(scores, batch, ld_alpha=self.ld_alpha)
        outputs = preference_loss(self.section, inputs)
        return LossOutputs(
            loss=outputs.losses_P.sum() / counts["rows"], metrics=preference_metrics(outputs)
        )

    def prepare(
        self, step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather
    ) -> StepBatch:
        """Find the partners of each pair, for a loss that sorts the global batch."""
        if not self.scores_before_step:
            return step
        return add_partners(step, scores, gather, ld_alpha=self.ld_alpha)

    def first_loss(self, counts: Mapping[str, int]) -> float | None:
        losses = [PREFERENCE_LOSSES[name] for name in self.section.names]
        if not all(each.needs_reference and each.knows_first_loss for each in losses):
            return None
        return first_loss(self.section)


def preference_inputs(
    scores: TokenLogprobs, batch: Batch, *, ld_alpha: float | None
) -> PreferenceLossInputs:
    """The inputs of the loss of a microbatch."""
    from open_instruct.batching.documents import move_to_device

    def sums(values_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_by_reply(values_N, scores.sequence_ids_N, batch.packed.num_sequences, ld_alpha)

    def as_pairs(values_S: torch.Tensor) -> torch.Tensor:
        return move_to_device(values_S, scores.logprobs_N.device).view(2, -1)

    values = PreferenceValues.read(batch.values)
    logps_S, lengths_S = sums(scores.logprobs_N)
    reference_S = values.reference_logps_S
    if values.reference_logprobs_N is not None:
        reference_S, _ = sums(values.reference_logprobs_N)
    collisions_S = None
    if scores.collision_logprobs_N is not None:
        collisions_S, _ = sums(scores.collision_logprobs_N)
    partners = None
    if values.rank_partners_3P is not None:
        partners = RankPartners(*values.rank_partners_3P)
    return PreferenceLossInputs(
        policy_logps_2P=as_pairs(logps_S),
        lengths_2P=as_pairs(lengths_S),
        reference_logps_2P=None if reference_S is None else as_pairs(reference_S),
        collision_logps_2P=None if collisions_S is None else as_pairs(collisions_S),
        partners=partners,
    )


def add_partners(
    step: StepBatch,
    scores: Sequence[TokenLogprobs],
    gather: Gather,
    *,
    ld_alpha: float | None,
) -> StepBatch:
    """The step whose pairs have their partners among all pairs of the global batch, see
    `match_by_rank`.
    """
    import torch

    columns: list[torch.Tensor] = []
    for batch, token_scores in zip(step.microbatches, scores, strict=True):
        log_ratios_2P, margins_P = preference_inputs(
            token_scores, batch, ld_alpha=ld_alpha
        ).rank_values
        row_ids_P = torch.tensor(batch.row_ids, dtype=torch.float64, device=margins_P.device)
        columns.append(torch.stack([row_ids_P, *log_ratios_2P, margins_P]))
    here_4P = torch.cat(columns, dim=1)
    everywhere_4P = gather(here_4P.T.contiguous()).T
    # In the order of the rows, so that ranks of equal values do not depend on how the batch is cut.
    everywhere_4P = everywhere_4P[:, everywhere_4P[0].argsort(stable=True)]
    partners_3P = torch.stack(match_by_rank(everywhere_4P[1:3], everywhere_4P[3]))
    places_P = torch.searchsorted(everywhere_4P[0].contiguous(), here_4P[0].contiguous())
    parts = partners_3P[:, places_P].split(
        [len(batch.row_ids) for batch in step.microbatches], dim=1
    )
    microbatches = []
    for batch, part_3P in zip(step.microbatches, parts, strict=True):
        values = replace(PreferenceValues.read(batch.values), rank_partners_3P=part_3P)
        microbatches.append(replace(batch, values=values))
    return replace(step, microbatches=tuple(microbatches))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossOutputs:
    """Per-pair results. Only `losses_P` carries a gradient.

    Rewards are beta * (policy - reference) of the log-probs as the loss sees them (simpo: beta *
    policy): sums, or means over the reply's tokens for a length-normalised loss. `logps_2P` are
    those of the policy. Among several losses the leading one decides. `parts` are the separate
    losses before they are weighted. `is_right_P` says whether the chosen reply has the higher
    reward, by more than the log-probs' rounding: a policy that equals its reference is right on no
    pair, even if the reference was computed on ranks that split rows otherwise.
    """

    losses_P: torch.Tensor
    rewards_2P: torch.Tensor
    logps_2P: torch.Tensor
    is_right_P: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)


def preference_loss(
    loss: PreferenceLossSection, inputs: PreferenceLossInputs
) -> PreferenceLossOutputs:
    """Losses, rewards and log-probs of P pairs (P may be 0) under the loss that the flags name, or
    the sum of several.

    A loss that needs a reference must be given one; a loss that needs none ignores it.
    """
    import torch

    parts = {name: PREFERENCE_LOSSES[name].losses(inputs, loss) for name in loss.names}
    weights = loss.loss_weights or [1.0] * len(parts)
    weighted_parts = [
        weight * part_P for part_P, weight in zip(parts.values(), weights, strict=True)
    ]
    deciding = PREFERENCE_LOSSES[loss.leading]
    leading = deciding.compare(inputs, loss)
    logps_2P = inputs.policy_logps_2P
    if deciding.per_token:
        logps_2P = per_token(logps_2P, inputs.lengths_2P)
    rounding_P = ROUNDING * logps_2P.abs().sum(dim=0)
    return PreferenceLossOutputs(
        losses_P=sum(weighted_parts[1:], start=weighted_parts[0]),
        rewards_2P=torch.stack([leading.chosen_rewards_P, leading.rejected_rewards_P]).detach(),
        logps_2P=logps_2P.detach(),
        is_right_P=(leading.chosen_P - leading.rejected_P > rounding_P).float(),
        parts={name: part_P.detach() for name, part_P in parts.items()},
    )


def first_loss(loss: PreferenceLossSection) -> float:
    """The loss of a policy that equals its reference, by the same functions on one pair of
    log-probs that are 0.
    """
    import torch

    zeros_21 = torch.zeros(2, 1, dtype=torch.float64)
    inputs = PreferenceLossInputs(
        policy_logps_2P=zeros_21, lengths_2P=torch.ones(2, 1), reference_logps_2P=zeros_21
    )
    return preference_loss(loss, inputs).losses_P.item()


def preference_metrics(outputs: PreferenceLossOutputs) -> dict[str, Metric]:
    """Means over the pairs of a microbatch, weighted by their number."""
    chosen_P, rejected_P = outputs.rewards_2P
    chosen_logps_P, rejected_logps_P = outputs.logps_2P
    values_P = {"loss": outputs.losses_P.detach()}
    if len(outputs.parts) > 1:
        values_P |= {f"loss/{name}": part_P for name, part_P in outputs.parts.items()}
    values_P |= {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/margin": chosen_P - rejected_P,
        "rewards/accuracy": outputs.is_right_P,
        "logps/chosen": chosen_logps_P,
        "logps/rejected": rejected_logps_P,
    }
    return mean_metrics(values_P)


class DPOObjective(Objective[DPOConfig]):
    """Preference tuning with DPO or one of its relatives."""

    name = "dpo"
    config_class = DPOConfig
    rows = PreferenceBuilder

    def validate(self, config: DPOConfig) -> list[str]:
        return validate_dpo(config)

    def bind(self, config: DPOConfig) -> BoundLoss:
        return bind(config.loss)

    def needs_reference(self, config: DPOConfig) -> bool:
        return needs_reference(config.loss)

    def reference_moves(self, config: DPOConfig) -> Mapping[str, Any]:
        """TR-DPO, arXiv 2404.09656."""
        return {"update_freq": config.loss.ref_policy_update_freq, "alpha": config.loss.alpha}

    def only_scores(self, config: DPOConfig) -> bool:
        return config.loss.cache_logprobs_only

    def prefix_sharing(self, config: DPOConfig) -> PrefixSharing:
        return config.data.prefix_sharing

    def evaluate(
        self,
        dataset: TokenDataset,
        logps_N2: np.ndarray,
        reference_N2: np.ndarray | None,
        config: DPOConfig,
    ) -> Evaluation:
        """Preference accuracy, and the loss and rewards on held-out pairs.

        `eval/preference_accuracy` is the share of pairs whose chosen reply has the higher log-prob
        (averaged over the reply where the loss averages too). It needs no reference, so it can be
        compared before and after training; `eval/rewards/accuracy` compares rewards, which are
        relative to the reference.
        """
        import torch

        inputs = PreferenceLossInputs(
            policy_logps_2P=torch.tensor(logps_N2.T),
            lengths_2P=torch.tensor(dataset.label_lengths().T, dtype=torch.float32),
            reference_logps_2P=None if reference_N2 is None else torch.tensor(reference_N2.T),
        )
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
            sentence=(
                f"held-out preference accuracy {{when}}: {accuracy:.3f} of "
                f"{spell_count(len(dataset), 'pair')}"
            ),
        )


DPO = DPOObjective()

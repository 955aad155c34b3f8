"""KTO: single replies, each labelled as desirable or not (arXiv 2402.01306).

A reply is compared with z0, the policy's divergence from the reference on replies that do not
belong to their prompts. So a row has two documents: its prompt with its own reply, and its prompt
with the reply of another row. The second is scored before the step, without gradient; the step
learns from the first alone. A pair of replies is two rows.

Legend: R rows, N those of a data set, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from open_instruct.config.sections import (
    OptimSection,
    PreferenceDataSection,
    PrefixSharing,
    flag,
    resumable_flag,
)
from open_instruct.config.training import TrainingConfig, with_held_out
from open_instruct.core.batch_values import UnpairedValues
from open_instruct.core.errors import InputError
from open_instruct.core.records import Batch, Metric, StepBatch, mean_metrics
from open_instruct.core.text import spell_count
from open_instruct.losses.logprobs import ROUNDING, sum_by_sequence
from open_instruct.objectives.kto_rows import MismatchedBuilder, UnpairedBuilder
from open_instruct.objectives.objective import (
    BoundLoss,
    Evaluation,
    Gather,
    LossOutputs,
    Objective,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from open_instruct.data.token_dataset import TokenDataset

# Bounds of the ratio of the total weights of desirable and undesirable rows; the paper's section
# 4.2.
LOWEST_RATIO, HIGHEST_RATIO = 1.0, 4.0 / 3.0
DESIRABLE = "desirable"  # the name of their number among a step's counts


@dataclass(kw_only=True)
class KTOLossSection:
    """The loss of KTO."""

    title: ClassVar[str] = "Loss"

    loss_type: Literal["kto", "apo_zero_unpaired"] = flag(
        (
            "'kto' measures replies from z0, the policy's distance from the reference; "
            "'apo_zero_unpaired' from 0"
        ),
        "kto",
    )
    beta: float = flag(
        "strength of the pull towards the reference policy (scale of the reward)", 0.1, above=0
    )
    desirable_weight: float = flag("weight of a row whose label is true", 1.0, above=0)
    undesirable_weight: float = flag("weight of a row whose label is false", 1.0, above=0)
    cache_logprobs_only: bool = resumable_flag(
        "compute and store the reference log-probs, then stop", False
    )

    @property
    def has_mismatched(self) -> bool:
        return self.loss_type == "kto"


@dataclass(kw_only=True)
class KTOOptimSection(OptimSection):
    """As of any offline run, with the learning rate of KTO."""

    learning_rate: float = flag("peak learning rate", 1e-6, above=0)


@dataclass(kw_only=True)
class KTOConfig(TrainingConfig):
    """Train a model with KTO on single replies that are labelled good or bad, sharded as HSDP, and
    export it.

    Examples:
        open-instruct kto --model_name_or_path MODEL_DIR --mixer_list labelled.jsonl 1.0
            --output_dir runs/first
        open-instruct kto kto/olmo3_7b_8gpu --num_processes 8 --output_dir runs/olmo3_kto
    """

    data: PreferenceDataSection
    loss: KTOLossSection
    optim: KTOOptimSection

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        return with_held_out("loss", "rewards/accuracy", "rewards/margin")


def _are_desirable(dataset: TokenDataset) -> np.ndarray:
    """The labels of all rows: bool (N,)."""
    labels: np.ndarray = dataset.details_C.view("float32")[dataset.bounds_N4[:, 2] // 4] > 0
    return labels


def unpaired_losses(
    log_ratios_R: torch.Tensor,
    is_desirable_R: torch.Tensor,
    z0: torch.Tensor | float,
    loss: KTOLossSection,
) -> torch.Tensor:
    """KTO, arXiv 2402.01306 eq. 7 and 8: `w_D (1 - sigmoid(beta (r - z0)))`, or `w_U (1 -
    sigmoid(beta (z0 - r)))`.

    With z0 of 0 it is APO-zero on single replies (arXiv 2408.06266): `1 - sigmoid(beta r)`, or
    `sigmoid(beta r)`.
    """
    above_R = (log_ratios_R - z0) * (2 * is_desirable_R.to(log_ratios_R.dtype) - 1)
    weights_R = is_desirable_R * loss.desirable_weight + ~is_desirable_R * loss.undesirable_weight
    # 1 - sigmoid(x) is sigmoid(-x), which keeps its digits where x is large.
    return weights_R * (-loss.beta * above_R).sigmoid()


def bind(loss: KTOLossSection, *, packing: bool = True, pad_to_multiple_of: int = 1) -> BoundLoss:
    """The loss that the flags name; the other arguments are `KTOLoss`'s."""
    return KTOLoss(
        section=loss,
        packing=packing,
        pad_to_multiple_of=pad_to_multiple_of,
        scores_before_step=loss.has_mismatched,
    )


@dataclass(frozen=True, kw_only=True)
class KTOLoss(BoundLoss):
    """KTO or APO-zero on single replies.

    Before a step its mismatched replies are scored; then each row has its own reply alone, laid out
    with `packing` and padded to a multiple of `pad_to_multiple_of`.
    """

    values_class = UnpairedValues

    section: KTOLossSection
    packing: bool
    pad_to_multiple_of: int

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        values = UnpairedValues.read(batch.values)
        assert values.z0 is not None, "see `prepare`"
        logps_R, log_ratios_R = _log_ratios(scores, values.reference_logps_S)
        return kto_outputs(
            logps_R, log_ratios_R, values.is_desirable_R, values.z0, counts, self.section
        )

    def select_scored(self, step: StepBatch) -> StepBatch:
        """The mismatched replies."""
        return self._select_document(step, 1)

    def prepare(
        self, step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather
    ) -> StepBatch:
        """Count the desirable rows of the global batch, and take z0 from its mismatched replies."""
        import torch

        labels = [UnpairedValues.read(batch.values).is_desirable_R for batch in step.microbatches]
        num_desirable = int(gather(torch.cat(labels)).sum())
        z0 = torch.zeros(())
        if self.section.has_mismatched:
            z0 = self._estimate_z0(step, scores, gather)
            step = self._select_document(step, 0)
        microbatches = []
        for batch in step.microbatches:
            values = replace(UnpairedValues.read(batch.values), z0=z0)
            microbatches.append(replace(batch, values=values))
        counts = {**step.counts, DESIRABLE: num_desirable}
        return StepBatch(microbatches=tuple(microbatches), counts=counts)

    def _estimate_z0(
        self, step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather
    ) -> torch.Tensor:
        """The mean log-ratio of the global batch's mismatched replies, at least 0."""
        import torch

        log_ratios = []
        for token_scores, batch in zip(scores, step.microbatches, strict=True):
            reference_S = UnpairedValues.read(batch.values).reference_logps_S
            _, log_ratios_R = _log_ratios(token_scores, reference_S[len(batch.row_ids) :])
            log_ratios.append(log_ratios_R)
        return gather(torch.cat(log_ratios)).double().mean().clamp(min=0).float()

    def first_loss(self, counts: Mapping[str, int]) -> float:
        section = self.section
        num_undesirable = counts["rows"] - counts[DESIRABLE]
        weights = (
            section.desirable_weight * counts[DESIRABLE]
            + section.undesirable_weight * num_undesirable
        )
        return weights / (2 * counts["rows"])

    def _select_document(self, step: StepBatch, document: int) -> StepBatch:
        """The step with only the document number `document` of each row."""
        from open_instruct.batching.documents import pack_documents

        microbatches = []
        for batch in step.microbatches:
            num_rows = len(batch.row_ids)
            part = slice(document * num_rows, (document + 1) * num_rows)
            documents = batch.documents[part]
            packed = pack_documents(
                documents, packing=self.packing, pad_to_multiple_of=self.pad_to_multiple_of
            )
            values = UnpairedValues.read(batch.values)
            values = replace(values, reference_logps_S=values.reference_logps_S[part])
            microbatches.append(replace(batch, packed=packed, documents=documents, values=values))
        return replace(step, microbatches=tuple(microbatches))


def _log_ratios(
    scores: TokenLogprobs, reference_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-prob of each document, and its difference from the reference's."""
    from open_instruct.batching.documents import move_to_device

    logps_R, _ = sum_by_sequence(scores.logprobs_N, scores.sequence_ids_N, len(reference_R))
    return logps_R, logps_R - move_to_device(reference_R, logps_R.device)


def kto_outputs(
    logps_R: torch.Tensor,
    log_ratios_R: torch.Tensor,
    is_desirable_R: torch.Tensor,
    z0: torch.Tensor,
    counts: Mapping[str, int],
    loss: KTOLossSection,
) -> LossOutputs:
    """The share of R rows in the loss and the metrics of their global batch; an absent class has no
    metrics.
    """
    losses_R = unpaired_losses(log_ratios_R, is_desirable_R, z0, loss)
    rewards_R = loss.beta * log_ratios_R.detach()
    is_right_R = (log_ratios_R - z0 > ROUNDING * logps_R.abs()) == is_desirable_R
    metrics = mean_metrics({"loss": losses_R.detach(), "rewards/accuracy": is_right_R.float()})
    if loss.has_mismatched:
        metrics["kl"] = Metric(value=z0, weight=float(losses_R.numel()))
    num_undesirable = counts["rows"] - counts[DESIRABLE]
    classes = (
        ("chosen", is_desirable_R, counts[DESIRABLE]),
        ("rejected", ~is_desirable_R, num_undesirable),
    )
    for name, is_member_R, num in classes:
        if num:
            for what, values_R in (("rewards", rewards_R), ("logps", logps_R.detach())):
                metrics[f"{what}/{name}"] = Metric(
                    value=(values_R * is_member_R).sum() / num, reduction="sum"
                )
    if counts[DESIRABLE] and num_undesirable:
        margin = metrics["rewards/chosen"].value - metrics["rewards/rejected"].value
        metrics["rewards/margin"] = Metric(value=margin, reduction="sum")
    return LossOutputs(loss=losses_R.sum() / counts["rows"], metrics=metrics)


def check_rows(dataset: TokenDataset, num_rows_per_step: int, loss: KTOLossSection) -> list[str]:
    """Warnings about the balance of labels and weights.

    Raises:
        InputError: a global batch of one row.
    """
    if loss.has_mismatched and num_rows_per_step == 1:
        raise InputError(
            "a global batch of one row: z0 of --loss_type kto is a mean over the rows of a "
            "step, and one row says nothing of the policy's distance from the reference; "
            "raise --per_device_train_batch_size or --gradient_accumulation_steps, or use "
            "--loss_type apo_zero_unpaired",
            kind="conflict",
        )
    num_desirable = int(_are_desirable(dataset).sum())
    num_undesirable = len(dataset) - num_desirable
    if not (num_desirable and num_undesirable):
        which = DESIRABLE if num_desirable else "undesirable"
        rows = spell_count(len(dataset), "row")
        return [f"all {rows} are {which}: nothing is learned of what sets good from bad"]
    balance = num_desirable / num_undesirable
    ratio = loss.desirable_weight / loss.undesirable_weight * balance
    if LOWEST_RATIO - 1e-6 <= ratio <= HIGHEST_RATIO + 1e-6:
        return []
    weight = loss.undesirable_weight / balance
    other_weight = loss.desirable_weight * balance
    return [
        f"{num_desirable:,} desirable rows of weight {loss.desirable_weight:g} count "
        f"{ratio:.3g} times as much as {num_undesirable:,} undesirable ones of weight "
        f"{loss.undesirable_weight:g}, where KTO's paper advises 1 to 4/3: --desirable_weight "
        f"{LOWEST_RATIO * weight:.3g} to {HIGHEST_RATIO * weight:.3g} would do, or "
        f"--undesirable_weight {other_weight / HIGHEST_RATIO:.3g} to "
        f"{other_weight / LOWEST_RATIO:.3g}"
    ]


class KTOObjective(Objective[KTOConfig]):
    """Kahneman-Tversky optimisation."""

    name = "kto"
    config_class = KTOConfig
    rows = MismatchedBuilder
    documents_learned = 1

    def bind(self, config: KTOConfig) -> BoundLoss:
        parallel = config.parallel
        return bind(
            config.loss,
            packing=config.data.packing,
            pad_to_multiple_of=parallel.tensor_parallel_degree * parallel.context_parallel_degree,
        )

    def choose_rows(self, config: KTOConfig) -> type[UnpairedBuilder]:
        return MismatchedBuilder if config.loss.has_mismatched else UnpairedBuilder

    def check_rows(
        self, dataset: TokenDataset, num_rows_per_step: int, config: KTOConfig
    ) -> list[str]:
        return check_rows(dataset, num_rows_per_step, config.loss)

    def needs_reference(self, config: KTOConfig) -> bool:
        return True

    def only_scores(self, config: KTOConfig) -> bool:
        return config.loss.cache_logprobs_only

    def prefix_sharing(self, config: KTOConfig) -> PrefixSharing:
        return config.data.prefix_sharing

    def evaluate(
        self,
        dataset: TokenDataset,
        logps_ND: np.ndarray,
        reference_ND: np.ndarray | None,
        config: KTOConfig,
    ) -> Evaluation:
        """The loss and rewards on held-out rows, with one z0 for all of them."""
        import torch

        assert reference_ND is not None
        logps_DN = torch.from_numpy(logps_ND).T
        log_ratios_DN = torch.from_numpy(logps_ND - reference_ND).T
        is_desirable_N = torch.from_numpy(_are_desirable(dataset))
        # Rows without a mismatched reply give z0 = 0.
        z0 = log_ratios_DN[1:].double().sum().clamp(min=0).float() / len(dataset)
        counts = {"rows": len(dataset), DESIRABLE: int(is_desirable_N.sum())}
        metrics = kto_outputs(
            logps_DN[0], log_ratios_DN[0], is_desirable_N, z0, counts, config.loss
        ).metrics
        row = {f"eval/{name}": float(metric.value) for name, metric in metrics.items()}
        row["eval/num_rows"] = len(dataset)
        sentence = (
            f"held-out loss {{when}}: {row['eval/loss']:.4f} over "
            f"{spell_count(len(dataset), 'row')}"
        )
        return Evaluation(row=row, sentence=sentence)


KTO = KTOObjective()

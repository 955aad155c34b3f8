"""Distillation: a student learns a frozen teacher's distribution at every token of the replies, and
these tokens.

With the divergence D of the two distributions, both under --kd_temperature T (see
losses/distillation.py):

    loss = (1 - kd_coef) * cross-entropy + kd_coef * T^2 * D

each a mean over the tokens of the replies of the global batch. Gradients of D shrink as 1 / T^2
(Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2.1); the factor keeps the two parts in
the same proportion for every T.

Legend: N labelled tokens or rows of a data set, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from open_instruct.config.sections import ConversationSection, SFTOptimSection, flag
from open_instruct.config.training import TrainingConfig, with_held_out
from open_instruct.config.validation import validate_training
from open_instruct.core.batch_values import TeacherValues
from open_instruct.core.errors import problems_of_kind
from open_instruct.core.records import Batch, mean_metrics
from open_instruct.core.text import spell_count
from open_instruct.data.sft_rows import SFTBuilder, choose_builder
from open_instruct.objectives.objective import (
    BoundLoss,
    Evaluation,
    LossOutputs,
    Objective,
    Teacher,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from open_instruct.data.token_dataset import TokenDataset


@dataclass(kw_only=True)
class DistillationSection:
    """The teacher, and how far the student is from it."""

    title: ClassVar[str] = "Distillation"

    teacher_model_name_or_path: str = flag(
        "folder (or hub name) of the frozen model to learn from; any size and family, with the "
        "student's tokenizer",
        is_path=True,
    )
    kd_loss: Literal["forward", "reverse", "jsd"] = flag(
        "the divergence: KL(teacher || student), KL(student || teacher), or the generalised "
        "Jensen-Shannon divergence",
        "forward",
    )
    kd_beta: float = flag(
        "weight of the teacher; 0: 'forward', 1: 'reverse'",
        0.5,
        requires="kd_loss jsd",
        minimum=0,
        maximum=1,
    )
    kd_temperature: float = flag(
        (
            "temperature T of both models' logits in the divergence, which is multiplied by T "
            "squared"
        ),
        1.0,
        above=0,
    )
    kd_coef: float = flag(
        "weight of the divergence in the loss; the rest of 1 is the weight of cross-entropy",
        0.5,
        above=0,
        maximum=1,
        note=" (0 is sft)",
    )
    teacher_top_k: int | None = flag(
        "compute the teacher's most likely tokens once, keep so many for each token of a reply in "
        "--cache_dir, and train without a teacher in memory; all others count as one. Default: "
        "the teacher runs beside the student",
        None,
        minimum=1,
    )


@dataclass(kw_only=True)
class DistillConfig(TrainingConfig):
    """Train a model on conversations towards a larger one: its distribution at every token of the
    replies, mixed with their cross-entropy. Both are sharded as HSDP.

    Examples:
        open-instruct distill --model_name_or_path SMALL --teacher_model_name_or_path LARGE
            --mixer_list chats.jsonl
            1.0 --output_dir runs/small
        open-instruct distill distill/olmo2_1b_from_7b_8gpu --num_processes 8 --output_dir
            runs/small
    """

    data: ConversationSection
    distillation: DistillationSection
    optim: SFTOptimSection

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        return with_held_out("loss", "ce")


@problems_of_kind("bad_value")
def _problems(config: DistillConfig) -> Iterator[str]:
    if not config.distillation.teacher_model_name_or_path.strip():
        yield "--teacher_model_name_or_path is empty: name the folder of the model to learn from"


def describe_teacher(section: DistillationSection) -> Teacher:
    """The teacher that the flags name, and how the student's distribution is compared with it."""
    k = section.teacher_top_k or 0
    settings = {
        "beta": {
            "forward": 0.0,
            "reverse": 1.0,
            "jsd": section.kd_beta,
        }[section.kd_loss],
        "temperature": section.kd_temperature,
    }

    def compare(logits_NV: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """`teacher` are its logits (N, V) or, of its most likely tokens, what was kept (N, C)."""
        from open_instruct.losses.distillation import divergence, top_k_divergence

        return (top_k_divergence if k else divergence)(logits_NV, teacher, **settings)

    def keep(logits_NV: torch.Tensor) -> torch.Tensor:
        from open_instruct.losses.distillation import keep_top_k

        return keep_top_k(logits_NV, k, section.kd_temperature)

    return Teacher(
        model_name_or_path=section.teacher_model_name_or_path,
        compare=compare,
        keep=keep if k else None,
        kept_as=f"top{k}-temperature{section.kd_temperature!r}",
        num_kept=k,
    )


def bind(section: DistillationSection) -> BoundLoss:
    """The mixed loss that the flags name."""
    ce_weight, kl_weight = find_weights(section)
    return DistillationLoss(ce_weight=ce_weight, kl_weight=kl_weight)


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(BoundLoss):
    """The weighted sum of the cross-entropy and of the divergence from the teacher."""

    values_class = TeacherValues
    never_negative = ("ce", "kl")
    remedy = (
        "what was kept of the teacher is no distribution. Remove the folder "
        "'teacher_distributions' in --cache_dir and start again"
    )

    ce_weight: float
    kl_weight: float

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        ce_N = -scores.logprobs_N
        kl_N = _divergences(scores)
        loss_N = self.ce_weight * ce_N + self.kl_weight * kl_N
        values_N = {
            "loss": loss_N.detach(),
            "ce": ce_N.detach(),
            "kl": kl_N.detach(),
        }
        return LossOutputs(loss=loss_N.sum() / counts["labels"], metrics=mean_metrics(values_N))

    def sum_columns(self, scores: TokenLogprobs, batch: Batch) -> Sequence[torch.Tensor]:
        return (scores.logprobs_N, _divergences(scores))


def _divergences(scores: TokenLogprobs) -> torch.Tensor:
    assert scores.measured_N is not None, "there is no teacher"
    return scores.measured_N


def find_weights(section: DistillationSection) -> tuple[float, float]:
    """The weights of the cross-entropy and of the divergence."""
    return 1.0 - section.kd_coef, section.kd_coef * section.kd_temperature**2


class DistillationObjective(Objective[DistillConfig]):
    """Distillation of a larger model into a smaller one."""

    name = "distill"
    config_class = DistillConfig
    rows = SFTBuilder

    def validate(self, config: DistillConfig) -> list[str]:
        return validate_training(config, _problems(config))

    def choose_rows(self, config: DistillConfig) -> type[SFTBuilder]:
        return choose_builder(splits_replies=config.data.split_replies)

    def bind(self, config: DistillConfig) -> BoundLoss:
        return bind(config.distillation)

    def teacher(self, config: DistillConfig) -> Teacher:
        return describe_teacher(config.distillation)

    def evaluate(
        self,
        dataset: TokenDataset,
        sums_N2: np.ndarray,
        reference_ND: np.ndarray | None,
        config: DistillConfig,
    ) -> Evaluation:
        """The means of the loss and its parts over held-out conversations."""
        num_label_tokens = int(dataset.num_label_tokens.sum())
        log_prob, kl = (sums_N2.sum(axis=0, dtype="float64") / num_label_tokens).tolist()
        ce_weight, kl_weight = find_weights(config.distillation)
        loss = kl_weight * kl - ce_weight * log_prob
        return Evaluation(
            row={
                "eval/loss": loss,
                "eval/ce": -log_prob,
                "eval/kl": kl,
                "eval/num_label_tokens": num_label_tokens,
                "eval/num_conversations": len(dataset),
            },
            sentence=f"held-out loss {{when}}: {loss:.4f} (cross-entropy {-log_prob:.4f}, "
            f"divergence {kl:.4f}) over {spell_count(len(dataset), 'conversation')}",
        )


DISTILL = DistillationObjective()

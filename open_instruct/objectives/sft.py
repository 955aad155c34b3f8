"""Supervised fine-tuning: the cross-entropy of the replies, a mean over their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_instruct.config.sections import SFTDataSection, SFTOptimSection
from open_instruct.config.training import TrainingConfig
from open_instruct.core.batch_values import BatchValues
from open_instruct.core.records import Batch, mean_metrics
from open_instruct.core.text import spell_count
from open_instruct.data.sft_rows import SFTBuilder, choose_builder
from open_instruct.objectives.objective import (
    BoundLoss,
    Evaluation,
    LossOutputs,
    Objective,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import numpy as np

    from open_instruct.data.token_dataset import TokenDataset


@dataclass(kw_only=True)
class SFTConfig(TrainingConfig):
    """Train a model on conversations, every assistant turn of them, sharded as HSDP, and export it.

    Examples:
        open-instruct sft --model_name_or_path MODEL_DIR --mixer_list chats.jsonl 1.0 --output_dir
            runs/warm
        open-instruct sft sft/olmo3_7b_8gpu --num_processes 8 --output_dir runs/olmo3_sft
    """

    data: SFTDataSection
    optim: SFTOptimSection


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(BoundLoss):
    """`-sum(log p) / labels` of the global batch."""

    values_class = BatchValues

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        return LossOutputs(
            loss=-scores.logprobs_N.sum() / counts["labels"],
            metrics=mean_metrics({"loss": -scores.logprobs_N.detach()}),
        )


class SFTObjective(Objective[SFTConfig]):
    """Supervised fine-tuning on conversations."""

    name = "sft"
    config_class = SFTConfig
    rows = SFTBuilder

    def bind(self, config: SFTConfig) -> BoundLoss:
        return CrossEntropy()

    def choose_rows(self, config: SFTConfig) -> type[SFTBuilder]:
        return choose_builder(splits_replies=config.data.split_replies)

    def fills_packs(self, config: SFTConfig) -> bool:
        return config.data.packing_strategy == "bfd"

    def evaluate(
        self,
        dataset: TokenDataset,
        logps_ND: np.ndarray,
        reference_ND: np.ndarray | None,
        config: SFTConfig,
    ) -> Evaluation:
        """The mean loss over the reply tokens of held-out conversations."""
        num_label_tokens = int(dataset.num_label_tokens.sum())
        loss = -float(logps_ND.sum(dtype="float64")) / num_label_tokens
        return Evaluation(
            row={
                "eval/loss": loss,
                "eval/num_label_tokens": num_label_tokens,
                "eval/num_conversations": len(dataset),
            },
            sentence=f"held-out loss {{when}}: {loss:.4f} over "
            f"{spell_count(len(dataset), 'conversation')}",
        )


SFT = SFTObjective()

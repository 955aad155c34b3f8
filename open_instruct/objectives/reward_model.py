"""Reward models: one number for a conversation, higher for the chosen of two replies to a prompt.

Legend: P pairs of a microbatch, S = 2P documents of it (chosen first), N pairs of a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from open_instruct.config.sections import (
    OptimSection,
    PreferenceDataSection,
    PrefixSharing,
    RowsSection,
    flag,
)
from open_instruct.config.training import TrainingConfig, with_held_out
from open_instruct.config.validation import validate_training
from open_instruct.core.batch_values import MarginValues
from open_instruct.core.errors import InputError, problems_of_kind
from open_instruct.core.records import Batch, Metric, mean_metrics
from open_instruct.core.text import spell_count
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.rendered_row import RenderedRow
from open_instruct.data.files.rows import MalformedRow, name_json_type
from open_instruct.data.preference_rows import PreferenceBuilder, check_preference_row
from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.models.hf.head_kinds import Head, explain_missing_class, find_class
from open_instruct.objectives.objective import (
    BoundLoss,
    Evaluation,
    LossOutputs,
    Objective,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from open_instruct.data.token_dataset import TokenDataset

MARGIN = "margin"
LARGEST_MARGIN = 1e30
NUM_BINS = 10
SMALLEST_STD = 1e-8
# The mean square, reduced over ranks only to compute the standard deviation.
SQUARE = "rewards/square"


@dataclass(kw_only=True)
class RewardLossSection:
    """The loss of a reward model."""

    title: ClassVar[str] = "Loss"

    margin: bool = flag(
        f"subtract the '{MARGIN}' of a row, or 0, from the difference of its rewards", False
    )
    center_rewards_coefficient: float = flag(
        ("weight of the squared sum of a pair's rewards, which centres them at 0; 0.01 is common"),
        0.0,
        minimum=0,
    )


@dataclass(kw_only=True)
class RewardOptimSection(OptimSection):
    """As of any offline run, with the learning rate of a reward model."""

    learning_rate: float = flag("peak learning rate", 9e-6, above=0)


@dataclass(kw_only=True)
class RewardModelConfig(TrainingConfig):
    """Train a reward model on preference pairs, sharded as HSDP, and export it as transformers'
    class with a score.

    Examples:
        open-instruct reward_model --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0
            --output_dir runs/rm
        open-instruct reward_model reward_model/olmo3_7b_8gpu --num_processes 8
    """

    data: PreferenceDataSection
    loss: RewardLossSection
    optim: RewardOptimSection

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        return with_held_out("loss", "rewards/accuracy", "rewards/margin")


@problems_of_kind("conflict")
def _problems(config: RewardModelConfig) -> Iterator[str]:
    if config.parallel.tensor_parallel_degree > 1:
        yield (
            f"--tensor_parallel_degree {config.parallel.tensor_parallel_degree}: the head of a "
            "reward model is one row, which is not split; shard over more GPUs, or use "
            "--context_parallel_degree"
        )


class RewardBuilder(PreferenceBuilder):
    """Builds pairs whose replies are read at their ends; with `margin` also that number of the
    row.
    """

    reads_ends = True
    optional_keys: ClassVar[Mapping[str, str]] = {MARGIN: "--margin"}
    check = staticmethod(check_preference_row)

    def __init__(self, chat: ChatFormat, *, margin: bool, **common: Any) -> None:
        super().__init__(chat, **common)
        self.margin = margin

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        rendered_row = super().render(row)
        return replace(rendered_row, values=(read_margin(row),)) if self.margin else rendered_row

    def find_cut_warning(self) -> str | None:
        num_truncated = self.counts.num_truncated
        if not num_truncated:
            return None
        return (
            f"{spell_count(num_truncated, 'pair')} with a reply that was cut: its reward is read "
            "where it does not end; raise --max_seq_length, or leave such rows out"
        )


def read_margin(row: Mapping[str, Any]) -> float:
    """The margin of a row: how much better its chosen reply is.

    Raises:
        MalformedRow: the margin is no number.
    """
    value = row.get(MARGIN)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedRow(
            "bad_margin", f"{MARGIN!r} must be a number, not {name_json_type(value)}"
        )
    if not abs(value) <= LARGEST_MARGIN:
        raise MalformedRow(
            "bad_margin", f"{MARGIN!r} must be at most {LARGEST_MARGIN:g}, not {value}"
        )
    return float(value)


def pair_losses(
    rewards_2P: torch.Tensor, margins_P: torch.Tensor | None, center: float
) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin), and `center` times the square of their sum;
    float32.

    Llama 2 (Touvron et al. 2023, arXiv:2307.09288, equation 2), and Eisenstein et al. (2023,
    arXiv:2312.09244, equation 2).
    """
    from torch.nn.functional import logsigmoid

    chosen_P, rejected_P = rewards_2P.float()
    differences_P = chosen_P - rejected_P - (0.0 if margins_P is None else margins_P)
    return -logsigmoid(differences_P) + center * (chosen_P + rejected_P).square()


def bind(loss: RewardLossSection) -> BoundLoss:
    """The loss that the flags name."""
    return RewardLoss(center=loss.center_rewards_coefficient)


@dataclass(frozen=True, kw_only=True)
class RewardLoss(BoundLoss):
    """`pair_losses`; `center` is the weight of the squared sum of a pair's rewards."""

    values_class = MarginValues

    center: float

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        # Each document has one label, so the sum is its reward.
        rewards_S, _ = sum_by_sequence(
            scores.logprobs_N, scores.sequence_ids_N, batch.packed.num_sequences
        )
        rewards_2P = rewards_S.view(2, -1)
        margins_P = MarginValues.read(batch.values).margins_P
        losses_P = pair_losses(rewards_2P, margins_P, self.center)
        return LossOutputs(
            loss=losses_P.sum() / counts["rows"], metrics=reward_metrics(losses_P, rewards_2P)
        )

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return add_std(metrics)


def reward_metrics(losses_P: torch.Tensor, rewards_2P: torch.Tensor) -> dict[str, Metric]:
    """Means over the pairs of a microbatch, weighted by their number."""
    # Float64: their variance is the difference of two means, which may be a million times as large.
    chosen_P, rejected_P = rewards_2P.detach().double()
    values_P = {
        "loss": losses_P.detach(),
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/margin": chosen_P - rejected_P,
        "rewards/accuracy": (chosen_P > rejected_P).float(),
        "rewards/mean": (chosen_P + rejected_P) / 2,
        SQUARE: (chosen_P.square() + rejected_P.square()) / 2,
    }
    return mean_metrics(values_P)


def add_std(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with the standard deviation of all rewards of the step, which is no mean over
    ranks.
    """
    variance = metrics.pop(SQUARE) - metrics["rewards/mean"] ** 2
    return metrics | {"rewards/std": max(variance, 0.0) ** 0.5}


def find_class_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """The fields of config.json for transformers' class with a score; none where it has none of
    this family.
    """
    class_name = find_class(hf_config, "score")
    if class_name is None:
        return {}
    # The start model's mean and deviation, if any, describe other rewards.
    labels = {
        "num_labels": 1,
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }
    return {
        "architectures": [class_name],
        **labels,
        "score_mean": None,
        "score_std": None,
    }


def export_fields(
    data: RowsSection, tokenizer: PreTrainedTokenizerFast, hf_config: PretrainedConfig
) -> dict[str, Any]:
    """The fields that make config.json that of transformers' sequence classification class.

    Raises:
        InputError: a reply may end in the pad token, by which transformers finds the end of a
            row.
    """
    fields = find_class_fields(hf_config)
    if not fields:
        raise InputError(
            explain_missing_class(hf_config.model_type, "score"), kind="unsupported_model"
        )
    pad = tokenizer.pad_token_id
    chat = ChatFormat.from_flags(tokenizer, data)
    try:
        _, (reply,) = chat.render(
            [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}]
        )
    except MalformedRow as error:
        raise InputError(
            f"{error.reason}: how it ends a reply cannot be known", kind="bad_model"
        ) from error
    if not isinstance(pad, int) or pad == chat.tokenize([reply])[0][-1]:
        fault = "has no pad token" if pad is None else "pads with the token that ends a reply"
        raise InputError(
            f"the tokenizer {fault}, and transformers finds the end of a conversation, where "
            "its reward is read, by that token: give another special token as 'pad_token' in "
            "tokenizer_config.json",
            kind="bad_model",
        )
    return {**fields, "pad_token_id": pad}


class RewardObjective(Objective[RewardModelConfig]):
    """A model that scores replies, learned from preference pairs."""

    name = "reward_model"
    config_class = RewardModelConfig
    rows = RewardBuilder

    def validate(self, config: RewardModelConfig) -> list[str]:
        return validate_training(config, _problems(config))

    def bind(self, config: RewardModelConfig) -> BoundLoss:
        return bind(config.loss)

    def prefix_sharing(self, config: RewardModelConfig) -> PrefixSharing:
        return config.data.prefix_sharing

    def choose_head(self, config: RewardModelConfig) -> Head:
        return "score"

    def row_arguments(self, config: RewardModelConfig) -> dict[str, Any]:
        return {"margin": config.loss.margin}

    def export_fields(
        self,
        config: RewardModelConfig,
        tokenizer: PreTrainedTokenizerFast,
        hf_config: PretrainedConfig,
    ) -> dict[str, Any]:
        return export_fields(config.data, tokenizer, hf_config)

    def evaluate(
        self,
        dataset: TokenDataset,
        rewards_N2: np.ndarray,
        reference_N2: np.ndarray | None,
        config: RewardModelConfig,
    ) -> Evaluation:
        """Accuracy, loss, and how the held-out rewards are spread; config.json keeps their mean and
        deviation.
        """
        import numpy as np
        import torch

        margins_N = None
        if config.loss.margin:
            margins_N = torch.tensor([float(dataset.values(row)[0]) for row in range(len(dataset))])
        rewards_2N = torch.from_numpy(rewards_N2).T
        losses_N = pair_losses(rewards_2N, margins_N, config.loss.center_rewards_coefficient)
        differences_N = rewards_2N[0] - rewards_2N[1]
        accuracy = float((differences_N > 0).float().mean())
        mean = float(rewards_N2.mean(dtype="float64"))
        std = float(rewards_N2.std(dtype="float64"))
        counts, edges = np.histogram(rewards_N2.astype("float64"), bins=NUM_BINS)
        return Evaluation(
            row={
                "eval/loss": float(losses_N.mean()),
                "eval/rewards/accuracy": accuracy,
                "eval/rewards/margin": float(differences_N.mean()),
                "eval/rewards/mean": mean,
                "eval/rewards/std": std,
                "eval/rewards/histogram": counts.tolist(),
                "eval/rewards/histogram_edges": edges.tolist(),
                "eval/num_pairs": len(dataset),
            },
            sentence=f"held-out accuracy {{when}}: {accuracy:.3f} of "
            f"{spell_count(len(dataset), 'pair')}, rewards {mean:.3f} +- {std:.3f}",
            exported={"score_mean": mean, "score_std": max(std, SMALLEST_STD)},
        )


REWARD_MODEL = RewardObjective()

"""Process reward models: for each step of a solution, the probability that it is right.

The model is read where a step ends, and tells classes apart there: by a head of two classes that is
new (wrong and right), or by the logits that its own head gives to a few words (`--reward_tokens`).

Legend: N steps of a microbatch, C classes, R rows of a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from open_instruct.config.sections import OptimSection, RowsSection, flag
from open_instruct.config.training import TrainingConfig, with_held_out
from open_instruct.config.validation import validate_training
from open_instruct.core.batch_values import StepLabelValues
from open_instruct.core.errors import InputError, problems_of_kind
from open_instruct.core.records import Batch, mean_metrics
from open_instruct.core.text import spell_count
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.step_rows import PlaceholderBuilder, StepBuilder
from open_instruct.models.hf.head_kinds import HEAD_SIZES, Head, explain_missing_class, find_class
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

# The classes of the new head, and the words of rows for them.
HEAD_LABELS = {"wrong": "-", "right": "+"}


@dataclass(kw_only=True)
class StepSection:
    """The steps of a solution, and how each is judged."""

    title: ClassVar[str] = "Steps"

    step_separator: str = flag(
        r"text behind each step of a row's list, at whose last token the step is judged (\n is a "
        r"line break); with "
        "--placeholder_token where a verifier cuts a completion into steps",
        r"\n",
    )
    placeholder_token: str | None = flag(
        (
            "rows are one text each, 'input', in which this token ends every step and is where "
            "the step is judged"
        ),
        None,
    )
    reward_tokens: list[str] = flag(
        "two or more words of one token each, of a right step first: their logits are learned, by "
        "the model's own head. Default: a new head of two classes, wrong and right",
        [],
    )

    @property
    def separator(self) -> str:
        return self.step_separator.replace(r"\n", "\n").replace(r"\t", "\t")

    @property
    def classes(self) -> tuple[str, ...]:
        """The words of rows for the classes, in the order of their logits."""
        return tuple(self.reward_tokens or HEAD_LABELS.values())

    @property
    def right(self) -> int:
        """The number of the class of a right step."""
        return 0 if self.reward_tokens else 1


@dataclass(kw_only=True)
class PRMOptimSection(OptimSection):
    """As of any offline run, with the learning rate of a process reward model."""

    learning_rate: float = flag("peak learning rate", 1e-6, above=0)


@dataclass(kw_only=True)
class PRMConfig(TrainingConfig):
    """Train a process reward model on solutions whose steps are labelled, sharded as HSDP, and
    export it.

    Examples:
        open-instruct prm --model_name_or_path MODEL_DIR --mixer_list steps.jsonl 1.0 --output_dir
            runs/first
        open-instruct prm prm/qwen3_8b_8gpu --num_processes 8 --output_dir runs/prm
    """

    steps: StepSection
    optim: PRMOptimSection

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        return with_held_out("loss", "accuracy")


@problems_of_kind("bad_value")
def _problems(config: PRMConfig) -> Iterator[str]:
    steps = config.steps
    words = steps.reward_tokens
    if len(words) == 1 or len(set(words)) < len(words):
        yield (
            f"--reward_tokens {' '.join(words)}: takes two or more different words, of a right "
            "step first, such as + -"
        )
    if not all(words):
        yield "--reward_tokens: an empty word is no token; give two words, such as + -"
    if not steps.step_separator:
        yield (
            r"--step_separator is empty, and ends no step; leave the flag out for a line break "
            r"(\n)"
        )
    if steps.placeholder_token is not None and not steps.placeholder_token.strip():
        yield (
            "--placeholder_token is blank, and ends no step; give the token that stands behind "
            "each step"
        )
    if steps.placeholder_token in words:
        yield (
            f"--placeholder_token {steps.placeholder_token} is one of --reward_tokens: the label "
            "would stand in the text; give another of either"
        )


def class_shares(labels_N: torch.Tensor, num_classes: int) -> torch.Tensor:
    """What a label gives to each class, (N, C): all to the class of its number, or parts to the two
    it lies between.
    """
    import torch

    numbers_C = torch.arange(num_classes, dtype=labels_N.dtype, device=labels_N.device)
    return (1 - (labels_N.unsqueeze(1) - numbers_C).abs()).clamp(min=0)


def step_losses(logits_NC: torch.Tensor, shares_NC: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of the classes' distribution against what the label gives to each of them;
    float32.

    Lightman et al. (2023, arXiv:2305.20050, section 2.6) for hard labels, Wang et al. (2023,
    arXiv:2312.08935, equation 2) for soft ones.
    """
    return -(shares_NC * logits_NC.float().log_softmax(dim=1)).sum(dim=1)


def judge_steps(scores: TokenLogprobs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each step, and whether the likeliest class is the label's."""
    logits_NC = scores.class_logits_NC
    labels_N = StepLabelValues.read(batch.values).labels_N
    assert logits_NC is not None and len(logits_NC) == len(labels_N), "a label for each step"
    shares_NC = class_shares(labels_N, logits_NC.shape[1])
    are_right_N = logits_NC.argmax(dim=1) == shares_NC.argmax(dim=1)
    return step_losses(logits_NC, shares_NC), are_right_N.float()


@dataclass(frozen=True, kw_only=True)
class StepLoss(BoundLoss):
    """The cross-entropy of the classes of steps, a mean over the steps of the global batch."""

    values_class = StepLabelValues

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        losses_N, are_right_N = judge_steps(scores, batch)
        return LossOutputs(
            loss=losses_N.sum() / counts["labels"],
            metrics=mean_metrics({"loss": losses_N.detach(), "accuracy": are_right_N}),
        )

    def sum_columns(self, scores: TokenLogprobs, batch: Batch) -> Sequence[torch.Tensor]:
        return judge_steps(scores, batch)


def bind(steps: StepSection) -> BoundLoss:
    """The loss that the flags name, without the ids of its words."""
    return StepLoss(words=tuple(steps.reward_tokens))


def choose_builder(steps: StepSection) -> type[RowBuilder]:
    """The class of the rows."""
    return StepBuilder if steps.placeholder_token is None else PlaceholderBuilder


def builder_arguments(steps: StepSection, *, add_bos: bool) -> dict[str, Any]:
    """The arguments of the class of rows beyond those of every `RowBuilder`."""
    classes = {"classes": steps.classes, "right": steps.right}
    if steps.placeholder_token is None:
        return {"step_end": steps.separator, **classes}
    return {
        "step_end": steps.placeholder_token,
        "add_bos": add_bos,
        **classes,
    }


def find_class_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """The fields of config.json for transformers' class with the new head.

    Raises:
        InputError: transformers has none of this family.
    """
    class_name = find_class(hf_config, "classes")
    if class_name is None:
        raise InputError(
            explain_missing_class(hf_config.model_type, "classes"), kind="unsupported_model"
        )
    return {
        "architectures": [class_name],
        "num_labels": HEAD_SIZES["classes"],
        "id2label": {str(number): name for number, name in enumerate(HEAD_LABELS)},
        "label2id": {name: number for number, name in enumerate(HEAD_LABELS)},
    }


def export_fields(
    steps: StepSection,
    data: RowsSection,
    tokenizer: PreTrainedTokenizerFast,
    hf_config: PretrainedConfig,
) -> dict[str, Any]:
    """The fields that say how a text begins, where a step ends, and which classes it has.

    Raises:
        InputError: transformers has no class of this family with the new head, or a reward token is
            no single token.
    """
    fields: dict[str, Any] = {
        "prm_step_separator": steps.separator,
        "prm_placeholder_token": steps.placeholder_token,
        # Of texts alone: elsewhere the chat template has it.
        "prm_add_bos": (data.add_bos and steps.placeholder_token is not None) or None,
        "prm_reward_tokens": list(steps.reward_tokens) or None,
    }
    if steps.reward_tokens:
        bind(steps).with_ids(tokenizer)
        return fields
    return find_class_fields(hf_config) | fields


class StepObjective(Objective[PRMConfig]):
    """A model that scores the steps of solutions."""

    name = "prm"
    config_class = PRMConfig
    rows = StepBuilder

    def validate(self, config: PRMConfig) -> list[str]:
        return validate_training(config, _problems(config))

    def bind(self, config: PRMConfig) -> BoundLoss:
        return bind(config.steps)

    def choose_rows(self, config: PRMConfig) -> type[RowBuilder]:
        return choose_builder(config.steps)

    def row_arguments(self, config: PRMConfig) -> dict[str, Any]:
        return builder_arguments(config.steps, add_bos=config.data.add_bos)

    def choose_head(self, config: PRMConfig) -> Head:
        return "vocabulary" if config.steps.reward_tokens else "classes"

    def export_fields(
        self, config: PRMConfig, tokenizer: PreTrainedTokenizerFast, hf_config: PretrainedConfig
    ) -> dict[str, Any]:
        return export_fields(config.steps, config.data, tokenizer, hf_config)

    def evaluate(
        self,
        dataset: TokenDataset,
        sums_N2: np.ndarray,
        reference_ND: np.ndarray | None,
        config: PRMConfig,
    ) -> Evaluation:
        """The means of loss and accuracy over the steps of held-out solutions."""
        num_steps = int(dataset.num_label_tokens.sum())
        loss, accuracy = (sums_N2.sum(axis=0, dtype="float64") / num_steps).tolist()
        return Evaluation(
            row={
                "eval/loss": loss,
                "eval/accuracy": accuracy,
                "eval/num_steps": num_steps,
                "eval/num_solutions": len(dataset),
            },
            sentence=(
                f"held-out accuracy {{when}}: {accuracy:.3f} of {spell_count(num_steps, 'step')}, "
                f"loss {loss:.4f}"
            ),
        )


PRM = StepObjective()

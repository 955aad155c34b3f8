"""What an objective is: a row form, a loss over log-probs, and the facts that training around it
needs.

An objective knows no backend. It receives the log-probs of the labelled tokens and the loader's
values, and returns a loss that is divided by counts over the whole global batch, so that the result
does not depend on how the batch is cut. Importing an objective loads no torch; its functions do.

Legend: N labelled tokens of a microbatch or rows of a data set, D documents of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from open_instruct.config.sections import PrefixSharing
from open_instruct.config.training import LearnerConfig, TrainingConfig
from open_instruct.config.validation import validate_training
from open_instruct.core.batch_values import BatchValues, RowValues
from open_instruct.core.records import Batch, Metric, StepBatch
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.tokenizer import find_token_id
from open_instruct.models.hf.head_kinds import Head

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from open_instruct.data.token_dataset import TokenDataset

Config = TypeVar("Config", bound=LearnerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-prob of every labelled token (nats, float32), row by row in the order of the labels, with
    its sequence id.

    `entropy_N` is that of the distribution the token was drawn from, and `collision_logprobs_N` the
    log-prob that two tokens drawn from it are the same: log(sum over v of p(v)^2). They carry no
    gradient. `measured_N` is the result of `Teacher.compare`, with gradient.

    Where the model has the head of a score, `logprobs_N` is the score at each label.
    `class_logits_NC` are the logits of the words that `BoundLoss.words` names, or those of a head
    of classes, with gradient.
    """

    logprobs_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    entropy_N: torch.Tensor | None = None
    collision_logprobs_N: torch.Tensor | None = None
    measured_N: torch.Tensor | None = None
    class_logits_NC: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The microbatch's share of the loss of the global batch (a scalar with gradient), and its
    metrics.
    """

    loss: torch.Tensor
    metrics: Mapping[str, Metric]


# Concatenates a tensor (rows, ...) of each data-parallel rank in rank order; ranks may have
# different numbers of rows.
Gather = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, kw_only=True)
class BoundLoss(ABC):
    """The loss of a run: an objective's loss, bound to its flags. A subclass computes it.

    It is not a function of plain tensors: those are in losses/, and a subclass calls them. It holds
    no state: every method is a function of its arguments and of the fields.

    Class attributes:
        values_class: the record that the loader makes of what comes with the rows, for `compute`.
        never_negative: metrics that only rounding makes negative.
        remedy: explains a violation of that, or of the first loss.

    Args:
        temperature: divides the logits.
        with_entropy: asks for `TokenLogprobs.entropy_N`.
        with_collisions: asks for `TokenLogprobs.collision_logprobs_N`.
        words: tokens of the vocabulary whose logits the loss reads, see
            `TokenLogprobs.class_logits_NC`.
        word_ids: their ids, known once there is a tokenizer, see `with_ids`.
        ld_alpha: how frozen log-probs are summed over the replies of a pair, see `sum_by_reply`.
        scores_before_step: whether `prepare` reads scores; that is a forward pass more.
        checks_first_loss: whether the first step is compared with `first_loss`.
    """

    values_class: ClassVar[type[BatchValues]] = RowValues
    never_negative: ClassVar[tuple[str, ...]] = ()
    remedy: ClassVar[str] = (
        "the reference log-probs do not belong to these weights and rows. Remove the folder "
        "'reference_logprobs' in --cache_dir and start again"
    )

    temperature: float = 1.0
    with_entropy: bool = False
    with_collisions: bool = False
    words: tuple[str, ...] = ()
    word_ids: tuple[int, ...] = ()
    ld_alpha: float | None = None
    scores_before_step: bool = False
    checks_first_loss: bool = True

    @abstractmethod
    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        """The microbatch's share of the loss of the global batch.

        The values of `batch` are on the device of the scores. `counts` are those of the step, over
        all ranks.
        """

    def select_scored(self, step: StepBatch) -> StepBatch:
        """The part of the step that is scored for `prepare`: all of it."""
        return step

    def prepare(
        self, step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather
    ) -> StepBatch:
        """The step to learn from: as it is.

        A loss overrides it where that of a row depends on other rows of the global batch, or on the
        policy before the update. Every rank calls it before the first backward pass, also a rank
        without rows. `scores` are the policy's of each microbatch of `select_scored`, without
        gradient; none without `scores_before_step`.
        """
        return step

    def find_temperatures(self, batch: Batch) -> float | torch.Tensor:
        """The temperature of the labels of a microbatch; a tensor (N,) on the CPU where it differs
        among them.
        """
        return self.temperature

    def first_loss(self, counts: Mapping[str, int]) -> float | None:
        """The loss of a policy that equals its reference; None where that is no known number."""
        return None

    def sum_columns(self, scores: TokenLogprobs, batch: Batch) -> Sequence[torch.Tensor]:
        """The values of each label, (N,) each, that are summed over held-out rows: the log-prob.

        `Objective.evaluate` receives one column for each.
        """
        return (scores.logprobs_N,)

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step, from those reduced over all ranks; here some may be added that are
        no means, such as a standard deviation.
        """
        return metrics

    def with_ids(self, tokenizer: PreTrainedTokenizerFast) -> Self:
        """The loss with the ids of its words.

        Raises:
            InputError: a word is not a single token.
        """
        word_ids = tuple(find_token_id(tokenizer, word) for word in self.words)
        return replace(self, word_ids=word_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A frozen model of the same vocabulary whose distribution at every label the policy's is
    compared with.

    `compare(logits_NV, teacher_NV)` receives the logits of both, over their common vocabulary, and
    returns a value for each position, with gradient. If `keep` is set, `keep(teacher_NV)` is
    computed once, a row of numbers for each label, cached on disk under the name `kept_as`, and
    passed to `compare` instead, so that training needs no teacher. It needs a vocabulary of more
    than `num_kept` tokens.
    """

    model_name_or_path: str
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keep: Callable[[torch.Tensor], torch.Tensor] | None = None
    kept_as: str = ""
    num_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out scores: a row of eval.jsonl, a sentence about it, and the fields it adds to the
    exported config.json.
    """

    row: Mapping[str, Any]
    sentence: str
    exported: Mapping[str, Any] = field(default_factory=dict)


class Objective(ABC, Generic[Config]):
    """One thing that can be learned from the rows of a data set. A subclass overrides what differs.

    It is not a loss: `bind` gives that. Every method is a function of the flags of a run, and is
    asked before anything is loaded.

    Class attributes:
        name: the command and the entry script, as in `open-instruct NAME`.
        config_class: its flags, in sections; see config/.
        rows: the class that checks and builds rows.
        documents_learned: the number of documents of a row that a step learns from, where that is
            not all; the others are scored before the step.
    """

    name: ClassVar[str]
    config_class: ClassVar[type]
    rows: ClassVar[type[RowBuilder]]
    documents_learned: ClassVar[int | None] = None

    def __init__(self) -> None:
        for attribute in ("name", "config_class", "rows"):
            if not hasattr(self, attribute):
                raise TypeError(f"{type(self).__name__} has no {attribute!r}")

    @abstractmethod
    def bind(self, config: Config) -> BoundLoss:
        """The loss under these flags."""

    def validate(self, config: Config) -> list[str]:
        """Check everything that the flags alone can tell, and return warnings.

        Raises:
            InputError: listing every problem, each with its remedy.
        """
        assert isinstance(config, TrainingConfig), f"write a {type(self).__name__}.validate"
        return validate_training(config)

    def choose_rows(self, config: Config) -> type[RowBuilder]:
        """The class of the rows under these flags."""
        return self.rows

    def row_arguments(self, config: Config) -> Mapping[str, Any]:
        """The arguments of the class of rows beyond those of every `RowBuilder`."""
        return {}

    def check_rows(
        self, dataset: TokenDataset, num_rows_per_step: int, config: Config
    ) -> list[str]:
        """Warnings about training rows, with so many of them in a step.

        Raises:
            InputError: these rows cannot work.
        """
        return []

    def needs_reference(self, config: Config) -> bool:
        """Whether frozen log-probs of the start model are needed for each document."""
        return False

    def reference_moves(self, config: Config) -> Mapping[str, Any]:
        """How the reference follows the policy, in the words of `training.reference.Reference`;
        without an `update_freq` it stays.
        """
        return {}

    def only_scores(self, config: Config) -> bool:
        """Whether the flags ask for the reference scores alone, without training."""
        return False

    def teacher(self, config: Config) -> Teacher | None:
        """The frozen model that the policy is compared with; None where there is none."""
        return None

    def prefix_sharing(self, config: Config) -> PrefixSharing:
        """Whether the documents of a row share what they begin with."""
        return "off"

    def fills_packs(self, config: Config) -> bool:
        """Whether a step counts packs of rows, filled before training, in place of rows."""
        return False

    def choose_head(self, config: Config) -> Head:
        """The kind of head; it is drawn at random where the start model has another kind."""
        return "vocabulary"

    def export_fields(
        self, config: Config, tokenizer: PreTrainedTokenizerFast, hf_config: PretrainedConfig
    ) -> Mapping[str, Any]:
        """The fields that the exported config.json adds to the start model's.

        Called before training, so that it refuses early.
        """
        return {}

    def evaluate(
        self,
        dataset: TokenDataset,
        logps_ND: np.ndarray,
        reference_ND: np.ndarray | None,
        config: Config,
    ) -> Evaluation:
        """The held-out scores, from sums of all held-out documents, float32.

        Args:
            dataset: the held-out rows.
            logps_ND: summed log-probs (N, D); with several `BoundLoss.sum_columns` (N, columns *
                D), those of each column side by side.
            reference_ND: the reference's; None where there is none.
            config: the flags of the run.
        """
        raise NotImplementedError(f"{type(self).__name__} scores no held-out rows")

    @property
    def scores_heldout_rows(self) -> bool:
        """Whether the objective has an `evaluate`."""
        return type(self).evaluate is not Objective.evaluate

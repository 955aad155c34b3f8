"""What an objective is: a row form, a loss over log-probs, and the facts that training around it
needs.

An objective knows no backend. It receives the log-probs of the labelled tokens and the loader's
values, and returns a loss that is divided by counts over the whole global batch, so that the result
does not depend on how the batch is cut. Importing an objective loads no torch; its functions do.

Legend: N labelled tokens of a microbatch or rows of a data set, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from open_instruct.config.sections import PrefixSharing
from open_instruct.config.training import TrainingConfig
from open_instruct.config.validation import validated
from open_instruct.core.batch_values import BatchValues, RLValues, RowValues
from open_instruct.core.records import Batch, Metric, StepBatch
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.tokenizer import single_token_id
from open_instruct.models.hf.head_kinds import Head

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from open_instruct.data.token_dataset import TokenDataset


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLoss:
    """The loss of a run: an objective's loss, bound to its flags.

    `function(scores, batch, counts)` is given the values of `batch`, a record of the class
    `values_class` that the loader makes, on the device of the scores. `temperature` divides the
    logits, except at the labels of `RLValues.ce`;
    `with_entropy` and `with_collisions` ask for these fields of `TokenLogprobs`. `ld_alpha` sets
    how frozen log-probs are summed over the replies of a pair, see `sum_by_reply`. `first_loss` is
    the loss of a policy that equals its reference, where that is a number or a count of the first
    step. `never_negative` are metrics that only rounding makes negative. `remedy` explains a
    violation of these; by default it is that of a loss with frozen scores.

    `prepare(step, scores, gather)` is set where the loss of a row depends on other rows of the
    global batch, or on the policy before the update. Before the first backward pass it receives the
    policy's log-probs of every microbatch, without gradient, and returns the step to learn from,
    perhaps with more `values` or fewer documents. `looks_at(step)` is the part of the step that is
    scored for `prepare`; None means all. Every rank calls both, also a rank without rows.

    `words`, each a token of the vocabulary, are those whose logits the loss reads, see
    `TokenLogprobs.class_logits_NC`. Their ids are known once there is a tokenizer, see `with_ids`.

    `derive` computes the metrics of a step that are no means, such as a standard deviation, from
    those reduced over all ranks. `summed(scores, batch)` are the values of each label that are
    summed over held-out rows in place of its log-prob; `Objective.evaluate` receives one column for
    each.
    """

    function: Callable[[TokenLogprobs, Batch, Mapping[str, int]], LossOutputs]
    prepare: Callable[[StepBatch, Sequence[TokenLogprobs], Gather], StepBatch] | None = None
    looks_at: Callable[[StepBatch], StepBatch] | None = None
    values_class: type[BatchValues] = RowValues
    temperature: float = 1.0
    with_entropy: bool = False
    with_collisions: bool = False
    ld_alpha: float | None = None
    first_loss: float | Callable[[Mapping[str, int]], float] | None = None
    never_negative: tuple[str, ...] = ()
    remedy: str = (
        "the reference log-probs do not belong to these weights and rows. Remove the folder "
        "'reference_logprobs' in --cache_dir and start again"
    )
    words: tuple[str, ...] = ()
    word_ids: tuple[int, ...] = ()
    derive: Callable[[dict[str, float]], dict[str, float]] | None = None
    summed: Callable[[TokenLogprobs, Batch], Sequence[torch.Tensor]] = lambda scores, batch: (
        scores.logprobs_N,
    )

    def with_ids(self, tokenizer: PreTrainedTokenizerFast) -> BoundLoss:
        """The loss with the ids of its words.

        Raises:
            InputError: a word is not a single token.
        """
        return replace(
            self, word_ids=tuple(single_token_id(tokenizer, word) for word in self.words)
        )

    def temperature_of(self, batch: Batch) -> float | torch.Tensor:
        """The temperature of the labels of a microbatch on the CPU; a tensor (N,) where it differs
        among them.
        """
        values = batch.values
        if not isinstance(values, RLValues) or values.ce is None or self.temperature == 1.0:
            return self.temperature
        import torch

        temperatures_N = torch.full((len(batch.packed.sequence_ids_N),), self.temperature)
        ones_M = torch.ones_like(values.ce.take(temperatures_N))
        return temperatures_N.masked_fill(values.ce.scatter(ones_M, len(temperatures_N)) > 0, 1.0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One thing that can be learned from the rows of a data set.

    Attributes:
        name: the command and the entry script, as in `open-instruct NAME`.
        config_class: its flags, in sections; see config/.
        validate: checks everything that the flags alone can tell, and returns warnings.
        rows: the class that checks and builds rows.
        rows_under: the same as a function of the flags, where it depends on them.
        documents_learned: the number of documents of a row that a step learns from, where that is
            not all; the others are scored before the step.
        check_rows: refuses training rows that cannot work with so many rows in a step, and returns
            warnings.
        needs_reference: whether these flags need frozen log-probs of the start model for each
            document.
        reference_moves: how the reference follows the policy, in the words of
            `learner.reference.Reference`; without an `update_freq` it stays.
        only_scores: whether these flags ask for the reference scores alone, without training.
        teacher: the frozen model that the policy is compared with under these flags; None where
            there is none.
        bind: the loss under the flags of a run.
        prefix_sharing: whether, under these flags, the documents of a row share what they begin
            with.
        fills_packs: whether, under these flags, a step counts packs of rows, filled before
            training, in place of rows.
        evaluate: from summed log-probs of all held-out documents (float32, (N, D); with a teacher
            (N, 2D): behind them the sums of the comparison) and the reference's, the held-out
            scores; None where there are none.
        head: the kind of head under these flags; it is drawn at random where the start model has
            another kind.
        row_arguments: under these flags, the arguments of `rows` beyond those of every
            `RowBuilder`.
        exported: the fields that the exported config.json adds to the start model's, under these
            flags and with this tokenizer. Called before training, so that it refuses early.
    """

    name: str
    config_class: type
    validate: Callable[[Any], list[str]] = validated
    rows: type[RowBuilder]
    rows_under: Callable[[Any], type[RowBuilder]] | None = None
    documents_learned: int | None = None
    check_rows: Callable[[TokenDataset, int, Any], list[str]] = (
        lambda dataset, num_rows_per_step, config: []
    )
    bind: Callable[[Any], BoundLoss]
    needs_reference: Callable[[Any], bool] = lambda config: False
    reference_moves: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    only_scores: Callable[[Any], bool] = lambda config: False
    teacher: Callable[[Any], Teacher | None] = lambda config: None
    prefix_sharing: Callable[[Any], PrefixSharing] = lambda config: "off"
    fills_packs: Callable[[Any], bool] = lambda config: False
    evaluate: Callable[[TokenDataset, np.ndarray, np.ndarray | None, Any], Evaluation] | None = None
    head: Callable[[Any], Head] = lambda config: "vocabulary"
    row_arguments: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    exported: Callable[[Any, PreTrainedTokenizerFast, PretrainedConfig], Mapping[str, Any]] = (
        lambda config, tokenizer, hf_config: {}
    )

    def rows_of(self, config: TrainingConfig) -> type[RowBuilder]:
        """The class of the rows under these flags."""
        return self.rows if self.rows_under is None else self.rows_under(config)

"""What an objective is: a row form, a loss over log-probs, and the facts that the walk around it needs.

An objective knows no backend. It is given the log-probs of the labelled tokens and what the loader put beside them, and
returns a loss that is divided by counts over the whole global batch, so that the result does not depend on how the
batch is cut. Importing one loads no torch: that happens inside its functions.

Legend: N labelled tokens of a microbatch or rows of a data set, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from open_instruct.config.sections import PrefixSharing
from open_instruct.config.training import TrainingConfig
from open_instruct.config.validation import validated
from open_instruct.data.chat import single_token_id
from open_instruct.data.row_builder import RowBuilder
from open_instruct.models.hf.names import Head
from open_instruct.records import Batch, Metric, StepBatch

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from open_instruct.data.token_dataset import TokenDataset

# The token log-probs of a reference policy that stands beside the policy, among `Batch.values`.
REFERENCE_TOKENS = "reference_logprobs_N"
# The frozen scores of a reference policy, as `Batch.values` and evaluations name them (there with `_S` behind it).
REFERENCE = "reference_logps"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-prob of every labelled token (nats, float32), row by row in the order of the labels, and whose it is.

    `entropy_N` is that of the distribution the token was drawn from, and `collision_logprobs_N` the log-prob that two
    tokens drawn from it are the same: log(sum over v of p(v)^2). They carry no gradient. `measured_N` is what the
    objective's `Teacher` compares, with gradient.

    Where another head is read, `values_NC` is what it says at each label: the score (C = 1), or the logit of each class
    (`BoundLoss.classes`). `logprobs_N` is then the score itself, or the log-prob of the first class among them.
    """

    logprobs_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    entropy_N: torch.Tensor | None = None
    collision_logprobs_N: torch.Tensor | None = None
    values_NC: torch.Tensor | None = None
    measured_N: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The microbatch's share of the loss of the global batch (a scalar with gradient), and its metrics."""

    loss: torch.Tensor
    metrics: Mapping[str, Metric]


# Of a tensor (rows, ...) of each data-parallel rank, however many rows it has: those of all ranks, in their order.
Gather = Callable[["torch.Tensor"], "torch.Tensor"]
Summed = Callable[[TokenLogprobs, Batch], Sequence["torch.Tensor"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLoss:
    """The loss of a run: an objective's, with the settings of its flags.

    `function(scores, batch, counts)` is given the values of `batch` on the device of the scores. `temperature`
    divides the logits, but for those of the labels that the value called `unscaled` lists; `with_entropy` and
    `with_collisions` ask for what `TokenLogprobs` may have. `ld_alpha` says how frozen log-probs are summed over the
    replies of a pair, see `sum_by_reply`. `first_loss` is the loss of a policy that equals its reference, where that is
    a number, or one of the counts of the first step; `never_negative` are metrics that are below 0 by rounding at most;
    `remedy` says what it means that a step had another: by default, of a loss that is held against frozen scores.

    `prepare(step, scores, gather)` is there where the loss of a row depends on other rows of the global batch, or on
    the policy before the update. It is given the policy's log-probs of every microbatch, without gradient, before the
    first of them is learned from, and returns the step that is to be learned: with `values` more, documents fewer.
    `looks_at(step)` is what of the step is scored for it, where that is not all. Every rank calls them, also one
    without rows.

    `classes` are words, each one token, whose logits are read in place of log-probs; `class_ids` are their ids, once
    there is a tokenizer. `derive` makes the metrics of a step of those that were reduced over all ranks, where some
    are no means: a standard deviation. `summed(scores, batch)` are values of each label that are added up, of held-out
    rows, in place of its log-prob: `Objective.evaluate` is then given a column for each.
    """

    function: Callable[[TokenLogprobs, Batch, Mapping[str, int]], LossOutputs]
    prepare: Callable[[StepBatch, Sequence[TokenLogprobs], Gather], StepBatch] | None = None
    looks_at: Callable[[StepBatch], StepBatch] | None = None
    temperature: float = 1.0
    unscaled: str = ""
    with_entropy: bool = False
    with_collisions: bool = False
    ld_alpha: float | None = None
    first_loss: float | Callable[[Mapping[str, int]], float] | None = None
    never_negative: tuple[str, ...] = ()
    remedy: str = (
        "the reference log-probs do not belong to these weights and rows. Remove the folder 'reference_logprobs' in "
        "--cache_dir and start again"
    )
    classes: tuple[str, ...] = ()
    class_ids: tuple[int, ...] = ()
    derive: Callable[[dict[str, float]], dict[str, float]] | None = None
    summed: Summed = lambda scores, batch: (scores.logprobs_N,)

    def temperature_of(self, batch: Batch) -> float | torch.Tensor:
        """Of the labels of a microbatch on the CPU, (N,) where it is not the same for all."""
        tokens_M = batch.values.get(self.unscaled)
        if tokens_M is None or self.temperature == 1.0:
            return self.temperature
        import torch

        num_labels = int((batch.packed.sequence_ids_BT >= 0).sum())
        return torch.full((num_labels,), self.temperature).index_fill(0, tokens_M, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A frozen model of the same vocabulary whose distribution at every label the policy's is compared with.

    `compare(logits_NV, teacher_NV)` is given the logits of both, over the tokens that both know, and returns a value
    for each position, with gradient. Where `keep` is there, `keep(teacher_NV)` is computed once, a row of numbers for
    each label, kept on disk under the name `kept_as`, and given to `compare` instead: then no teacher is there during
    training. It needs a vocabulary of more than `num_kept` tokens.
    """

    model_name_or_path: str
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keep: Callable[[torch.Tensor], torch.Tensor] | None = None
    kept_as: str = ""
    num_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out scores: a row of eval.jsonl, what is said of it, and what the exported config.json keeps of it."""

    row: Mapping[str, Any]
    sentence: str
    exported: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One thing that can be learned from the rows of a data set.

    Attributes:
        name: of its command and its entry, as in `open-instruct NAME`.
        config_class: its flags, in sections; see config/.
        validate: checks everything that the flags alone can tell, and returns warnings.
        rows: what a row must look like, and what is kept of it.
        rows_under: the same under these flags, where it depends on them.
        documents_learned: of the documents of a row, how many a step learns from, where that is not all; the others are
            scored before it.
        check_rows: given the training rows and how many of them a step has, refuses what cannot work, and returns
            warnings.
        needs_reference: whether, under these flags, frozen log-probs of the start model go with each document.
        reference_moves: how the reference follows the policy, in the words of `learner.reference_policy.Reference`;
            without an `update_freq` it does not.
        only_scores: whether these flags ask for those alone, and no training.
        teacher: the frozen model, under these flags, that the policy is compared with; None where there is none.
        bind: the loss under the flags of a run.
        prefix_sharing: whether, under these flags, the documents of a row share their prompt.
        fills_packs: whether, under these flags, a step counts packs of rows, filled before training, in place of rows.
        evaluate: from summed log-probs of all held-out documents (float32, (N, D); with a teacher (N, 2D): behind them
            the sums of what was compared) and the reference's; None where there is nothing to tell of them.
        head: what the model says at a position; its first head is drawn where the start model has another.
        row_arguments: what `rows` is made with, under these flags, beside what every form of row is.
        exported: under these flags, with this tokenizer and for this start model, what the exported config.json has
            more than the start model's. Called before training, so what will not do is refused there.
    """

    name: str
    config_class: type
    validate: Callable[[Any], list[str]] = validated
    rows: type[RowBuilder]
    rows_under: Callable[[Any], type[RowBuilder]] | None = None
    documents_learned: int | None = None
    check_rows: Callable[[TokenDataset, int, Any], list[str]] = lambda dataset, num_rows_per_step, config: []
    bind: Callable[[Any], BoundLoss]
    needs_reference: Callable[[Any], bool] = lambda config: False
    reference_moves: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    only_scores: Callable[[Any], bool] = lambda config: False
    teacher: Callable[[Any], Teacher | None] = lambda config: None
    prefix_sharing: Callable[[Any], PrefixSharing] = lambda config: "off"
    fills_packs: Callable[[Any], bool] = lambda config: False
    evaluate: Callable[[TokenDataset, np.ndarray, np.ndarray | None, Any], Evaluation] | None = None
    head: Head = "vocabulary"
    row_arguments: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    exported: Callable[[Any, PreTrainedTokenizerFast, PretrainedConfig], Mapping[str, Any]] = (
        lambda config, tokenizer, hf_config: {}
    )

    def bound(self, config: TrainingConfig, tokenizer: PreTrainedTokenizerFast) -> BoundLoss:
        """`bind`, with the ids of the words that the loss reads.

        Raises:
            InputError: one is not a single token.
        """
        loss = self.bind(config)
        return replace(loss, class_ids=tuple(single_token_id(tokenizer, word) for word in loss.classes))

    def rows_of(self, config: TrainingConfig) -> type[RowBuilder]:
        """The form of the rows under these flags."""
        return self.rows if self.rows_under is None else self.rows_under(config)

    @property
    def program(self) -> str:
        return f"{self.name}.py"

"""What an objective is: a row form, a loss over log-probs, and the facts that the walk around it needs.

An objective knows no backend. It is given the log-probs of the labelled tokens and what the loader put beside them, and
returns a loss that is divided by counts over the whole global batch, so that the result does not depend on how the
batch is cut. Importing one loads no torch: that happens inside its functions.

Legend: N labelled tokens of a microbatch or rows of a data set, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from open_instruct.config.sections import PrefixSharing
from open_instruct.data.row_builder import RowBuilder
from open_instruct.records import Batch, Metric, StepBatch

if TYPE_CHECKING:
    import numpy as np
    import torch

    from open_instruct.data.token_dataset import TokenDataset

# The frozen scores of a reference policy, as `Batch.values` and evaluations name them (there with `_S` behind it).
REFERENCE = "reference_logps"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-prob of every labelled token (nats, float32), row by row in the order of the labels, and whose it is.

    `entropy_N` is that of the distribution the token was drawn from; it carries no gradient. `measured_N` is what the
    objective's `Teacher` compares, with gradient.
    """

    logprobs_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    entropy_N: torch.Tensor | None = None
    measured_N: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The microbatch's share of the loss of the global batch (a scalar with gradient), and its metrics."""

    loss: torch.Tensor
    metrics: Mapping[str, Metric]


# Of a tensor (rows, ...) of each data-parallel rank, however many rows it has: those of all ranks, in their order.
Gather = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLoss:
    """The loss of a run: an objective's, with the settings of its flags.

    `function(scores, batch, counts)` is given the values of `batch` on the device of the scores. `temperature`
    divides the logits; `with_entropy` asks for the entropy at every label. `first_loss` is the loss of a policy that
    equals its reference, where that is a number; `never_negative` are metrics that are below 0 by rounding at most;
    `remedy` says what it means that a step had another.

    `prepare(step, scores, gather)` is there where the loss of a row depends on other rows of the global batch, or on
    the policy before the update. It is given the policy's log-probs of every microbatch, without gradient, before the
    first of them is learned from, and returns the step that is to be learned: with `values` more, documents fewer.
    Every rank calls it, also one without rows.
    """

    function: Callable[[TokenLogprobs, Batch, Mapping[str, int]], LossOutputs]
    prepare: Callable[[StepBatch, Sequence[TokenLogprobs], Gather], StepBatch] | None = None
    temperature: float = 1.0
    with_entropy: bool = False
    first_loss: float | None = None
    never_negative: tuple[str, ...] = ()
    remedy: str = ""


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
    """Held-out scores: a row of eval.jsonl, and what is said of it."""

    row: Mapping[str, float]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One thing that can be learned from the rows of a data set.

    Attributes:
        name: of its command and its entry, as in `open-instruct NAME`.
        config_class: its flags, in sections; see config/.
        validate: checks everything that the flags alone can tell, and returns warnings.
        rows: what a row must look like, and what is kept of it.
        needs_reference: whether, under these flags, frozen log-probs of the start model go with each document.
        only_scores: whether these flags ask for those alone, and no training.
        teacher: the frozen model, under these flags, that the policy is compared with; None where there is none.
        bind: the loss under the flags of a run.
        prefix_sharing: whether, under these flags, the documents of a row share their prompt.
        evaluate: from summed log-probs of all held-out documents (float32, (N, D); with a teacher (N, 2D): behind them
            the sums of what was compared) and the reference's; None where there is nothing to tell of them.
    """

    name: str
    config_class: type
    validate: Callable[[Any], list[str]]
    rows: type[RowBuilder]
    bind: Callable[[Any], BoundLoss]
    needs_reference: Callable[[Any], bool] = lambda config: False
    only_scores: Callable[[Any], bool] = lambda config: False
    teacher: Callable[[Any], Teacher | None] = lambda config: None
    prefix_sharing: Callable[[Any], PrefixSharing] = lambda config: "off"
    evaluate: Callable[[TokenDataset, np.ndarray, np.ndarray | None, Any], Evaluation] | None = None

    @property
    def program(self) -> str:
        return f"{self.name}.py"

"""What a loss reads of a microbatch beside the policy's own log-probs: one record for each kind of
objective.

Look for a record's name to find who writes its fields and who reads them.

| record | read by | written by |
|---|---|---|
| `BatchValues` | supervised fine-tuning, which needs none | |
| `RowValues` | an objective of the user's own | the loader |
| `PreferenceValues` | DPO and its relatives | the loader, `objectives/dpo.py` |
| `UnpairedValues` | KTO and its relatives | the loader, `objectives/kto.py` |
| `MarginValues` | reward models | the loader |
| `StepLabelValues` | process reward models | the loader |
| `TeacherValues` | distillation | the loader |
| `RLValues` | policy gradients, the critic | `batching/rollouts.py`, the policy, the critic |

Legend: R rows of a microbatch, P pairs, S = R * D documents of R rows (document d of row r is d * R
+ r), N labelled tokens, in the order of the labels, M those of one stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    import torch

LogprobsField = Literal["old_logprobs_N", "reference_logprobs_N", "teacher_logprobs_N"]
"""The fields that hold a model's log-prob of each labelled token, computed during training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchValues:
    """The values that any objective may have; as it stands, an objective that needs none of its
    rows.

    `reference_logprobs_N` are the log-probs of a reference policy that is computed during training:
    one that follows the policy, or that of a KL penalty.
    """

    reference_logprobs_N: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls, *, reference_logps_S: torch.Tensor | None, row_numbers: torch.Tensor | None
    ) -> Self:
        """The record of what the loader has: `reference_logps_S`, the frozen reference's sum over
        the replies of each document, and `row_numbers`, all numbers that came with the rows, one
        row's behind the other's; float32, None where there are none.
        """
        assert reference_logps_S is None and row_numbers is None, f"{cls.__name__} has neither"
        return cls()

    @classmethod
    def read(cls, values: BatchValues) -> Self:
        """`values`, which must be of this class."""
        assert isinstance(values, cls), f"{type(values).__name__} is no {cls.__name__}"
        return values

    def with_logprobs(self, field: LogprobsField, logprobs_N: torch.Tensor) -> Self:
        """The values with a model's log-prob of each labelled token."""
        added: dict[str, Any] = {field: logprobs_N}
        return replace(self, **added)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues(BatchValues):
    """All that the loader has, as it is; a loss of the user's own reads it, or a subclass.

    Example: of two rows, one with the number 0.5 and one with 1.0 and 2.0, `row_numbers` are
    `tensor([0.5, 1.0, 2.0])`.
    """

    reference_logps_S: torch.Tensor | None = None
    row_numbers: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls, *, reference_logps_S: torch.Tensor | None, row_numbers: torch.Tensor | None
    ) -> Self:
        return cls(reference_logps_S=reference_logps_S, row_numbers=row_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceValues(BatchValues):
    """The values of preference pairs: S = 2P, the chosen replies first.

    `reference_logps_S` is None where the loss has no reference, or one that follows the policy.
    `rank_partners_3P` are the rows of `losses.rank_matching.RankPartners`, where the loss sorts a
    global batch.

    Example: two pairs, rows 7 and 3: sequences 0 and 1 are the chosen replies of rows 7 and 3, 2
    and 3 the rejected ones, and `reference_logps_S` may be `tensor([-3.0, -9.5, -8.0, -7.5])`.
    """

    reference_logps_S: torch.Tensor | None = None
    rank_partners_3P: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls, *, reference_logps_S: torch.Tensor | None, row_numbers: torch.Tensor | None
    ) -> Self:
        assert row_numbers is None, "preference pairs come without numbers"
        return cls(reference_logps_S=reference_logps_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedValues(BatchValues):
    """The values of single replies that are labelled good or bad.

    `is_desirable_R` is bool. With mismatched replies `reference_logps_S` is of both documents of
    each row, until a step is prepared: then of the row's own reply alone, and `z0` (a scalar) is
    the policy's estimated distance from the reference.

    Example: a good and a bad reply, prepared, have `is_desirable_R` `tensor([True, False])`,
    `reference_logps_S` `tensor([-3.0, -9.5])` and `z0` `tensor(0.1)`.
    """

    is_desirable_R: torch.Tensor
    reference_logps_S: torch.Tensor
    z0: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls, *, reference_logps_S: torch.Tensor | None, row_numbers: torch.Tensor | None
    ) -> Self:
        assert row_numbers is not None, "each row has a label"
        if reference_logps_S is None:  # this batch is read to compute them
            reference_logps_S = row_numbers[:0]
        return cls(is_desirable_R=row_numbers > 0, reference_logps_S=reference_logps_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginValues(BatchValues):
    """The values of preference pairs that a reward model scores.

    `margins_P` says how much better each chosen reply is, float32; None without `--margin`.
    """

    margins_P: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls, *, reference_logps_S: torch.Tensor | None, row_numbers: torch.Tensor | None
    ) -> Self:
        assert reference_logps_S is None, "reward models have no reference"
        return cls(margins_P=row_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabelValues(BatchValues):
    """The values of solutions whose steps are labelled.

    `labels_N` is the number of each step's class, float32; a soft label lies between two of them.
    """

    labels_N: torch.Tensor

    @classmethod
    def from_rows(
        cls, *, reference_logps_S: torch.Tensor | None, row_numbers: torch.Tensor | None
    ) -> Self:
        assert reference_logps_S is None, "process reward models have no reference"
        assert row_numbers is not None, "each step has a label"
        return cls(labels_N=row_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherValues(BatchValues):
    """The values of conversations that are learned from a teacher.

    `stored_numbers` are the C numbers that were stored of the teacher's distribution at each label
    (`objective.Teacher.keep`), float32 (N * C,); None where the teacher runs beside the student.
    """

    stored_numbers: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls, *, reference_logps_S: torch.Tensor | None, row_numbers: torch.Tensor | None
    ) -> Self:
        assert reference_logps_S is None, "distillation has no reference"
        return cls(stored_numbers=row_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The labelled tokens of a microbatch that one of the losses of reinforcement learning learns
    from, and their weights.

    `tokens_M` are places among the labels, int64; None means all of them. `weights_M` None means a
    weight of 1 for each.
    """

    tokens_M: torch.Tensor | None = None
    weights_M: torch.Tensor | None = None

    def take(self, values_N: torch.Tensor) -> torch.Tensor:
        """The values of the stream's tokens, (M,), so that other tokens between them do not change
        any bit of a sum.
        """
        if self.tokens_M is None:
            return values_N
        return values_N.index_select(0, self.tokens_M.to(values_N.device))

    def scatter(self, values_M: torch.Tensor, num_labels: int) -> torch.Tensor:
        """The opposite of `take`: one value for each label, 0 for other tokens."""
        if self.tokens_M is None:
            return values_M
        zeros_N = values_M.new_zeros(num_labels)
        return zeros_N.index_copy(0, self.tokens_M.to(values_M.device), values_M)

    def weigh(self, values_M: torch.Tensor) -> torch.Tensor:
        """The values of the stream's tokens, each times its weight."""
        return values_M if self.weights_M is None else values_M * self.weights_M


@dataclass(frozen=True, slots=True, kw_only=True)
class RLValues(BatchValues):
    """The values of sampled completions, and of conversations that are learned beside them.

    Args:
        engine_logprobs_N: the engine's, under the sampling temperature; 0 where nothing was
            sampled.
        advantages_N: those of the completion; with a critic, of each token.
        rl: the tokens of the policy loss.
        kl: those of the penalty for the distance to a frozen model.
        ce: those of the cross-entropy; None where there are none.
        old_logprobs_N: of the policy at the start of the step; None where the forward pass that is
            learned from gives them.
        teacher_logprobs_N: of a teacher.
        is_learned_M: of the tokens of `rl`, 1 at those that are learned; None means all.
        is_marked_M: of the same, 1 at those that the policy loss treats apart.
        returns_N: what the critic learns; 0 where nothing was sampled.
        old_values_N: what the critic said at the start of the step.
        explained_variance: the share of the returns' variance that the critic explains, a scalar.

    Example: a completion of two tokens with advantage 0.7 has `engine_logprobs_N` `tensor([-0.1,
    -0.02])` and `advantages_N` `tensor([0.7, 0.7])`.
    """

    engine_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    rl: Stream = Stream()
    kl: Stream = Stream()
    ce: Stream | None = None
    old_logprobs_N: torch.Tensor | None = None
    teacher_logprobs_N: torch.Tensor | None = None
    is_learned_M: torch.Tensor | None = None
    is_marked_M: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None
    old_values_N: torch.Tensor | None = None
    explained_variance: torch.Tensor | None = None

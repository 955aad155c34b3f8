"""The frozen records that pass between rooms.

Legend for tensor names: B rows of a microbatch, T tokens of a row, S sequences (documents) in a
microbatch, P preference pairs, K label positions kept for the language-model head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from open_instruct.core.batch_values import BatchValues
from open_instruct.core.episodes import Episode as Episode
from open_instruct.core.episodes import EpisodeBranch as EpisodeBranch
from open_instruct.core.episodes import EpisodeStatus as EpisodeStatus
from open_instruct.core.spans import Span as Span

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
# The usual weights of a completion's tokens in each loss.
USUAL_WEIGHTS = {
    "rl": 1.0,
    "ce": 0.0,
    "kl": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One tokenised conversation and its learned parts: its replies, in order, at least one.

    With `reads_ends` the model is read only at the last token of each reply, not at the prediction
    of every token.

    Example::

        Document(token_ids=(5, 9, 2, 7, 3), responses=(Span(start=3, stop=5),))

    predicts token 7 from the first three tokens and token 3 from the first four.
    """

    token_ids: tuple[int, ...]
    responses: tuple[Span, ...]
    reads_ends: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_label_tokens(self) -> int:
        """The number of labels: tokens of replies, or their ends."""
        if self.reads_ends:
            return len(self.responses)
        return sum(len(response) for response in self.responses)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One microbatch of documents, packed end to end in one row or padded one to a row.

    Labels are shifted already: `labels_BT[b, t]` is the token that position t should predict, or
    IGNORE_INDEX. The labels of all documents, one after another as they lie in the rows, are N:
    `label_positions_N` says where each is predicted (position t of row b is b * T + t),
    `sequence_ids_N` of which document (0..num_sequences-1) it is. `document_lengths` is None in
    padded rows, where causality alone keeps the padding on the right from being seen.

    Where documents share what they begin with, `document_lengths` are those of what each of them
    adds to the row, and `prefix_lengths` says how many tokens it begins with of those of the
    document before it, which may have shared them too. The last common token is repeated in each,
    since the token after it differs: so every position has at most one label, which belongs to
    every document that learns it there. `num_tokens` counts what lies in the row.

    `num_shared_tokens` counts what sharing saves: the tokens that are left out of the row.
    `kept_BK` are the positions that have a label, int64, where the language-model head runs.
    `routes_TR` are the experts that an engine chose for each token of a packed row, int16, layer by
    layer, -1 where they are not known.

    Example: documents (5, 9, 2, 7) and (4, 6) with replies (7) and (6), packed::

        input_ids_BT      [[5, 9, 2, 7, 4, 6]]
        labels_BT         [[-100, -100, 7, -100, 6, -100]]
        label_positions_N [2, 4]
        sequence_ids_N    [0, 1]
        document_lengths  (4, 2)
        num_sequences     2
        num_tokens        6

    Example: documents (5, 9, 2, 7) and (5, 9, 2, 8, 3), whose replies are (7) and (8, 3), sharing
    (5, 9)::

        input_ids_BT      [[5, 9, 2, 7, 2, 8, 3]]
        labels_BT         [[-100, -100, 7, -100, 8, 3, -100]]
        label_positions_N [2, 4, 5]
        sequence_ids_N    [0, 1, 1]
        document_lengths  (4, 3)
        prefix_lengths    (0, 2)
        num_sequences     2
        num_tokens        7
        num_shared_tokens 2
    """

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    label_positions_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    document_lengths: tuple[int, ...] | None
    num_sequences: int
    num_tokens: int
    prefix_lengths: tuple[int, ...] | None = None
    num_shared_tokens: int = 0
    kept_BK: torch.Tensor | None = None
    routes_TR: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch: its documents as tensors, the ids of their rows, and values for the loss.

    The documents of R rows with D documents each lie document by document: sequence d * R + r is
    document d of row `row_ids[r]`. `values` is the record of the objective's kind, see
    core/batch_values.py. A microbatch of no rows still holds one unlabelled document, so that every
    rank enters the same collectives.

    `documents` are those of the sequences, in their order, for an objective that packs some of them
    again.

    Example: two preference pairs, rows 7 and 3, are `Batch(packed=..., row_ids=(7, 3),
    values=PreferenceValues(reference_logps_S=tensor([-3.0, -9.5, -8.0, -7.5])))`.
    """

    packed: PackedBatch
    row_ids: tuple[int, ...]
    values: BatchValues = field(default_factory=BatchValues)
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One rank's microbatches of one optimizer update, and the counts over all ranks that losses
    are divided by.

    Example: `StepBatch(microbatches=(...), counts={"rows": 64, "labels": 9120, "tokens": 20480})`.
    """

    microbatches: tuple[Batch, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number to be reduced over ranks: `sum(value)`, `sum(value * weight) / sum(weight)` or
    `max(value)`.

    Example: a rank that saw 3 pairs with mean loss 0.5 reports `Metric(value=0.5, weight=3.0)`.
    """

    value: float | torch.Tensor
    weight: float | torch.Tensor = 1.0
    reduction: Literal["mean", "sum", "max"] = field(default="mean")


def mean_metrics(values_N: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Means over the labelled tokens, rows or pairs of a microbatch, weighted by their number, 0
    for none.
    """
    return {
        name: Metric(value=value_N.sum() / max(value_N.numel(), 1), weight=float(value_N.numel()))
        for name, value_N in values_N.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One judgement of an answer: the verifier, the ground truth, and the weight.

    Example: `Check(verifier="gsm8k", ground_truth="42", weight=1.0)`.
    """

    verifier: str
    ground_truth: Any  # any JSON value, whose form the verifier defines
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as the engine receives it, with the checks that judge its answers.

    Example::

        Prompt(row_id=7, token_ids=(1, 40, 11, 2), text="<|user|>What is 2 + 3?…", checks=(
            Check(verifier="gsm8k", ground_truth="5"),
        ))
    """

    row_id: int
    token_ids: tuple[int, ...]
    text: str
    checks: tuple[Check, ...]
    environment: str = ""  # the name of what answers replies; none where a completion is one turn
    # The columns that the environment is made of, and `messages`.
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine generated for a prompt, token by token; the end-of-turn token, if it came, is
    the last.

    `logprobs` are the engine's, under the sampling temperature; `versions` says which weights made
    each token (0 is the model the run started from, s the policy after step s). `text` leaves the
    end-of-turn token out.

    An episode of several turns is one completion, too. Then `token_ids` are all tokens after the
    first prompt, and `replies` those of them that were sampled: `logprobs` and `versions` belong to
    these. `text` is the last reply.

    `routes` are the experts of each token of prompt and completion but the last, as the engine
    chose them when it sampled what follows: int16, layer by layer, -1 where they are not known;
    nothing where they were not asked for.

    Example::

        Completion(token_ids=(61, 2), logprobs=(-0.1, -0.02), versions=(3, 3), text="5",
                   finish_reason="stop", seed=17)
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    seed: int
    episode: Episode | None = None
    routes: bytes = b""

    def __post_init__(self) -> None:
        assert sum(map(len, self.replies)) == len(self.logprobs) == len(self.versions)

    @property
    def replies(self) -> tuple[Span, ...]:
        """The sampled tokens, as spans of `token_ids`."""
        if self.episode is None:
            return (Span(start=0, stop=len(self.token_ids)),)
        return self.episode.replies

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of a completion: its reward for training, and each verifier's own score in
    0..1.

    Example: `Verdict(reward=1.0, scores={"gsm8k": 1.0})`; `problems` names verifiers that failed or
    took too long.
    """

    reward: float
    scores: dict[str, float]
    problems: tuple[str, ...] = ()
    overlong_penalty: float | None = None
    """What `--overlong_penalty` has added to the reward; None without that flag."""

    @property
    def is_right(self) -> bool:
        """Whether every verifier accepted the completion in full; one whose score may be any number
        accepts none.
        """
        return set(self.scores.values()) == {1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of a prompt asked once, with their verdicts, in the order of their sample
    index.

    `ticket` counts the prompts asked since the start of the run; a prompt asked again gets another
    ticket.
    """

    ticket: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        assert len(self.completions) == len(self.verdicts)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(verdict.reward for verdict in self.verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    """One document as the learner receives it: a completion after its prompt, or any other labelled
    document.

    Three losses learn from its labelled tokens: `rl`, the policy loss; `ce`, the cross-entropy;
    `kl`, the penalty for the distance to a frozen model. `weights` has a loss's weights of all
    labelled tokens where they differ from those of a completion: 1 for `rl` and `kl`, 0 for `ce`.

    Example: a completion of 2 tokens with advantage 0.7 after a prompt of 4 tokens::

        RolloutSample(
            document=Document(token_ids=(1, 40, 11, 2, 61, 2), responses=(Span(start=4, stop=6),)),
            engine_logprobs=(-0.1, -0.02),
            advantage=0.7,
        )

    Example: of the same tokens, where the first was written by a tool, and is learned as it
    stands::

        weights={"rl": (0.0, 1.0), "ce": (1.0, 0.0), "kl": (0.0, 1.0)}
    """

    document: Document
    engine_logprobs: tuple[float, ...]
    advantage: float
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    routes: bytes = b""  # of the completion

    def stream_weights(self, stream: str) -> tuple[float, ...]:
        """The weight of each labelled token in a loss."""
        return self.weights.get(stream, (USUAL_WEIGHTS[stream],) * len(self.engine_logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class BestStep:
    """The step of a run with the best value of the metric of `--keep_best`, among those that were
    compared.

    Example: `BestStep(step=40, metric="eval/loss", value=1.25)`.
    """

    step: int
    metric: str
    value: float

    def __str__(self) -> str:
        return f"step {self.step}, the best by {self.metric} ({self.value:.6g})"

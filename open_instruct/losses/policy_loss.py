"""What a policy loss is: the inputs and outputs of its function, and how its losses are averaged.

Legend: N labelled tokens of a microbatch, S sequences (completions). All log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from open_instruct.losses.logprobs import clamped_exp, count_sequence_tokens, sequence_means
from open_instruct.losses.registry import bind_flags

if TYPE_CHECKING:
    import torch

# Flags that losses without a clip ignore, as recipes give them whatever the loss.
CLIP_FLAGS = ("clip_lower", "clip_higher")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """The inputs of any policy loss.

    Only `logprobs_N` carries a gradient. `sequence_ids_N` (int64, 0..S-1) gives the completion of
    each token. With `by_completion` the ratio of each token is that of its completion, the
    geometric mean over its tokens. `marked_N` is 1 at the tokens that a loss with
    `PolicyLoss.marks` treats apart, and 0 at the others.
    """

    logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    num_sequences: int
    by_completion: bool = False
    marked_N: torch.Tensor | None = None

    @property
    def log_ratio_N(self) -> torch.Tensor:
        log_ratio_N = self.logprobs_N - self.old_logprobs_N
        if not self.by_completion:
            return log_ratio_N
        return sequence_means(log_ratio_N, self.sequence_ids_N, self.num_sequences)[
            self.sequence_ids_N
        ]

    def __post_init__(self) -> None:
        shape = self.logprobs_N.shape
        for tensor in (self.old_logprobs_N, self.advantages_N, self.sequence_ids_N, self.marked_N):
            if tensor is not None:
                assert len(shape) == 1 and tensor.shape == shape, (
                    f"{tuple(tensor.shape)}, not {tuple(shape)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOutputs:
    """`losses_N` carries the gradient; `is_clipped_N` (0 or 1) marks tokens whose gradient was
    clipped away.

    A token with an advantage of 0 has no gradient to clip, so `PolicyLoss.outputs` never marks it.
    """

    losses_N: torch.Tensor
    is_clipped_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss of --loss_fn: a function, and how its losses are averaged.

    Example: `POLICY_LOSSES["grpo"]` has `divided_by` "completions", `averaged` True and `reads`
    `("delta",)`.
    """

    function: Callable[..., PolicyLossOutputs]
    """`function(inputs, **flags)` gives the loss of every token."""
    flags: tuple[str, ...] = ()
    """The flags that the function is given, by their names."""
    formula: str = ""
    """The loss of a token, in the words of docs/losses.md."""
    paper: str = ""
    """The number on arXiv, and the place in the paper."""
    divided_by: Literal["tokens", "completions", "response_length"] = "tokens"
    """The denominator of the sum over all tokens: the tokens, or (--loss_denominator) a constant
    length for each completion; the completions; or --response_length for each completion.
    """
    averaged: bool = False
    """Whether each completion is averaged over its tokens first."""
    by_completion: bool = False
    """Whether a completion has one ratio, the geometric mean of its tokens'."""
    marks: Callable[..., torch.Tensor] | None = None
    """`marks(here, update, **flags)` says which tokens of a microbatch are treated apart
    (`PolicyLossInputs.marked_N`); both are `TokenColumns`, and `update` has those of all ranks.
    """
    marks_flags: tuple[str, ...] = ()
    """The flags that `marks` is given."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The flags that it reads, but those of the clip range."""
        flags = dict.fromkeys((*self.flags, *self.marks_flags))
        return tuple(flag for flag in flags if flag not in CLIP_FLAGS)

    def outputs(self, inputs: PolicyLossInputs, section: object) -> PolicyLossOutputs:
        """The loss of every token, to be summed and divided by the `denominator`.

        `section` has the flags.
        """
        function = bind_flags(self.function, self.flags, section)
        outputs = function(replace(inputs, by_completion=self.by_completion))
        return PolicyLossOutputs(
            losses_N=self.shares(outputs.losses_N, inputs),
            is_clipped_N=outputs.is_clipped_N * (inputs.advantages_N != 0),
        )

    def shares(self, values_N: torch.Tensor, inputs: PolicyLossInputs) -> torch.Tensor:
        """`values_N` as the loss weighs tokens: unchanged, or divided by the length of their
        completion.

        In the second case their sum is the sum of the means over completions.
        """
        if not self.averaged:
            return values_N
        lengths_S = count_sequence_tokens(inputs.sequence_ids_N, inputs.num_sequences)
        return values_N / lengths_S[inputs.sequence_ids_N].to(values_N.dtype)

    def importance_ratio(self, inputs: PolicyLossInputs) -> torch.Tensor:
        """The ratio by which the loss weighs each token: the token's own, or that of its
        completion.
        """
        return clamped_exp(replace(inputs, by_completion=self.by_completion).log_ratio_N)

    def denominator(
        self,
        *,
        num_tokens: int,
        num_completions: int,
        response_length: int,
        constant: int | None = None,
    ) -> float:
        """The denominator of the sum of losses over the whole global batch.

        Args:
            num_tokens: label tokens of the global batch.
            num_completions: completions of the global batch.
            response_length: tokens that a completion may have at most.
            constant: tokens per completion to divide by in place of `num_tokens`.
        """
        if self.divided_by == "completions":
            return float(num_completions)
        if self.divided_by == "response_length":
            return float(num_completions * response_length)
        return float(num_tokens if constant is None else num_completions * constant)

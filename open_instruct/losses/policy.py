"""Policy losses: log-probs and advantages in, one loss per token out.

No loss here divides by a number of tokens or completions of its own batch. The caller adds up `losses_N` over
microbatches and ranks and divides by the `global_denominator`, so the result does not depend on the split.

With r = policy / policy at the start of the step, A the advantage of the completion, e and E the clip ranges:

    dapo     -min(r A, clip(r, 1 - e, 1 + E) A)                    DAPO, arXiv 2503.14476, eq. 8; token mean
    cispo    -stop(clip(r, 1 - e, 1 + E)) A log policy             MiniMax-M1, arXiv 2506.13585, eq. 4; token mean
    grpo     dapo's, averaged over each completion first           DeepSeekMath, arXiv 2402.03300, eq. 3
    dr_grpo  dapo's, over a constant length                        Dr. GRPO, arXiv 2503.20783, section 3.2
    gspo     dapo's, with s = exp(mean of log r over the completion) in place of every r of it, averaged
             over each completion                                  GSPO, arXiv 2507.18071, eq. 5 to 7

Ratios are those of log-ratios clamped to +-20. Beyond, a loss is flat, so that its value and gradient stay finite
however far the policies are apart.

Legend: N labelled tokens of a microbatch, S sequences (completions). All log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from open_instruct.config.losses import POLICY_LOSSES
from open_instruct.losses.logprobs import clamped_exp
from open_instruct.losses.mismatch import sequence_means


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """What any policy loss is computed from.

    Only `logprobs_N` carries a gradient. `sequence_ids_N` (int64, 0..S-1) says whose a token is.
    """

    logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    num_sequences: int

    def __post_init__(self) -> None:
        shape = self.logprobs_N.shape
        for tensor in (self.old_logprobs_N, self.advantages_N, self.sequence_ids_N):
            assert len(shape) == 1 and tensor.shape == shape, f"{tuple(tensor.shape)}, not {tuple(shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOutputs:
    """`losses_N` carries the gradient; `is_clipped_N` (0 or 1) marks tokens that the clip range took it from."""

    losses_N: torch.Tensor
    is_clipped_N: torch.Tensor


def _clipped(inputs: PolicyLossInputs, log_ratio_N: torch.Tensor, lower: float, higher: float) -> PolicyLossOutputs:
    ratio_N = clamped_exp(log_ratio_N)
    clipped_N = ratio_N.clamp(1 - lower, 1 + higher)
    unclipped_loss_N, clipped_loss_N = -ratio_N * inputs.advantages_N, -clipped_N * inputs.advantages_N
    return PolicyLossOutputs(
        losses_N=torch.maximum(unclipped_loss_N, clipped_loss_N),
        is_clipped_N=(clipped_loss_N > unclipped_loss_N).float(),
    )


def _dapo(inputs: PolicyLossInputs, lower: float, higher: float) -> PolicyLossOutputs:
    return _clipped(inputs, inputs.logprobs_N - inputs.old_logprobs_N, lower, higher)


def _cispo(inputs: PolicyLossInputs, lower: float, higher: float) -> PolicyLossOutputs:
    ratio_N = clamped_exp((inputs.logprobs_N - inputs.old_logprobs_N).detach())
    clipped_N = ratio_N.clamp(1 - lower, 1 + higher)
    return PolicyLossOutputs(
        losses_N=-clipped_N * inputs.advantages_N * inputs.logprobs_N,
        is_clipped_N=(clipped_N != ratio_N).float(),
    )


def _grpo(inputs: PolicyLossInputs, lower: float, higher: float) -> PolicyLossOutputs:
    return _averaged_by_completion(inputs, _dapo(inputs, lower, higher))


def _gspo(inputs: PolicyLossInputs, lower: float, higher: float) -> PolicyLossOutputs:
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    mean_S = sequence_means(log_ratio_N, inputs.sequence_ids_N, inputs.num_sequences)
    return _averaged_by_completion(inputs, _clipped(inputs, mean_S[inputs.sequence_ids_N], lower, higher))


def _averaged_by_completion(inputs: PolicyLossInputs, outputs: PolicyLossOutputs) -> PolicyLossOutputs:
    """Each token's share of its completion's mean, so that the sum over tokens is the sum over completions."""
    lengths_S = torch.bincount(inputs.sequence_ids_N, minlength=inputs.num_sequences)
    lengths_N = lengths_S[inputs.sequence_ids_N].to(outputs.losses_N.dtype)
    return PolicyLossOutputs(losses_N=outputs.losses_N / lengths_N, is_clipped_N=outputs.is_clipped_N)


# Of `POLICY_LOSSES`.
POLICY_FUNCTIONS: dict[str, Callable[[PolicyLossInputs, float, float], PolicyLossOutputs]] = {
    "dapo": _dapo,
    "cispo": _cispo,
    "grpo": _grpo,
    "dr_grpo": _dapo,
    "gspo": _gspo,
}


def policy_loss(kind: str, inputs: PolicyLossInputs, *, clip_lower: float, clip_higher: float) -> PolicyLossOutputs:
    """The loss of every token under `kind`, to be summed and divided by the `global_denominator`."""
    return POLICY_FUNCTIONS[kind](inputs, clip_lower, clip_higher)


def kl_share(kind: str, kl_N: torch.Tensor, inputs: PolicyLossInputs) -> torch.Tensor:
    """The KL penalty of every token, weighted within its completion as the loss is."""
    outputs = PolicyLossOutputs(losses_N=kl_N, is_clipped_N=torch.zeros_like(kl_N))
    if POLICY_LOSSES[kind].denominator == "completions":
        return _averaged_by_completion(inputs, outputs).losses_N
    return kl_N


def global_denominator(
    kind: str, *, num_tokens: int, num_completions: int, response_length: int, constant: int | None = None
) -> float:
    """What the sum of the losses over the whole global batch is divided by.

    Args:
        kind: the loss.
        num_tokens: label tokens of the global batch.
        num_completions: completions of the global batch.
        response_length: tokens that a completion may have at most.
        constant: dapo and cispo: tokens per completion to divide by in place of `num_tokens`.
    """
    denominator = POLICY_LOSSES[kind].denominator
    if denominator == "completions":
        return float(num_completions)
    if denominator == "response_length":
        return float(num_completions * response_length)
    return float(num_tokens if constant is None else num_completions * constant)

"""How far the policy is at sampled tokens from the engine that sampled them, and from a frozen
model.

A correction answers an engine that disagrees with the learner: rho = learner / engine, token by
token. The learner's log-probs are those at the start of the step, so rho holds both the rounding of
two implementations and the staleness of the weights that sampled. It carries no gradient; log rho
is clamped to +-20.

Tokens that are left out still count in the loss's denominator. So the denominator is known before
the forward pass and does not depend on how the batch is cut, and a batch with few trusted tokens
makes a short step.

Legend: N labelled tokens of a microbatch, S sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from open_instruct.losses.logprobs import MAX_LOG_RATIO, clamped_exp, sequence_means

if TYPE_CHECKING:
    import torch

HISTOGRAM_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """`weights_N` multiplies the loss of every token; 0 leaves it out. `rho_N` is the ratio itself.

    `is_corrected_N` marks the tokens that were clamped or left out.
    """

    weights_N: torch.Tensor
    rho_N: torch.Tensor
    is_corrected_N: torch.Tensor


# The flags that `correct_mismatch` is given.
MISMATCH_FLAGS = (
    "rho_correction",
    "rho_cap",
    "rho_level",
    "rho_clamp_lower",
    "rho_clamp_upper",
    "rho_mask_lower",
    "rho_mask_upper",
)


def correct_mismatch(
    log_rho_N: torch.Tensor,
    sequence_ids_N: torch.Tensor,
    num_sequences: int,
    *,
    rho_correction: str,
    rho_cap: float,
    rho_level: str,
    rho_clamp_lower: float,
    rho_clamp_upper: float | None,
    rho_mask_lower: float,
    rho_mask_upper: float | None,
) -> Correction:
    """The weight of every token, from the log-prob of the learner minus that of the engine, by
    --rho_correction.

    - "none": 1.
    - "clamp": min(rho, cap): truncated importance sampling (Espeholt et al., IMPALA, arXiv
      1802.01561, section 4.1).
    - "token_mask": 1 where 1/cap <= rho <= cap, else 0.
    - "sequence_mask": the same for the geometric mean of rho over a sequence: all of its tokens, or
      none.
    - "bounds": rho (or, by --rho_level, its geometric mean), 0 outside the bounds of the mask, else
      clamped to those of the clamp.

    Example: cap 2 and ratios (3, 1, 0.1) of one sequence: "clamp" (2, 1, 0.1), "token_mask" (0, 1,
    0), and "sequence_mask" (1, 1, 1), whose geometric mean is 0.67.
    """
    log_rho_N = log_rho_N.detach()
    rho_N = judged_N = clamped_exp(log_rho_N)
    if rho_correction == "sequence_mask" or (
        rho_correction == "bounds" and rho_level == "sequence"
    ):
        judged_N = clamped_exp(sequence_means(log_rho_N, sequence_ids_N, num_sequences))[
            sequence_ids_N
        ]
    if rho_correction == "none":
        weights_N = rho_N.new_ones(rho_N.shape)
        is_corrected_N = weights_N == 0
    elif rho_correction == "clamp":
        weights_N = rho_N.clamp(max=rho_cap)
        is_corrected_N = weights_N < rho_N
    elif rho_correction == "bounds":
        is_kept_N = (judged_N >= rho_mask_lower) & (judged_N <= (rho_mask_upper or math.inf))
        weights_N = judged_N.clamp(rho_clamp_lower, rho_clamp_upper) * is_kept_N
        is_corrected_N = weights_N != judged_N
    else:
        weights_N = ((judged_N >= 1 / rho_cap) & (judged_N <= rho_cap)).to(rho_N.dtype)
        is_corrected_N = weights_N == 0
    return Correction(weights_N=weights_N, rho_N=rho_N, is_corrected_N=is_corrected_N)


def rho_values(correction: Correction) -> dict[str, torch.Tensor]:
    """Values of each token for the metrics of rho, by the name of the metric; the metric is their
    mean.

    `rho/hist_LOW_to_HIGH` is 1 where LOW < rho <= HIGH: its mean is the share of the tokens in that
    bucket.
    """
    rho_N = correction.rho_N
    values = {
        "rho/mean": rho_N,
        "rho/corrected_fraction": correction.is_corrected_N.to(rho_N.dtype),
    }
    for low, high in pairwise((0.0, *HISTOGRAM_EDGES, math.inf)):
        values[f"rho/hist_{low:g}_to_{high:g}"] = ((rho_N > low) & (rho_N <= high)).to(rho_N.dtype)
    return values


def kl_estimates(
    estimator: str, logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor
) -> torch.Tensor:
    """The estimate of KL(policy || reference) from each sampled token alone, in nats, shape (N,).

    It is differentiable in `logprobs_N`.

    With d = log policy - log reference (J. Schulman, "Approximating KL divergence", 2020, calls the
    first three k1, k2 and k3):

        0  d                      unbiased, noisy; its expected gradient is zero: it never pulls
        1  d^2 / 2                biased, low noise; its expected gradient is that of the KL
        2  exp(-d) - 1 + d        unbiased, never negative; that of KL(reference || policy)
        3  exp(l - stop(l)) * d   the value of 0; the factor 1 adds the score's d * grad l, so
                                  the expected gradient is that of the KL

    Estimate 2 clamps d at -20, below which it is flat: float32 overflows at -89, where the gradient
    is not a number. At a token that the reference rules out (-inf), d is set to 0, without a
    gradient.

    Example: policy log-prob -1 and reference -2, so d = 1: 1.0, 0.5, 0.3679 and 1.0.
    """
    difference_N = logprobs_N - logprobs_N.where(
        reference_logprobs_N.isneginf(), reference_logprobs_N
    )
    if estimator == "0":
        return difference_N
    if estimator == "1":
        return difference_N.square() / 2
    if estimator == "2":
        difference_N = difference_N.clamp(min=-MAX_LOG_RATIO)
        return (-difference_N).expm1() + difference_N
    assert estimator == "3", estimator
    return (logprobs_N - logprobs_N.detach()).exp() * difference_N

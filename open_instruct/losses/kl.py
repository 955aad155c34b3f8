"""Estimators of the divergence KL(policy || reference) from one sampled token each.

With d = log policy - log reference at a token that the policy sampled (J. Schulman, "Approximating KL divergence",
2020, calls the first three k1, k2 and k3):

    0  d                      unbiased, noisy; as a loss its expected gradient is zero, so it only shows, never pulls
    1  d^2 / 2                biased, low noise; as a loss its expected gradient is that of the KL
    2  exp(-d) - 1 + d        unbiased, never negative; as a loss its gradient is that of KL(reference || policy)
    3  exp(l - stop(l)) * d   the value of 0; the factor is 1 and adds the score function's gradient d * grad l, so the
                              expected gradient is that of the KL

Estimate 2 clamps d at -20, below which it is flat: float32 overflows at -89, where the gradient is not a number.
At a token that the reference rules out (-inf), d is set to 0, without a gradient.

Legend: N labelled tokens of a microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from open_instruct.losses.logprobs import MAX_LOG_RATIO

if TYPE_CHECKING:
    import torch


def kl_estimates(estimator: str, logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """The estimate at every token, in nats, shape (N,); differentiable in `logprobs_N`.

    Example: policy log-prob -1 and reference -2, so d = 1: 1.0, 0.5, 0.3679 and 1.0.
    """
    difference_N = logprobs_N - logprobs_N.where(reference_logprobs_N.isneginf(), reference_logprobs_N)
    if estimator == "0":
        return difference_N
    if estimator == "1":
        return difference_N.square() / 2
    if estimator == "2":
        difference_N = difference_N.clamp(min=-MAX_LOG_RATIO)
        return (-difference_N).expm1() + difference_N
    assert estimator == "3", estimator
    return (logprobs_N - logprobs_N.detach()).exp() * difference_N

"""The choice of tokens among all tokens of an update: those of the highest entropy, and those of the highest covariance
of log-prob and advantage, which lower the policy's entropy most ("The Entropy Mechanism of Reinforcement Learning",
arXiv 2505.22617).

The covariance of a token is (log p - mean log p) (A - mean A), with the means over the update, eq. 9.

Legend: N tokens of a microbatch or of the whole update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class TokenColumns(NamedTuple):
    """Columns of values of tokens before the update, each float64 (N,)."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    advantages: torch.Tensor
    engine_logprobs: torch.Tensor


def is_highest(values_N: torch.Tensor, everywhere: torch.Tensor, *, share: float) -> torch.Tensor:
    """Whether each value is among the highest `share` of all values of the update: at least one, with all ties."""
    if not everywhere.numel():
        return values_N.bool()
    count = max(1, round(share * everywhere.numel()))
    return values_N >= everywhere.topk(count).values[-1]


def is_covariant(here: TokenColumns, everywhere: TokenColumns, *, cov_fraction: float) -> torch.Tensor:
    """Whether each token is among the share `cov_fraction` of all tokens with the highest covariance: kl_cov."""
    return is_highest(_covariance(here, everywhere), _covariance(everywhere, everywhere), share=cov_fraction)


def is_drawn_by_covariance(
    here: TokenColumns, everywhere: TokenColumns, *, cov_fraction: float, clip_cov_lower: float, clip_cov_upper: float
) -> torch.Tensor:
    """Whether each token is drawn among those with a covariance between the two bounds: clip_cov.

    The share `cov_fraction` of all tokens is drawn. The draw is a function of the token's log-prob at the engine, so it
    does not depend on how tokens are spread over ranks.
    """

    def draws(columns: TokenColumns) -> torch.Tensor:
        """Pseudo-random numbers from 0 to 1; -1 for tokens outside the bounds, which may leave fewer candidates."""
        covariance_N = _covariance(columns, everywhere)
        is_between_N = (covariance_N > clip_cov_lower) & (covariance_N < clip_cov_upper)
        draws_N = ((columns.engine_logprobs * 12.9898).sin() * 43758.5453).frac().abs()
        return draws_N.masked_fill(~is_between_N, -1.0)

    draws_N = draws(here)
    return (draws_N >= 0) & is_highest(draws_N, draws(everywhere), share=cov_fraction)


def _covariance(columns: TokenColumns, everywhere: TokenColumns) -> torch.Tensor:
    return (columns.logprobs - everywhere.logprobs.mean()) * (columns.advantages - everywhere.advantages.mean())

"""The choice of tokens among all tokens of an update: those of the highest entropy, and those of the highest covariance
of log-prob and advantage, which lower the policy's entropy most ("The Entropy Mechanism of Reinforcement Learning",
arXiv 2505.22617).

The covariance of a token is (log p - mean log p) (A - mean A), with the means over the update, eq. 9.

Legend: N tokens of a microbatch or of the whole update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from open_instruct.config.rollout_sections import PolicyLossSection


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


def is_marked(here: TokenColumns, everywhere: TokenColumns, loss: PolicyLossSection) -> torch.Tensor:
    """Which tokens --loss_fn kl_cov or clip_cov treats apart: the share --cov_fraction of all tokens.

    kl_cov takes the tokens of the highest covariance. clip_cov draws among tokens with a covariance between
    --clip_cov_lower and --clip_cov_upper. The draw is a function of the token's log-prob at the engine, so it does not
    depend on how tokens are spread over ranks.
    """
    covariance_N, all_covariances = _covariance(here, everywhere), _covariance(everywhere, everywhere)
    if loss.loss_fn == "kl_cov":
        return is_highest(covariance_N, all_covariances, share=loss.cov_fraction)
    # Tokens outside the bounds draw -1, below all candidates: the share counts all tokens, and candidates may be fewer.
    draws = torch.where(_is_between(all_covariances, loss), _drawn(everywhere), -1.0)
    return _is_between(covariance_N, loss) & is_highest(_drawn(here), draws, share=loss.cov_fraction)


def _covariance(columns: TokenColumns, everywhere: TokenColumns) -> torch.Tensor:
    return (columns.logprobs - everywhere.logprobs.mean()) * (columns.advantages - everywhere.advantages.mean())


def _is_between(covariance_N: torch.Tensor, loss: PolicyLossSection) -> torch.Tensor:
    return (covariance_N > loss.clip_cov_lower) & (covariance_N < loss.clip_cov_upper)


def _drawn(columns: TokenColumns) -> torch.Tensor:
    """Pseudo-random numbers from 0 to 1, a function of each token's log-prob."""
    return (torch.sin(columns.engine_logprobs * 12.9898) * 43758.5453).frac().abs()

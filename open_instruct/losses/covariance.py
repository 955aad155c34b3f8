"""Tokens of an update chosen by their covariance, for Clip-Cov and KL-Cov (arXiv 2505.22617).

A token's covariance is (log p - mean log p) (A - mean A), with the means over all tokens of the
update (eq. 9). Tokens in which both are far above, or both far below, their means take entropy from
the policy.

Legend: N tokens of a microbatch, U those of the whole update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from open_instruct.losses.logprobs import find_places

if TYPE_CHECKING:
    import torch


class TokenColumns(NamedTuple):
    """What a choice reads of tokens, a column (N,) each: float64, but `keys` int64
    (`token_keys`).
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    keys: torch.Tensor


def token_keys(
    engine_logprobs_N: torch.Tensor, sequence_ids_N: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """A number for each token, int64 (N,), made of its completion's engine log-probs and its place
    in it.

    Integers are added, so it is the same in any microbatch and on any rank. Equal keys have the
    same tokens of equal completions.
    """
    import torch

    ids_N = sequence_ids_N.long()
    bits_N = engine_logprobs_N.float().contiguous().view(torch.int32).long()
    places_N = find_places(ids_N, num_sequences)
    sums_S = ids_N.new_zeros(num_sequences).index_add(0, ids_N, bits_N * (2 * places_N + 1))
    return sums_S[ids_N] * 1_000_003 + places_N


def has_high_covariance(
    here: TokenColumns, update: TokenColumns, *, cov_fraction: float
) -> torch.Tensor:
    """Whether each token (N,) is among the share `cov_fraction` of the update with the largest
    covariance (eq. 12).
    """
    by_key_U = update.keys.argsort(stable=True)
    order_U = by_key_U[_covariances(update, update)[by_key_U].argsort(stable=True, descending=True)]
    return _are_among(here, update, order_U, cov_fraction)


def is_drawn_by_covariance(
    here: TokenColumns,
    update: TokenColumns,
    *,
    cov_fraction: float,
    clip_cov_lower: float,
    clip_cov_upper: float,
    clip_lower: float,
    clip_higher: float,
) -> torch.Tensor:
    """Whether each token (N,) is drawn among those whose covariance is between the two bounds (eq.
    10).

    As many are drawn as the share `cov_fraction` of the update has tokens, at most. Those whose
    gradient the ratio's clip has taken anyway are left aside, as in the authors' program. The draw
    is seeded by the update itself: it is the same however the update is cut, and another one in
    each.
    """
    import torch

    covariances_U = _covariances(update, update)
    is_candidate_U = (covariances_U > clip_cov_lower) & (covariances_U < clip_cov_upper)
    is_candidate_U &= ~_is_clipped(update, clip_lower, clip_higher)
    candidates_C = is_candidate_U.nonzero().squeeze(1)
    candidates_C = candidates_C[update.keys[candidates_C].argsort(stable=True)]
    generator = torch.Generator().manual_seed(int(update.keys.sum()) % 2**63)
    shuffled_C = torch.randperm(len(candidates_C), generator=generator).to(candidates_C.device)
    return _are_among(here, update, candidates_C[shuffled_C], cov_fraction)


def _are_among(
    here: TokenColumns,
    update: TokenColumns,
    order: torch.Tensor,
    share: float,
) -> torch.Tensor:
    """Whether each token is one of the first in `order`, which are as many as the share of the
    update, at least one.
    """
    import torch

    count = max(1, int(share * len(update.keys)))
    return torch.isin(here.keys, update.keys[order[:count]])


def _covariances(columns: TokenColumns, update: TokenColumns) -> torch.Tensor:
    return (columns.logprobs - update.logprobs.mean()) * (
        columns.advantages - update.advantages.mean()
    )


def _is_clipped(columns: TokenColumns, clip_lower: float, clip_higher: float) -> torch.Tensor:
    log_ratios = columns.logprobs - columns.old_logprobs
    is_too_high = (columns.advantages > 0) & (log_ratios.exp() > 1 + clip_higher)
    return is_too_high | ((columns.advantages < 0) & (log_ratios.exp() < 1 - clip_lower))

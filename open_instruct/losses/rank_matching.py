"""Pairs matched by rank over a global batch, for AOT (arXiv 2406.05882 section 3).

Optimal transport between two sets of numbers, under any convex cost of their differences, matches
the smallest with the smallest and so on. AOT therefore compares sorted values. A microbatch has a
part of the pairs only, so the values of the same rank come from pairs that may be anywhere.

Legend: P pairs of a microbatch or of the global batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class RankPartners(NamedTuple):
    """For each pair, the numbers (P,) that AOT compares it with; they carry no gradient.

    `margin_shift` is the pair's reference margin less the reference margin that has the rank of its
    policy margin. Added to the difference of the log-ratios it gives policy margin less matched
    reference margin, without subtracting two large sums. `rejected` is the rejected log-ratio with
    the rank of the pair's chosen one, and `chosen` the chosen log-ratio with the rank of its
    rejected one.
    """

    margin_shift: torch.Tensor
    rejected: torch.Tensor
    chosen: torch.Tensor


def match_by_rank(log_ratios_2P: torch.Tensor, reference_margins_P: torch.Tensor) -> RankPartners:
    """The partners of all pairs of a global batch; of equal values the first has the lower rank.

    Args:
        log_ratios_2P: policy minus reference log-probs, of the chosen and of the rejected replies.
        reference_margins_P: chosen minus rejected log-prob under the reference.

    Example: chosen log-ratios `[1., 3.]` and rejected ones `[5., 4.]`, each the log-ratio of one of
    two pairs: the first pair's chosen reply is the lowest, so its partner is the lowest rejected
    one, 4.
    """
    chosen_P, rejected_P = log_ratios_2P
    policy_margins_P = chosen_P - rejected_P + reference_margins_P
    return RankPartners(
        margin_shift=reference_margins_P - _take_same_rank(policy_margins_P, reference_margins_P),
        rejected=_take_same_rank(chosen_P, rejected_P),
        chosen=_take_same_rank(rejected_P, chosen_P),
    )


def _take_same_rank(values_P: torch.Tensor, others_P: torch.Tensor) -> torch.Tensor:
    """For each of the values, that one of the others which has the same rank among them."""
    import torch

    partners_P = torch.empty_like(others_P)
    partners_P[values_P.argsort(stable=True)] = others_P.sort(stable=True).values
    return partners_P

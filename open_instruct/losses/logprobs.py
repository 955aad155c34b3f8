"""Reduce the log-probabilities of labels to one number per document.

Importing this file loads no torch.

Legend: N labelled tokens of a microbatch, S its documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The share of a reply's log-prob by which two float32 sums of the same numbers in another order may
# differ.
ROUNDING = 1e-6
# The bound of exponents: e^20 is 5e8. Float32 overflows from 89 on, and then finite losses have NaN
# gradients.
MAX_LOG_RATIO = 20.0


def clamped_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio that is clamped to +-`MAX_LOG_RATIO` first; beyond, its gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_by_sequence(
    logprobs_N: torch.Tensor, sequence_ids_N: torch.Tensor, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the label log-probs (nats) of each document, and count them.

    A document without labels has sum 0 and count 0; `num_sequences` may be 0.

    Returns `(sums_S, counts_S)`: sums in float32 (float64 stays float64), differentiable; counts
    int64. The sum runs in float64, so that where a document lies in a batch, and on a GPU the order
    of the atomic adds, practically never shows in the float32 result. On a CPU it is deterministic.

    Example: log-probs `[-1., -2., -4.]` with ids `[0, 2, 0]` and three sequences give sums `[-5.,
    0., -2.]` and counts `[2, 0, 1]`.
    """
    import torch

    assert logprobs_N.shape == sequence_ids_N.shape, (logprobs_N.shape, sequence_ids_N.shape)
    sums_S = sequence_sums(logprobs_N.double(), sequence_ids_N.long(), num_sequences)
    result_dtype = torch.promote_types(logprobs_N.dtype, torch.float32)
    return sums_S.to(result_dtype), count_sequence_tokens(sequence_ids_N, num_sequences)


def count_sequence_tokens(sequence_ids_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """How many tokens each sequence has: int64 (S,).

    `bincount` would wait for the device to know the largest id.
    """
    ids_N = sequence_ids_N.long()
    return ids_N.new_zeros(num_sequences).index_add(0, ids_N, ids_N.new_ones(ids_N.shape))


def find_places(sequence_ids_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """How many tokens of its own sequence stand before each token: int64 (N,).

    Example: ids `[0, 1, 0, 0]` give `[0, 0, 1, 2]`.
    """
    import torch

    ids_N = sequence_ids_N.long()
    lengths_S = count_sequence_tokens(ids_N, num_sequences)
    starts_S = lengths_S.cumsum(0) - lengths_S
    order_N = ids_N.argsort(stable=True)
    places_N = torch.empty_like(ids_N)
    places_N[order_N] = torch.arange(len(ids_N), device=ids_N.device) - starts_S[ids_N[order_N]]
    return places_N


def sequence_sums(
    values_N: torch.Tensor, sequence_ids_N: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Sum over the tokens of each sequence, shape (S,); differentiable; 0 for a sequence without
    tokens.
    """
    return values_N.new_zeros(num_sequences).index_add(0, sequence_ids_N, values_N)


def sequence_means(
    values_N: torch.Tensor, sequence_ids_N: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Mean over the tokens of each sequence, shape (S,); differentiable; 0 for a sequence without
    tokens.
    """
    counts_S = count_sequence_tokens(sequence_ids_N, num_sequences).to(values_N.dtype)
    return sequence_sums(values_N, sequence_ids_N, num_sequences) / counts_S.clamp(min=1)


def sum_by_reply(
    logprobs_N: torch.Tensor,
    sequence_ids_N: torch.Tensor,
    num_sequences: int,
    ld_alpha: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum_by_sequence` for pairs, where tokens beyond the length of the shorter reply are weighted
    by `ld_alpha`.

    LD-DPO, arXiv 2409.06411 eq. 9 and 10: log p of the first min(|y_w|, |y_l|) tokens, plus
    `ld_alpha` times that of the rest. Sequences are all chosen replies, then all rejected ones;
    None counts every token.

    Example: log-probs `[-1., -2., -4.]` with ids `[0, 1, 1]`, one pair: with `ld_alpha` 0.5 the
    sums are `[-1., -4.]`.
    """
    import torch

    if ld_alpha is None:
        return sum_by_sequence(logprobs_N, sequence_ids_N, num_sequences)
    ids_N = sequence_ids_N.long()
    lengths_S = count_sequence_tokens(ids_N, num_sequences)
    places_N = find_places(ids_N, num_sequences)
    shared_S = lengths_S.view(2, -1).amin(0).repeat(2)
    weights_N = torch.where(places_N < shared_S[ids_N], 1.0, ld_alpha)
    return sum_by_sequence(logprobs_N * weights_N, sequence_ids_N, num_sequences)


def per_token(sums_S: torch.Tensor, counts_S: torch.Tensor) -> torch.Tensor:
    """Divide sums by numbers of labels; a count of 0 (whose sum is 0) gives 0, not NaN."""
    return sums_S / counts_S.clamp(min=1).to(sums_S.dtype)

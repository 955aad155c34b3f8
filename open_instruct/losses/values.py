"""What PPO's critic says of sampled tokens: advantages, their whitening, and the loss of the critic
itself.

A value is what the critic expects of the rewards still to come before a token is sampled.
Generalized advantage estimation (arXiv 1506.02438 eq. 16), with V the values, r the rewards, and V
= 0 after the last token:

    delta(t) = r(t) + gamma V(t + 1) - V(t)        A(t) = delta(t) + gamma lambda A(t + 1)

The returns that the critic learns are A + V, taken before A is whitened.

Legend: N sampled tokens of a microbatch, those of one completion side by side and in order. What a
tool or a user said between them is not among them, so the last token of a turn is followed by the
first of the next.
"""

import torch


def gae(
    values_N: torch.Tensor,
    rewards_N: torch.Tensor,
    sequence_ids_N: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """The advantage of each token, in float32 (float64 stays float64).

    Sums of 2, 4, 8, ... terms are made of sums of half as many, for all tokens at once: log2(N)
    passes in float64.

    Example: values `[1., 2., 5.]` and rewards `[0., 1., 3.]` of sequences `[0, 0, 1]` have, with
    gamma and lam 1, the advantages `[0., -1., -2.]`: what a completion got, less what was expected.
    """
    is_followed_N = sequence_ids_N[1:] == sequence_ids_N[:-1]
    values_64_N = values_N.double()
    advantages_N = rewards_N.double() - values_64_N
    advantages_N[:-1] += gamma * values_64_N[1:] * is_followed_N
    reach = 1
    decay = gamma * lam
    while reach < len(values_N):
        is_same_N = sequence_ids_N[reach:] == sequence_ids_N[:-reach]
        advantages_N[:-reach] += decay**reach * advantages_N[reach:] * is_same_N
        reach *= 2
    return advantages_N.to(torch.promote_types(values_N.dtype, torch.float32))


def whiten(advantages_N: torch.Tensor, everywhere_N: torch.Tensor) -> torch.Tensor:
    """The advantages less the mean, over the root of the variance plus 1e-8, of those of all tokens
    `everywhere_N`.

    The variance is divided by one less than their number; a single token has an advantage of 0.

    Example: `[1., 3.]` of a step with `[1., 3., 5.]` become `[-1., 0.]`.
    """
    everywhere_64_N = everywhere_N.double()
    mean = everywhere_64_N.mean()
    variance = (everywhere_64_N - mean).square().sum() / max(len(everywhere_N) - 1, 1)
    return ((advantages_N.double() - mean) * (variance + 1e-8).rsqrt()).to(advantages_N.dtype)


def value_losses(
    values_N: torch.Tensor,
    old_values_N: torch.Tensor,
    returns_N: torch.Tensor,
    clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's half squared error, and whether (0 or 1) the clip has taken its gradient.

    The error is the larger one of the value's own and that of the value held within `clip` of
    `old_values_N`, which the critic said at the start of the step (Schulman et al. 2017's program).
    None clips nothing.

    Example: a value of 1, once 0, whose return is 1 has with `clip` 0.2 a loss of 0.5 * 0.8 ** 2.
    """
    reach = torch.inf if clip is None else clip
    losses_N = (values_N - returns_N).square()
    held_N = torch.clamp(values_N, old_values_N - reach, old_values_N + reach)
    held_losses_N = (held_N - returns_N).square()
    return torch.maximum(losses_N, held_losses_N) / 2, (held_losses_N > losses_N).to(losses_N.dtype)

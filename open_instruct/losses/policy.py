"""Policy losses: log-probs and advantages in, one loss per token out.

To add one, write a function here under `register`, with its name, formula and paper: `python
scripts/losses_page.py` puts it into the table of docs/losses.md. The flags it reads are
keyword-only arguments of the function, and named in `flags`. Importing this file loads no torch,
because `--help` and the checks of flags read `POLICY_LOSSES`.

No loss here divides by a number of tokens or completions of its own batch. The caller adds up
`losses_N` over microbatches and ranks and divides by the `denominator`, so the result does not
depend on the split.

Formulas are in the words of docs/losses.md: r is the ratio of the policy to the policy at the start
of the step, s its geometric mean over the completion, A the advantage. Log-ratios are clamped to
+-20. Beyond, a loss is flat, so that its value and gradient stay finite however far the policies
are apart.

Legend: N labelled tokens of a microbatch, S sequences (completions). All log-probs are in nats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from open_instruct.losses.covariance import has_high_covariance, is_drawn_by_covariance
from open_instruct.losses.logprobs import (
    MAX_LOG_RATIO,
    clamped_exp,
    sequence_means,
    sequence_sums,
)
from open_instruct.losses.policy_loss import (
    CLIP_FLAGS,
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutputs,
)
from open_instruct.losses.registry import make_register

if TYPE_CHECKING:
    import torch

# VESPO's (k, lambda), for completions with an advantage >= 0 and for the others.
VESPO_GOOD = (2.0, 3.0)
VESPO_BAD = (3.0, 2.0)
LEAST_PROBABILITY = 1e-8


POLICY_LOSSES: dict[str, PolicyLoss] = {}
# Makes the decorated function the loss `--loss_fn name`; `facts` are fields of `PolicyLoss`.
register = make_register(POLICY_LOSSES, PolicyLoss)


@register(
    "luspo",
    "−min(s A, clip(s) A)",
    "2602.05261",
    divided_by="completions",
    by_completion=True,
    flags=(*CLIP_FLAGS, "delta"),
)
@register(
    "gspo",
    "−min(s A, clip(s) A) / |o|",
    "2507.18071 eq. 5 to 7",
    divided_by="completions",
    averaged=True,
    by_completion=True,
    flags=(*CLIP_FLAGS, "delta"),
)
@register(
    "dr_grpo",
    "−min(r A, clip(r) A)",
    "2503.20783 section 3.2",
    divided_by="response_length",
    flags=(*CLIP_FLAGS, "delta"),
)
@register(
    "grpo",
    "−min(r A, clip(r) A) / |o|",
    "2402.03300 eq. 3",
    divided_by="completions",
    averaged=True,
    flags=(*CLIP_FLAGS, "delta"),
)
@register("dapo", "−min(r A, clip(r) A)", "2503.14476 eq. 8", flags=(*CLIP_FLAGS, "delta"))
def clipped_ratio(
    inputs: PolicyLossInputs,
    *,
    clip_lower: float,
    clip_higher: float,
    delta: float | None,
) -> PolicyLossOutputs:
    """With `delta` the ratio of a negative advantage is at most that: the two-sided clip of
    INTELLECT-2 (arXiv 2505.07291), which above 1 + `clip_higher` is the dual clip of arXiv
    1912.09729.
    """
    ratio_N = clamped_exp(inputs.log_ratio_N)
    bounded_N = ratio_N if delta is None else ratio_N.clamp(max=delta)
    unclipped_loss_N = -bounded_N * inputs.advantages_N
    clipped_loss_N = -ratio_N.clamp(1 - clip_lower, 1 + clip_higher) * inputs.advantages_N
    is_bounded_N = (bounded_N < ratio_N) & (inputs.advantages_N < 0)
    return PolicyLossOutputs(
        losses_N=unclipped_loss_N.maximum(clipped_loss_N),
        is_clipped_N=((clipped_loss_N > unclipped_loss_N) | is_bounded_N).float(),
    )


@register(
    "cispo",
    "−stop(min(r, 1 + `--clip_higher`)) A log π",
    "2506.13585 eq. 4",
    flags=(*CLIP_FLAGS, "cispo_clamp_below"),
)
def cispo(
    inputs: PolicyLossInputs,
    *,
    clip_lower: float,
    clip_higher: float,
    cispo_clamp_below: bool,
) -> PolicyLossOutputs:
    """MiniMax-M1's equation, with the bound from above alone that its text and ScaleRL (arXiv
    2510.13786) use.
    """
    ratio_N = clamped_exp(inputs.log_ratio_N.detach())
    clipped_N = ratio_N.clamp(1 - clip_lower if cispo_clamp_below else None, 1 + clip_higher)
    return PolicyLossOutputs(
        losses_N=-clipped_N * inputs.advantages_N * inputs.logprobs_N,
        is_clipped_N=(clipped_N != ratio_N).float(),
    )


@register(
    "sapo",
    "−(4/τ) σ(τ (r − 1)) A / |o|",
    "2511.20347",
    divided_by="completions",
    averaged=True,
    flags=(
        "sapo_temperature_pos",
        "sapo_temperature_neg",
    ),
)
def sapo(
    inputs: PolicyLossInputs, *, sapo_temperature_pos: float, sapo_temperature_neg: float
) -> PolicyLossOutputs:
    import torch

    ratio_N = clamped_exp(inputs.log_ratio_N)
    steepness_N = torch.where(inputs.advantages_N > 0, sapo_temperature_pos, sapo_temperature_neg)
    gate_N = 4 / steepness_N * (steepness_N * (ratio_N - 1)).sigmoid()
    return _nothing_clipped(-gate_N * inputs.advantages_N)


@register(
    "gmpo",
    "−A · geometric mean of the clipped r / |o|",
    "2507.20673 eq. 4",
    divided_by="completions",
    averaged=True,
    by_completion=True,
    flags=CLIP_FLAGS,
)
def gmpo(inputs: PolicyLossInputs, *, clip_lower: float, clip_higher: float) -> PolicyLossOutputs:
    """GMPO clips log r and not r: from -`clip_lower` to `clip_higher`, where the paper has 0.4 for
    both.
    """
    # Each token's own, where `log_ratio_N` has the mean over its completion.
    log_ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bounded_N = log_ratio_N.clamp(-clip_lower, clip_higher)
    clipped_N = log_ratio_N.minimum(bounded_N).where(
        inputs.advantages_N > 0, log_ratio_N.maximum(bounded_N)
    )
    means_S = sequence_means(clipped_N, inputs.sequence_ids_N, inputs.num_sequences)
    return PolicyLossOutputs(
        losses_N=-inputs.advantages_N * means_S[inputs.sequence_ids_N].exp(),
        is_clipped_N=(clipped_N != log_ratio_N).float(),
    )


@register("vespo", "−stop(φ(W)) A log π", "2602.10693")
def vespo(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """W = exp(sum of log r) and phi(W) = W^k e^(lambda (1 - W))."""
    import torch

    log_ratio_N = inputs.log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sums_S = sequence_sums(log_ratio_N, inputs.sequence_ids_N, inputs.num_sequences)
    log_w_N = sums_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[inputs.sequence_ids_N]
    is_good_N = inputs.advantages_N >= 0
    power_N = torch.where(is_good_N, VESPO_GOOD[0], VESPO_BAD[0])
    rate_N = torch.where(is_good_N, VESPO_GOOD[1], VESPO_BAD[1])
    phi_N = (power_N * log_w_N + rate_N * (1 - log_w_N.exp())).exp()
    return _nothing_clipped(-phi_N * inputs.advantages_N * inputs.logprobs_N)


@register("dppo_tv", "−M r A, by the total variation", "2602.04879", flags=(*CLIP_FLAGS, "delta"))
def dppo_tv(
    inputs: PolicyLossInputs,
    *,
    clip_lower: float,
    clip_higher: float,
    delta: float | None,
) -> PolicyLossOutputs:
    moved_N = inputs.logprobs_N.detach().exp() - inputs.old_logprobs_N.exp()
    return _within_divergence(inputs, moved_N.abs(), clip_lower, clip_higher, delta)


@register(
    "dppo_kl", "−M r A, by the divergence of two coins", "2602.04879", flags=(*CLIP_FLAGS, "delta")
)
def dppo_kl(
    inputs: PolicyLossInputs,
    *,
    clip_lower: float,
    clip_higher: float,
    delta: float | None,
) -> PolicyLossOutputs:
    old_N = inputs.old_logprobs_N.exp()
    new_N = inputs.logprobs_N.detach().exp()
    others_N = (
        (1 - old_N).clamp(min=LEAST_PROBABILITY) / (1 - new_N).clamp(min=LEAST_PROBABILITY)
    ).log()
    divergence_N = -old_N * inputs.log_ratio_N.detach() + (1 - old_N) * others_N
    return _within_divergence(inputs, divergence_N, clip_lower, clip_higher, delta)


def _within_divergence(
    inputs: PolicyLossInputs,
    divergence_N: torch.Tensor,
    clip_lower: float,
    clip_higher: float,
    delta: float | None,
) -> PolicyLossOutputs:
    """-r A, but 0 where r has moved the way that A asks for and the divergence is beyond the clip
    range.

    No ratio is clipped, so with `delta` the r of any A weighs at most that, and keeps its gradient:
    -stop(min(1, delta / r)) r A.
    """
    ratio_N = clamped_exp(inputs.log_ratio_N)
    too_far_up_N = (inputs.advantages_N > 0) & (ratio_N > 1) & (divergence_N > clip_higher)
    too_far_down_N = (inputs.advantages_N <= 0) & (ratio_N < 1) & (divergence_N > clip_lower)
    is_clipped_N = (too_far_up_N | too_far_down_N).to(ratio_N.dtype)
    losses_N = -ratio_N * inputs.advantages_N * (1 - is_clipped_N)
    if delta is not None:
        losses_N = losses_N * (delta / ratio_N.detach()).clamp(max=1)
        is_clipped_N = is_clipped_N.maximum((ratio_N > delta).to(ratio_N.dtype))
    return PolicyLossOutputs(losses_N=losses_N, is_clipped_N=is_clipped_N.float())


@register(
    "clip_cov",
    "`dapo`'s, but 0 at some tokens",
    "2505.22617 eq. 10 and 11",
    marks=is_drawn_by_covariance,
    flags=(*CLIP_FLAGS, "delta"),
    marks_flags=("cov_fraction", "clip_cov_lower", "clip_cov_upper", *CLIP_FLAGS),
)
def clip_cov(
    inputs: PolicyLossInputs,
    *,
    clip_lower: float,
    clip_higher: float,
    delta: float | None,
) -> PolicyLossOutputs:
    """Clip-Cov: tokens that are drawn by their covariance have no loss, see
    `is_drawn_by_covariance`.
    """
    assert inputs.marked_N is not None, "see `choose_tokens`"
    outputs = clipped_ratio(inputs, clip_lower=clip_lower, clip_higher=clip_higher, delta=delta)
    return PolicyLossOutputs(
        losses_N=outputs.losses_N * (1 - inputs.marked_N),
        is_clipped_N=outputs.is_clipped_N.maximum(inputs.marked_N.float()),
    )


@register(
    "kl_cov",
    "−r A, and `--kl_cov_coef` |log r| at some tokens",
    "2505.22617 eq. 12 and 13",
    marks=has_high_covariance,
    flags=("kl_cov_coef",),
    marks_flags=("cov_fraction",),
)
def kl_cov(inputs: PolicyLossInputs, *, kl_cov_coef: float) -> PolicyLossOutputs:
    """KL-Cov: tokens of the highest covariance pay for every move, see `has_high_covariance`.

    Nothing is clipped.
    """
    assert inputs.marked_N is not None, "see `choose_tokens`"
    losses_N = -clamped_exp(inputs.log_ratio_N) * inputs.advantages_N
    return _nothing_clipped(losses_N + inputs.marked_N * (kl_cov_coef * inputs.log_ratio_N.abs()))


@register("gpg", "−A log π", "2504.02546")
def gpg(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    return _nothing_clipped(-inputs.advantages_N * inputs.logprobs_N)


def _nothing_clipped(losses_N: torch.Tensor) -> PolicyLossOutputs:
    return PolicyLossOutputs(
        losses_N=losses_N, is_clipped_N=losses_N.new_zeros(losses_N.shape).float()
    )


# The name that TRL has for a mean over tokens.
register("bnpo", "`dapo`'s", "2503.14476 eq. 8; the name is TRL's", flags=(*CLIP_FLAGS, "delta"))(
    clipped_ratio
)

# The losses whose denominator --loss_denominator replaces.
OVER_TOKENS = [name for name, loss in POLICY_LOSSES.items() if loss.divided_by == "tokens"]

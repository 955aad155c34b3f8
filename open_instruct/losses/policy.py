"""Policy losses: log-probs and advantages in, one loss per token out.

No loss here divides by a number of tokens or completions of its own batch. The caller adds up `losses_N` over
microbatches and ranks and divides by the `global_denominator`, so the result does not depend on the split.

With r = policy / policy at the start of the step, A the advantage of the completion, e and E the clip ranges:

    dapo      -min(r A, clip(r, 1 - e, 1 + E) A)                   DAPO, arXiv 2503.14476, eq. 8; token mean
    cispo     -stop(min(r, 1 + E)) A log policy                    MiniMax-M1, arXiv 2506.13585, eq. 4, with the bound
              from above alone that its text and ScaleRL (arXiv 2510.13786) use; token mean
    grpo      dapo's, averaged over each completion first          DeepSeekMath, arXiv 2402.03300, eq. 3
    dr_grpo   dapo's, over a constant length                       Dr. GRPO, arXiv 2503.20783, section 3.2
    gspo      dapo's, with s = exp(mean of log r over the completion) in place of every r of it, averaged
              over each completion                                 GSPO, arXiv 2507.18071, eq. 5 to 7
    bnpo      dapo's; TRL takes the mean over the tokens of one microbatch, here it is over those of the update
    sapo      -4/t sigmoid(t (r - 1)) A, t by the sign of A        SAPO, arXiv 2511.20347; averaged over each completion
    gmpo      -A exp(mean of log of the clipped r)                 GMPO, arXiv 2507.20673, eq. 4; mean over completions
    luspo     gspo's, each completion times its length             LUSPO, arXiv 2602.05261
    vespo     -stop(phi(w)) A log policy, w = exp(sum of log r), phi(w) = w^k e^(l (1 - w)), (k, l) = (2, 3) where
              A >= 0 else (3, 2)                                   VESPO, arXiv 2602.10693; token mean
    dppo_tv   -r A, but 0 where r has moved the way that A asks for and |p - p_old| > e (A <= 0) or E (A > 0)
    dppo_kl   the same with the divergence of two coins, p_old and p   DPPO, arXiv 2602.04879; token mean
    clip_cov  dapo's, but 0 at marked tokens                       arXiv 2505.22617, eq. 10 and 11; token mean
    kl_cov    -r A, plus c |log r| at marked tokens                arXiv 2505.22617, eq. 12 and 13; token mean
    gpg       -A log policy                                        GPG, arXiv 2504.02546; token mean

With --delta D the r of a negative A is at most D: the two-sided clip of INTELLECT-2 (arXiv 2505.07291), which for
D > 1 + E is the dual clip of arXiv 1912.09729. In dppo_tv and dppo_kl, which clip no ratio, the r of any A weighs at
most D, and keeps its gradient: -stop(min(1, D / r)) r A.

Log-ratios are clamped to +-20. Beyond, a loss is flat, so that its value and gradient stay finite however far the
policies are apart.

Legend: N labelled tokens of a microbatch, S sequences (completions). All log-probs are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from open_instruct.config.losses import policy_loss_facts
from open_instruct.config.rollout_sections import PolicyLossSection
from open_instruct.losses.logprobs import MAX_LOG_RATIO, clamped_exp, lengths_of
from open_instruct.losses.mismatch import sequence_means, sequence_sums

# VESPO's (k, lambda), for completions with an advantage >= 0 and for the others.
VESPO_GOOD, VESPO_BAD = (2.0, 3.0), (3.0, 2.0)
LEAST_PROBABILITY = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """The inputs of any policy loss.

    Only `logprobs_N` carries a gradient. `sequence_ids_N` (int64, 0..S-1) gives the completion of each token.
    `marked_N` is 1 at the tokens that a loss with `marks` treats apart, else 0.
    """

    logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    num_sequences: int
    marked_N: torch.Tensor | None = None

    @property
    def log_ratio_N(self) -> torch.Tensor:
        return self.logprobs_N - self.old_logprobs_N

    def mean_by_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """For each token, the mean over its completion."""
        return sequence_means(values_N, self.sequence_ids_N, self.num_sequences)[self.sequence_ids_N]

    def __post_init__(self) -> None:
        shape = self.logprobs_N.shape
        for tensor in (self.old_logprobs_N, self.advantages_N, self.sequence_ids_N):
            assert len(shape) == 1 and tensor.shape == shape, f"{tuple(tensor.shape)}, not {tuple(shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOutputs:
    """`losses_N` carries the gradient; `is_clipped_N` (0 or 1) marks tokens whose gradient was clipped away.

    A token with an advantage of 0 has no gradient to clip, so `policy_loss` never marks it.
    """

    losses_N: torch.Tensor
    is_clipped_N: torch.Tensor


PolicyLossFunction = Callable[[PolicyLossInputs, PolicyLossSection], PolicyLossOutputs]


def _clipped(inputs: PolicyLossInputs, log_ratio_N: torch.Tensor, loss: PolicyLossSection) -> PolicyLossOutputs:
    ratio_N = clamped_exp(log_ratio_N)
    clipped_N = ratio_N.clamp(1 - loss.clip_lower, 1 + loss.clip_higher)
    bounded_N = ratio_N if loss.delta is None else ratio_N.clamp(max=loss.delta)
    unclipped_loss_N, clipped_loss_N = -bounded_N * inputs.advantages_N, -clipped_N * inputs.advantages_N
    is_bounded_N = (bounded_N < ratio_N) & (inputs.advantages_N < 0)
    return PolicyLossOutputs(
        losses_N=torch.maximum(unclipped_loss_N, clipped_loss_N),
        is_clipped_N=((clipped_loss_N > unclipped_loss_N) | is_bounded_N).float(),
    )


def _dapo(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    return _clipped(inputs, inputs.log_ratio_N, loss)


def _cispo(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    ratio_N = clamped_exp(inputs.log_ratio_N.detach())
    clipped_N = ratio_N.clamp(1 - loss.clip_lower if loss.cispo_clamp_below else None, 1 + loss.clip_higher)
    return PolicyLossOutputs(
        losses_N=-clipped_N * inputs.advantages_N * inputs.logprobs_N,
        is_clipped_N=(clipped_N != ratio_N).float(),
    )


def _gspo(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    return _clipped(inputs, inputs.mean_by_sequence(inputs.log_ratio_N), loss)


def importance_ratio(kind: str, inputs: PolicyLossInputs) -> torch.Tensor:
    """The ratio by which the loss `kind` weighs each token: the token's own, or that of its completion."""
    log_ratio_N = inputs.log_ratio_N
    if policy_loss_facts(kind).by_completion:
        log_ratio_N = inputs.mean_by_sequence(log_ratio_N)
    return clamped_exp(log_ratio_N)


def _sapo(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    ratio_N = clamped_exp(inputs.log_ratio_N)
    steepness_N = torch.where(inputs.advantages_N > 0, loss.sapo_temperature_pos, loss.sapo_temperature_neg)
    gate_N = 4 / steepness_N * torch.sigmoid(steepness_N * (ratio_N - 1))
    return _nothing_clipped(-gate_N * inputs.advantages_N)


def _gmpo(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    log_ratio_N = inputs.log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clipped_N = log_ratio_N.clamp(math.log1p(-loss.clip_lower), math.log1p(loss.clip_higher))
    is_good_N = inputs.advantages_N > 0
    kept_N = torch.where(is_good_N, torch.minimum(log_ratio_N, clipped_N), torch.maximum(log_ratio_N, clipped_N))
    losses_N = -inputs.advantages_N * inputs.mean_by_sequence(kept_N).exp()
    return PolicyLossOutputs(losses_N=losses_N, is_clipped_N=(kept_N != log_ratio_N).float())


def _vespo(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    log_ratio_N = inputs.log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sums_S = sequence_sums(log_ratio_N, inputs.sequence_ids_N, inputs.num_sequences)
    log_w_N = sums_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[inputs.sequence_ids_N]
    power_N, rate_N = (torch.where(inputs.advantages_N >= 0, *pair) for pair in zip(VESPO_GOOD, VESPO_BAD, strict=True))
    phi_N = (power_N * log_w_N + rate_N * (1 - log_w_N.exp())).exp()
    return _nothing_clipped(-phi_N * inputs.advantages_N * inputs.logprobs_N)


def _dppo_tv(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    moved_N = inputs.logprobs_N.detach().exp() - inputs.old_logprobs_N.exp()
    return _within_divergence(inputs, moved_N.abs(), loss)


def _dppo_kl(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    old_N, new_N = inputs.old_logprobs_N.exp(), inputs.logprobs_N.detach().exp()
    others_N = ((1 - old_N).clamp(min=LEAST_PROBABILITY) / (1 - new_N).clamp(min=LEAST_PROBABILITY)).log()
    return _within_divergence(inputs, -old_N * inputs.log_ratio_N.detach() + (1 - old_N) * others_N, loss)


def _within_divergence(
    inputs: PolicyLossInputs, divergence_N: torch.Tensor, loss: PolicyLossSection
) -> PolicyLossOutputs:
    ratio_N = clamped_exp(inputs.log_ratio_N)
    too_far_up_N = (inputs.advantages_N > 0) & (ratio_N > 1) & (divergence_N > loss.clip_higher)
    too_far_down_N = (inputs.advantages_N <= 0) & (ratio_N < 1) & (divergence_N > loss.clip_lower)
    is_clipped_N = (too_far_up_N | too_far_down_N).to(ratio_N.dtype)
    losses_N = -ratio_N * inputs.advantages_N * (1 - is_clipped_N)
    if loss.delta is not None:
        losses_N = losses_N * (loss.delta / ratio_N.detach()).clamp(max=1)
        is_clipped_N = torch.maximum(is_clipped_N, (ratio_N > loss.delta).to(ratio_N.dtype))
    return PolicyLossOutputs(losses_N=losses_N, is_clipped_N=is_clipped_N.float())


def _clip_cov(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    assert inputs.marked_N is not None
    outputs = _dapo(inputs, loss)
    return PolicyLossOutputs(
        losses_N=outputs.losses_N * (1 - inputs.marked_N),
        is_clipped_N=torch.maximum(outputs.is_clipped_N, inputs.marked_N.float()),
    )


def _kl_cov(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    assert inputs.marked_N is not None
    losses_N = -clamped_exp(inputs.log_ratio_N) * inputs.advantages_N
    return _nothing_clipped(losses_N + loss.kl_cov_coef * inputs.marked_N * inputs.log_ratio_N.abs())


def _gpg(inputs: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    return _nothing_clipped(-inputs.advantages_N * inputs.logprobs_N)


def _nothing_clipped(losses_N: torch.Tensor) -> PolicyLossOutputs:
    return PolicyLossOutputs(losses_N=losses_N, is_clipped_N=torch.zeros_like(losses_N, dtype=torch.float32))


# The functions of `POLICY_LOSSES`.
POLICY_FUNCTIONS: dict[str, PolicyLossFunction] = {
    "dapo": _dapo,
    "cispo": _cispo,
    "grpo": _dapo,
    "dr_grpo": _dapo,
    "gspo": _gspo,
    "bnpo": _dapo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "luspo": _gspo,
    "vespo": _vespo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "gpg": _gpg,
}


def policy_loss(
    inputs: PolicyLossInputs, loss: PolicyLossSection, own: PolicyLossFunction | None = None
) -> PolicyLossOutputs:
    """The loss of every token, to be summed and divided by the `global_denominator`.

    `own` is the function of a `--loss_fn` that is not in the table.
    """
    outputs = (own or POLICY_FUNCTIONS[loss.loss_fn])(inputs, loss)
    return PolicyLossOutputs(
        losses_N=shares(loss.loss_fn, outputs.losses_N, inputs),
        is_clipped_N=outputs.is_clipped_N * (inputs.advantages_N != 0),
    )


def shares(kind: str, values_N: torch.Tensor, inputs: PolicyLossInputs) -> torch.Tensor:
    """`values_N` as the loss `kind` weighs tokens: unchanged, or divided by the length of their completion.

    In the second case their sum is the sum of the means over completions.
    """
    if not policy_loss_facts(kind).averaged:
        return values_N
    lengths_S = lengths_of(inputs.sequence_ids_N, inputs.num_sequences)
    return values_N / lengths_S[inputs.sequence_ids_N].to(values_N.dtype)


def global_denominator(
    kind: str, *, num_tokens: int, num_completions: int, response_length: int, constant: int | None = None
) -> float:
    """The denominator of the sum of losses over the whole global batch.

    Args:
        kind: the loss.
        num_tokens: label tokens of the global batch.
        num_completions: completions of the global batch.
        response_length: tokens that a completion may have at most.
        constant: tokens per completion to divide by in place of `num_tokens`.
    """
    denominator = policy_loss_facts(kind).denominator
    if denominator == "completions":
        return float(num_completions)
    if denominator == "response_length":
        return float(num_completions * response_length)
    return float(num_tokens if constant is None else num_completions * constant)

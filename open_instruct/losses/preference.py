"""Preference losses: log-probs of chosen and rejected replies in, one loss per pair out.

To add one, write a function here under `register`, with its formula and paper: `python
scripts/losses_page.py` puts it into the tables of docs/losses.md. The flags it reads are
keyword-only arguments of the function, and named in `flags`. Importing this file loads no torch,
because `--help` and the checks of flags read `PREFERENCE_LOSSES`, which is whole once this file is
imported.

No loss here divides by a number of pairs. The caller adds up `losses_P` over microbatches and
ranks and divides by the global number of pairs, so the result does not depend on the split.

Formulas are in the words of docs/losses.md. For the chosen and the rejected reply a function is
given what its loss compares: the log-ratio to the reference, or the log-prob in a loss without a
reference, summed or averaged over the reply.

Legend: P pairs. All log-probs are in nats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from open_instruct.losses.logprobs import per_token
from open_instruct.losses.preference_loss import (
    DIVERGENCE,
    PREFERENCE_LOSSES,
    SHORTER,
    ComparedPairs,
    log_sigmoid,
    register,
)

if TYPE_CHECKING:
    import torch

__all__ = ["PREFERENCE_LOSSES"]


@register(
    "dpo_norm",
    "−log σ(β m)",
    "2411.15124 section 5.1.2, eq. 6",
    beta=5.0,
    per_token=True,
    changed_by=(DIVERGENCE,),
    flags=("label_smoothing",),
)
@register(
    "dpo",
    "−log σ(β m)",
    "2305.18290 eq. 7",
    changed_by=(SHORTER, DIVERGENCE),
    flags=("label_smoothing",),
)
def logistic_losses(pairs: ComparedPairs, *, label_smoothing: float) -> torch.Tensor:
    """DPO. With label smoothing e it is conservative DPO (Mitchell 2023, "A note on DPO with noisy
    preferences"): `-(1 - e) * log sigmoid(beta * m) - e * log sigmoid(-beta * m)`.
    """
    return _smoothed_logistic(pairs.logits_P, label_smoothing)


@register(
    "simpo",
    "−log σ(β m − γ)",
    "2405.14734 eq. 6",
    beta=2.0,
    per_token=True,
    needs_reference=False,
    flags=(
        "label_smoothing",
        "gamma_beta_ratio",
    ),
)
def simpo_losses(
    pairs: ComparedPairs, *, label_smoothing: float, gamma_beta_ratio: float
) -> torch.Tensor:
    """SimPO, with `gamma = gamma_beta_ratio * beta`. Smoothed as DPO is."""
    margins_P = pairs.chosen_P - pairs.rejected_P
    return _smoothed_logistic(pairs.beta * (margins_P - gamma_beta_ratio), label_smoothing)


@register(
    "wpo",
    "−w log σ(β m)",
    "2406.11827 section 3",
    changed_by=(DIVERGENCE,),
    knows_first_loss=False,
    flags=(
        "label_smoothing",
        "weight_alignment",
    ),
)
def wpo_losses(
    pairs: ComparedPairs, *, label_smoothing: float, weight_alignment: bool
) -> torch.Tensor:
    """WPO: the DPO loss times `w(chosen) * w(rejected)`.

    `w(y) = exp(mean log-prob of y's tokens)` under the current policy, without gradient, the
    product clamped at 1. With the paper's weight alignment each token's log-prob is taken relative
    to `log(sum over v of p(v)^2)`, the log of the expected probability of a token that the policy
    samples.
    """
    inputs = pairs.inputs
    logps_2P = inputs.policy_logps_2P.detach()
    if weight_alignment:
        assert inputs.collision_logps_2P is not None
        logps_2P = logps_2P - inputs.collision_logps_2P
    chosen_means_P, rejected_means_P = per_token(logps_2P, inputs.lengths_2P)
    weights_P = (chosen_means_P + rejected_means_P).exp().clamp(max=1.0)
    return weights_P * logistic_losses(pairs, label_smoothing=label_smoothing)


@register(
    "ipo", "(m − 1/(2β))²", "2310.12036 eq. 17", beta=1.0, per_token=True, changed_by=(DIVERGENCE,)
)
def ipo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """IPO; beta is the paper's tau.

    The paper writes whole-sequence log-probs; its authors later advised averages (and TRL uses
    them), as one target then suits replies of any length.
    """
    return (pairs.chosen_P - pairs.rejected_P - 1.0 / (2.0 * pairs.beta)).square()


@register("hinge", "max(0, 1 − β m)", "2305.10425, 2309.06657", changed_by=(SHORTER, DIVERGENCE))
def hinge_losses(pairs: ComparedPairs) -> torch.Tensor:
    """SLiC-HF (arXiv 2305.10425) on DPO's margin, as in RSO (arXiv 2309.06657)."""
    return (1.0 - pairs.logits_P).relu()


@register(
    "robust",
    "(−(1 − ε) log σ(z) + ε log σ(−z)) / (1 − 2ε)",
    "2403.00409 eq. 12",
    changed_by=(SHORTER, DIVERGENCE),
    flags=("label_smoothing",),
)
def robust_losses(pairs: ComparedPairs, *, label_smoothing: float) -> torch.Tensor:
    """DPO's loss without the bias of labels that are flipped with probability e; it may be
    negative.
    """
    e = label_smoothing
    logits_P = pairs.logits_P
    return (e * log_sigmoid(-logits_P) - (1.0 - e) * log_sigmoid(logits_P)) / (1.0 - 2.0 * e)


@register(
    "exo_pair",
    "σ(z) (log σ(z) − log(1 − ε)) + σ(−z) (log σ(−z) − log ε)",
    "2402.00856 eq. 16",
    changed_by=(SHORTER, DIVERGENCE),
    flags=("label_smoothing",),
)
def exo_losses(pairs: ComparedPairs, *, label_smoothing: float) -> torch.Tensor:
    """EXO on pairs: the divergence of the policy's preference from labels that are right with
    probability 1 - e.
    """
    assert label_smoothing > 0, "see `loss_problems`"
    log_share_P = log_sigmoid(pairs.logits_P)
    other_log_share_P = log_sigmoid(-pairs.logits_P)
    chosen_term_P = log_share_P.exp() * (log_share_P - math.log1p(-label_smoothing))
    rejected_term_P = other_log_share_P.exp() * (other_log_share_P - math.log(label_smoothing))
    return chosen_term_P + rejected_term_P


@register(
    "nca_pair", "−log σ(w) − ½ log σ(−w) − ½ log σ(−l)", "2402.05369 eq. 11", changed_by=(SHORTER,)
)
def nca_losses(pairs: ComparedPairs) -> torch.Tensor:
    """NCA on pairs: the chosen reply's reward is pulled up, and both are pulled to 0."""
    w_P = pairs.chosen_rewards_P
    l_P = pairs.rejected_rewards_P
    return -log_sigmoid(w_P) - 0.5 * log_sigmoid(-w_P) - 0.5 * log_sigmoid(-l_P)


@register("bco_pair", "−log σ(w) − log σ(−l)", "2404.04656", changed_by=(SHORTER,))
def bco_losses(pairs: ComparedPairs) -> torch.Tensor:
    """BCO on pairs, without its reward shift: a classifier of chosen against rejected replies."""
    return -log_sigmoid(pairs.chosen_rewards_P) - log_sigmoid(-pairs.rejected_rewards_P)


@register(
    "sppo_hard",
    "(r(y_c) − 1/(2β))² + (r(y_r) + 1/(2β))²",
    "2405.00675 eq. 4.7",
    changed_by=(SHORTER,),
)
def sppo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """SPPO with hard labels: log-ratios to +-1 / (2 * beta); beta is the paper's 1 / eta."""
    target = 1.0 / (2.0 * pairs.beta)
    return (pairs.chosen_P - target).square() + (pairs.rejected_P + target).square()


@register(
    "aot",
    "−log σ(β m), m of sorted margins of policy and reference",
    "2406.05882 section 3",
    sorts_batch=True,
    changed_by=(SHORTER,),
    flags=("label_smoothing",),
)
def aot_losses(pairs: ComparedPairs, *, label_smoothing: float) -> torch.Tensor:
    """AOT on pairs:

    DPO's loss of the policy's margin against the reference's margin of the same rank.
    """
    margins_P = pairs.chosen_P - pairs.rejected_P + pairs.partners.margin_shift
    return _smoothed_logistic(pairs.beta * margins_P, label_smoothing)


@register(
    "aot_unpaired",
    "−log σ(β m), m of sorted r(y_c) and sorted r(y_r)",
    "2406.05882 section 3",
    sorts_batch=True,
    changed_by=(SHORTER,),
    flags=("label_smoothing",),
)
def aot_unpaired_losses(pairs: ComparedPairs, *, label_smoothing: float) -> torch.Tensor:
    """AOT without pairs: DPO's loss of a chosen reply against the rejected one of the same rank.

    A pair has the value of its chosen reply's loss, and the gradients of both of its replies.
    """
    partners = pairs.partners
    chosen_losses_P = _smoothed_logistic(
        pairs.beta * (pairs.chosen_P - partners.rejected), label_smoothing
    )
    rejected_losses_P = _smoothed_logistic(
        pairs.beta * (partners.chosen - pairs.rejected_P), label_smoothing
    )
    return chosen_losses_P + (rejected_losses_P - rejected_losses_P.detach())


@register("apo_zero", "1 − σ(w) + σ(l)", "2408.06266 eq. 7", changed_by=(SHORTER,))
def apo_zero_losses(pairs: ComparedPairs) -> torch.Tensor:
    """APO-zero: chosen replies up, rejected ones down."""
    return (-pairs.chosen_rewards_P).sigmoid() + pairs.rejected_rewards_P.sigmoid()


@register("apo_down", "σ(w) + 1 − σ(w − l)", "2408.06266 eq. 8", changed_by=(SHORTER,))
def apo_down_losses(pairs: ComparedPairs) -> torch.Tensor:
    """APO-down: both down, the rejected reply more."""
    return pairs.chosen_rewards_P.sigmoid() + (-pairs.logits_P).sigmoid()


@register(
    "discopop",
    "−(1 − s) log σ(z) + s e^−z, s = σ(z/τ)",
    "2406.08414 eq. 5",
    changed_by=(SHORTER, DIVERGENCE),
    flags=("discopop_tau",),
)
def discopop_losses(pairs: ComparedPairs, *, discopop_tau: float) -> torch.Tensor:
    """DiscoPOP, a mixture of the logistic and the exponential loss."""
    logits_P = pairs.logits_P
    modulated_P = logits_P / discopop_tau
    # The share s vanishes faster than e^-z grows, so their product has no overflow as one
    # exponential.
    exponential_P = (log_sigmoid(modulated_P) - logits_P).exp()
    return exponential_P - (-modulated_P).sigmoid() * log_sigmoid(logits_P)


@register("sft", "−log π(y_c)/|y_c|", "2404.19733 eq. 1", per_token=True, needs_reference=False)
def sft_losses(pairs: ComparedPairs) -> torch.Tensor:
    """-log p of the chosen reply, a mean over its tokens: the second part of iterative RPO."""
    return -per_token(pairs.inputs.policy_logps_2P[0], pairs.inputs.lengths_2P[0])


@register(
    "cpo",
    "−log σ(z) − α log π(y_c)/|y_c|",
    "2401.08417 eq. 5",
    needs_reference=False,
    flags=(
        "label_smoothing",
        "cpo_alpha",
    ),
)
def cpo_losses(pairs: ComparedPairs, *, label_smoothing: float, cpo_alpha: float) -> torch.Tensor:
    """CPO:

    DPO's loss without a reference, and the chosen reply's -log p, by its authors' code a mean over
    tokens.
    """
    return logistic_losses(pairs, label_smoothing=label_smoothing) + cpo_alpha * sft_losses(pairs)


@register(
    "orpo",
    "−log π(y_c)/|y_c| − β log σ(log odds of y_c − log odds of y_r)",
    "2403.07691 eq. 6",
    per_token=True,
    needs_reference=False,
)
def orpo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """ORPO. The odds of a reply are p / (1 - p), log p its mean log-prob."""
    log_odds_ratios_P = _log_odds(pairs.chosen_P) - _log_odds(pairs.rejected_P)
    return sft_losses(pairs) - pairs.beta * log_sigmoid(log_odds_ratios_P)


def _log_odds(logps_P: torch.Tensor) -> torch.Tensor:
    # Rounding makes a certain reply's log-prob 0, where the odds are infinite.
    certain_P = logps_P.clamp(max=-1e-7)
    return certain_P - (-certain_P.expm1()).log()


def _smoothed_logistic(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    losses_P = -log_sigmoid(logits_P)
    if label_smoothing == 0.0:
        return losses_P
    return (1.0 - label_smoothing) * losses_P - label_smoothing * log_sigmoid(-logits_P)

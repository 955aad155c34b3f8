"""Preference losses: log-probs of chosen and rejected replies in, one loss per pair out.

To add one, write a function here under `register`, with its formula and paper: `python
scripts/losses_page.py` puts it into the tables of docs/losses.md. The flags it reads are
keyword-only arguments of the function, and named in `flags`. Importing this file loads no torch,
because `--help` and the checks of flags read `PREFERENCE_LOSSES`.

No loss here divides by a number of pairs. The caller adds up `losses_P` over microbatches and
ranks and divides by the global number of pairs, so the result does not depend on the split.

Formulas are in the words of docs/losses.md. For the chosen and the rejected reply a function is
given what its loss compares: the log-ratio to the reference, or the log-prob in a loss without a
reference, summed or averaged over the reply.

Legend: P pairs. All log-probs are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from open_instruct.losses.logprobs import MAX_LOG_RATIO, per_token
from open_instruct.losses.rank_matching import RankPartners, match_by_rank
from open_instruct.losses.registry import bind_flags, make_register

if TYPE_CHECKING:
    import torch

# Flags that change what a loss compares, see `sum_by_reply` and `divergence_terms`.
SHORTER = "ld_alpha"
DIVERGENCE = "f_divergence_type"
# Those of --f_divergence_type; the first is DPO's.
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# What each of these flags chooses, and the value that changes nothing.
CHANGING_FLAGS = {
    SHORTER: ("sums over replies to desensitize", None),
    DIVERGENCE: ("divergence to choose", F_DIVERGENCES[0]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossInputs:
    """The inputs of any preference loss; row 0 is for the chosen replies, row 1 for the rejected
    ones.

    Log-probs are sums over the reply's tokens. `collision_logps_2P` are sums of log(sum over v of
    p(v)^2), see `TokenLogprobs`; without them, weights are not aligned. `partners` are those of the
    pairs in the global batch, for losses that sort it; without them the pairs here are the global
    batch.

    Example: one pair, replies of 2 and 4 tokens, before the first step::

        PreferenceLossInputs(
            policy_logps_2P=torch.tensor([[-3.0], [-8.0]]),
            lengths_2P=torch.tensor([[2], [4]]),
            reference_logps_2P=torch.tensor([[-3.0], [-8.0]]),
        )
    """

    policy_logps_2P: torch.Tensor
    lengths_2P: torch.Tensor
    reference_logps_2P: torch.Tensor | None = None
    collision_logps_2P: torch.Tensor | None = None
    partners: RankPartners | None = None

    def __post_init__(self) -> None:
        # Shapes (B,) and (B, T) broadcast silently into a wrong loss, so every one must have the
        # same P.
        shape = (2, self.policy_logps_2P.shape[1])
        for name in ("policy_logps_2P", "lengths_2P", "reference_logps_2P", "collision_logps_2P"):
            tensor = getattr(self, name)
            assert tensor is None or tensor.shape == shape, (
                f"{name}: {tuple(tensor.shape)}, not {shape}"
            )
        for tensor in self.partners or ():
            assert tensor.shape == shape[1:], f"partners: {tuple(tensor.shape)}, not {shape[1:]}"

    @property
    def rank_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `match_by_rank` compares, of these pairs: log-ratios (2, P) and reference margins
        (P,), in float64.
        """
        assert self.reference_logps_2P is not None
        reference_2P = self.reference_logps_2P.double()
        log_ratios_2P = self.policy_logps_2P.detach().double() - reference_2P
        return log_ratios_2P, reference_2P[0] - reference_2P[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPairs:
    """The compared values of the chosen and of the rejected replies, with the inputs they were made
    from.
    """

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    inputs: PreferenceLossInputs
    beta: float

    @property
    def chosen_rewards_P(self) -> torch.Tensor:
        return self.beta * self.chosen_P

    @property
    def rejected_rewards_P(self) -> torch.Tensor:
        return self.beta * self.rejected_P

    @property
    def partners(self) -> RankPartners:
        """The numbers that AOT compares the pairs with, in the dtype of these."""
        partners = self.inputs.partners or match_by_rank(*self.inputs.rank_values)
        return RankPartners(*(each_P.to(self.chosen_P) for each_P in partners))

    @property
    def logits_P(self) -> torch.Tensor:
        """beta times the margin: the log odds with which the policy prefers the chosen reply."""
        return self.beta * (self.chosen_P - self.rejected_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss of --loss_type: a function, and what it compares.

    Example: `PREFERENCE_LOSSES["dpo_norm"]` has `per_token` True, `beta` 5.0 and `reads`
    `("label_smoothing", "f_divergence_type")`.
    """

    function: Callable[..., torch.Tensor]
    """`function(pairs, **flags)` gives the loss of every pair."""
    flags: tuple[str, ...] = ()
    """The flags that the function is given, by their names."""
    formula: str
    """The loss of a pair, in the words of docs/losses.md."""
    paper: str
    """Numbers on arXiv, and places in these papers."""
    beta: float = 0.1
    """The --beta it takes by default.

    A loss of means over tokens wants a larger one than a loss of sums.
    """
    per_token: bool = False
    """Whether log-probs are averaged over the reply, or added up."""
    needs_reference: bool = True
    """Whether log-probs are compared with those of the start model."""
    sorts_batch: bool = False
    """Whether the loss of a pair depends on the other pairs of the global batch, see
    `match_by_rank`.
    """
    changed_by: tuple[str, ...] = ()
    """The flags that change what it compares."""
    knows_first_loss: bool = True
    """Whether the loss of a policy that equals its reference is the same for every policy; without
    a reference it never is.
    """

    @property
    def reads(self) -> tuple[str, ...]:
        """The flags that not every loss reads."""
        return (*self.flags, *self.changed_by)

    def losses(self, inputs: PreferenceLossInputs, section: Any) -> torch.Tensor:
        """The loss of every pair; `section` has the flags."""
        function = bind_flags(self.function, self.flags, section)
        return function(self.compared(inputs, section))

    def compared(self, inputs: PreferenceLossInputs, section: Any) -> ComparedPairs:
        """The values of the chosen and of the rejected replies that it compares."""
        compared_2P = inputs.policy_logps_2P
        if self.needs_reference:
            assert inputs.reference_logps_2P is not None, (
                f"{section.loss_type} needs the reference log-probs"
            )
            # Policy and reference are close, so subtracting them before chosen and rejected keeps
            # the most digits.
            compared_2P = compared_2P - inputs.reference_logps_2P
        if self.per_token:
            compared_2P = per_token(compared_2P, inputs.lengths_2P)
        chosen_P, rejected_P = divergence_terms(
            compared_2P,
            f_divergence_type=section.f_divergence_type,
            f_alpha_divergence_coef=section.f_alpha_divergence_coef,
        )
        return ComparedPairs(
            chosen_P=chosen_P, rejected_P=rejected_P, inputs=inputs, beta=section.beta
        )


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {}
# Makes the decorated function the loss `--loss_type name`; `facts` are fields of `PreferenceLoss`.
register = make_register(PREFERENCE_LOSSES, PreferenceLoss)


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
    return (e * _log_sigmoid(-logits_P) - (1.0 - e) * _log_sigmoid(logits_P)) / (1.0 - 2.0 * e)


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
    log_share_P = _log_sigmoid(pairs.logits_P)
    other_log_share_P = _log_sigmoid(-pairs.logits_P)
    chosen_term_P = log_share_P.exp() * (log_share_P - math.log1p(-label_smoothing))
    rejected_term_P = other_log_share_P.exp() * (other_log_share_P - math.log(label_smoothing))
    return chosen_term_P + rejected_term_P


@register(
    "nca_pair", "−log σ(w) − ½ log σ(−w) − ½ log σ(−l)", "2402.05369 eq. 11", changed_by=(SHORTER,)
)
def nca_losses(pairs: ComparedPairs) -> torch.Tensor:
    """NCA on pairs: the chosen reply's reward is pulled up, and both are pulled to 0."""
    w_P, l_P = pairs.chosen_rewards_P, pairs.rejected_rewards_P
    return -_log_sigmoid(w_P) - 0.5 * _log_sigmoid(-w_P) - 0.5 * _log_sigmoid(-l_P)


@register("bco_pair", "−log σ(w) − log σ(−l)", "2404.04656", changed_by=(SHORTER,))
def bco_losses(pairs: ComparedPairs) -> torch.Tensor:
    """BCO on pairs, without its reward shift: a classifier of chosen against rejected replies."""
    return -_log_sigmoid(pairs.chosen_rewards_P) - _log_sigmoid(-pairs.rejected_rewards_P)


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
    exponential_P = (_log_sigmoid(modulated_P) - logits_P).exp()
    return exponential_P - (-modulated_P).sigmoid() * _log_sigmoid(logits_P)


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
    return sft_losses(pairs) - pairs.beta * _log_sigmoid(log_odds_ratios_P)


def _log_odds(logps_P: torch.Tensor) -> torch.Tensor:
    # Rounding makes a certain reply's log-prob 0, where the odds are infinite.
    certain_P = logps_P.clamp(max=-1e-7)
    return certain_P - (-certain_P.expm1()).log()


def _smoothed_logistic(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    losses_P = -_log_sigmoid(logits_P)
    if label_smoothing == 0.0:
        return losses_P
    return (1.0 - label_smoothing) * losses_P - label_smoothing * _log_sigmoid(-logits_P)


def _log_sigmoid(values: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)


def divergence_terms(
    log_ratios: torch.Tensor, *, f_divergence_type: str, f_alpha_divergence_coef: float
) -> torch.Tensor:
    """f'(u) of f-DPO, arXiv 2309.16240 table 1, given log u, shifted by a constant to be 0 at u =
    1.

    Reverse KL: log u. Forward KL: 1 - 1 / u. Jensen-Shannon: log(2 u / (1 + u)). The alpha
    divergence, whose alpha is 1 - alpha in the paper: (u^(alpha - 1) - 1) / (alpha - 1).
    """
    if f_divergence_type == "reverse_kl":
        return log_ratios
    if f_divergence_type == "js_divergence":
        return _log_sigmoid(log_ratios) + math.log(2.0)
    exponent = -1.0 if f_divergence_type == "forward_kl" else f_alpha_divergence_coef - 1.0
    return (exponent * log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expm1() / exponent

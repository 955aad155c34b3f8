"""Preference losses: log-probs of chosen and rejected replies in, one loss per pair out.

No loss here divides by a number of pairs. The caller adds up `losses_P` over microbatches and
ranks and divides by the global number of pairs, so the result does not depend on the split.

Legend: P pairs. All log-probs are in nats. For the chosen and the rejected reply a function
is given what its loss compares: the log-ratio to the reference, or the log-prob in a loss without a reference, summed
or averaged over the reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from open_instruct.config.losses import PREFERENCE_LOSSES
from open_instruct.config.sections import PreferenceLossSection
from open_instruct.losses.logprobs import MAX_LOG_RATIO, ROUNDING, per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossInputs:
    """The inputs of any preference loss; row 0 is for the chosen replies, row 1 for the rejected ones.

    Log-probs are sums over the reply's tokens. `collision_logps_2P` are sums of log(sum over v of p(v)^2), see
    `TokenLogprobs`; without them, weights are not aligned. `matched_3P` are values from other pairs for losses over the
    global batch: see `matched_pairs`.

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
    matched_3P: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # Shapes (B,) and (B, T) broadcast silently into a wrong loss, so every one must have the same P.
        num_pairs = self.policy_logps_2P.shape[1]
        for name in self.__slots__:
            tensor = getattr(self, name)
            shape = (int(name[-2]), num_pairs)
            assert tensor is None or tensor.shape == shape, f"{name}: {tuple(tensor.shape)}, not {shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossOutputs:
    """Per-pair results. Only `losses_P` carries a gradient.

    Rewards are beta * (policy - reference) of the log-probs as the loss sees them (simpo: beta * policy):
    sums, or means over the reply's tokens for a length-normalised loss. `logps_2P` are those of the policy.
    Among several losses the leading one decides. `parts` are the separate losses before they are weighted.
    `is_right_P` says whether the chosen reply has the higher reward, by more than the log-probs' rounding: a policy
    that equals its reference is right on no pair, even if the reference was computed on ranks that split rows
    otherwise.
    """

    losses_P: torch.Tensor
    rewards_2P: torch.Tensor
    logps_2P: torch.Tensor
    is_right_P: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPairs:
    """The compared values of the chosen and of the rejected replies, with the inputs they were made from."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    inputs: PreferenceLossInputs
    loss: PreferenceLossSection

    @property
    def chosen_rewards_P(self) -> torch.Tensor:
        return self.loss.beta * self.chosen_P

    @property
    def rejected_rewards_P(self) -> torch.Tensor:
        return self.loss.beta * self.rejected_P

    @property
    def logits_P(self) -> torch.Tensor:
        """beta times the margin: the log odds with which the policy prefers the chosen reply."""
        return self.loss.beta * (self.chosen_P - self.rejected_P)


LossFunction = Callable[[ComparedPairs], torch.Tensor]


def logistic_losses(pairs: ComparedPairs) -> torch.Tensor:
    """DPO, arXiv 2305.18290 eq. 7: `-log sigmoid(beta * m)`, m the margin of log-ratios.

    On log-ratios averaged over the reply's tokens it is length-normalised DPO, Tülu 3, arXiv 2411.15124
    section 5.1.2 eq. 6. With label smoothing e, conservative DPO (Mitchell 2023, "A note on DPO with noisy
    preferences"): `-(1 - e) * log sigmoid(beta * m) - e * log sigmoid(-beta * m)`.
    """
    return _smoothed_logistic(pairs.logits_P, pairs.loss.label_smoothing)


def simpo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """SimPO, arXiv 2405.14734 eq. 6: `-log sigmoid(beta * m - gamma)`, m the margin of mean log-probs.

    `gamma = gamma_beta_ratio * beta`. Smoothed as DPO is.
    """
    loss, margins_P = pairs.loss, pairs.chosen_P - pairs.rejected_P
    return _smoothed_logistic(loss.beta * (margins_P - loss.gamma_beta_ratio), loss.label_smoothing)


def wpo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """WPO, arXiv 2406.11827 section 3: the DPO loss times `w(chosen) * w(rejected)`.

    `w(y) = exp(mean log-prob of y's tokens)` under the current policy, without gradient, the product
    clamped at 1. With the paper's weight alignment each token's log-prob is taken relative to
    `log(sum over v of p(v)^2)`, what the policy expects of a token it draws itself.
    """
    inputs = pairs.inputs
    logps_2P = inputs.policy_logps_2P.detach()
    if pairs.loss.weight_alignment:
        assert inputs.collision_logps_2P is not None
        logps_2P = logps_2P - inputs.collision_logps_2P
    chosen_means_P, rejected_means_P = per_token(logps_2P, inputs.lengths_2P)
    return torch.exp(chosen_means_P + rejected_means_P).clamp(max=1.0) * logistic_losses(pairs)


def ipo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """IPO, arXiv 2310.12036 eq. 17: `(m - 1 / (2 * beta)) ** 2`; beta is the paper's tau.

    m is the margin of log-ratios averaged over tokens. The paper writes whole-sequence log-probs; its
    authors later advised averages (and TRL uses them), as one target then suits replies of any length.
    """
    return (pairs.chosen_P - pairs.rejected_P - 1.0 / (2.0 * pairs.loss.beta)).square()


def hinge_losses(pairs: ComparedPairs) -> torch.Tensor:
    """Hinge, `max(0, 1 - beta * m)`: SLiC-HF (arXiv 2305.10425) on DPO's margin, as in RSO (arXiv 2309.06657)."""
    return F.relu(1.0 - pairs.logits_P)


def robust_losses(pairs: ComparedPairs) -> torch.Tensor:
    """Robust DPO, arXiv 2403.00409 eq. 12: DPO's loss, without the bias of labels flipped with probability e.

    `(-(1 - e) * log sigmoid(beta * m) + e * log sigmoid(-beta * m)) / (1 - 2 * e)`; it may be negative.
    """
    e, logits_P = pairs.loss.label_smoothing, pairs.logits_P
    return (e * F.logsigmoid(-logits_P) - (1.0 - e) * F.logsigmoid(logits_P)) / (1.0 - 2.0 * e)


def exo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """EXO on pairs, arXiv 2402.00856 eq. 16: KL(q || (1 - e, e)), q the policy's preference `sigmoid(beta * m)`."""
    e, logits_P = pairs.loss.label_smoothing, pairs.logits_P
    chosen_term_P = torch.sigmoid(logits_P) * (F.logsigmoid(logits_P) - math.log1p(-e))
    return chosen_term_P + torch.sigmoid(-logits_P) * (F.logsigmoid(-logits_P) - math.log(e))


def nca_losses(pairs: ComparedPairs) -> torch.Tensor:
    """NCA on pairs, arXiv 2402.05369 eq. 11: the chosen reply's reward is pulled up, and both are pulled to 0.

    `-log sigmoid(w) - log sigmoid(-w) / 2 - log sigmoid(-l) / 2`, rewards w and l of chosen and rejected.
    """
    w_P, l_P = pairs.chosen_rewards_P, pairs.rejected_rewards_P
    return -F.logsigmoid(w_P) - 0.5 * F.logsigmoid(-w_P) - 0.5 * F.logsigmoid(-l_P)


def bco_losses(pairs: ComparedPairs) -> torch.Tensor:
    """BCO on pairs, arXiv 2404.04656, without its reward shift: a classifier of chosen against rejected replies."""
    return -F.logsigmoid(pairs.chosen_rewards_P) - F.logsigmoid(-pairs.rejected_rewards_P)


def sppo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """SPPO with hard labels, arXiv 2405.00675 eq. 4.7: log-ratios to +-1 / (2 * beta); beta is the paper's 1 / eta."""
    target = 1.0 / (2.0 * pairs.loss.beta)
    return (pairs.chosen_P - target).square() + (pairs.rejected_P + target).square()


def aot_losses(pairs: ComparedPairs) -> torch.Tensor:
    """AOT on pairs, arXiv 2406.05882: DPO's loss of the policy's margins against the reference's, each sorted."""
    assert pairs.inputs.matched_3P is not None
    shifts_P = pairs.inputs.matched_3P[0].to(pairs.chosen_P.dtype)
    shifted_P = pairs.chosen_P - pairs.rejected_P + shifts_P
    return _smoothed_logistic(pairs.loss.beta * shifted_P, pairs.loss.label_smoothing)


def aot_unpaired_losses(pairs: ComparedPairs) -> torch.Tensor:
    """AOT, arXiv 2406.05882: DPO's loss of chosen against rejected replies, each sorted by their log-ratios.

    A pair has the loss of its chosen reply, and the gradients of both.
    """
    loss, matched_3P = pairs.loss, pairs.inputs.matched_3P
    assert matched_3P is not None
    _, rejected_partners_P, chosen_partners_P = matched_3P.to(pairs.chosen_P.dtype)
    chosen_losses_P = _smoothed_logistic(loss.beta * (pairs.chosen_P - rejected_partners_P), loss.label_smoothing)
    rejected_losses_P = _smoothed_logistic(loss.beta * (chosen_partners_P - pairs.rejected_P), loss.label_smoothing)
    return chosen_losses_P + (rejected_losses_P - rejected_losses_P.detach())


def apo_zero_losses(pairs: ComparedPairs) -> torch.Tensor:
    """APO-zero, arXiv 2408.06266 eq. 7: chosen replies up, rejected ones down: `1 - sigmoid(w) + sigmoid(l)`."""
    return torch.sigmoid(-pairs.chosen_rewards_P) + torch.sigmoid(pairs.rejected_rewards_P)


def apo_down_losses(pairs: ComparedPairs) -> torch.Tensor:
    """APO-down, arXiv 2408.06266 eq. 8: both down, the rejected reply more: `sigmoid(w) + 1 - sigmoid(w - l)`."""
    return torch.sigmoid(pairs.chosen_rewards_P) + torch.sigmoid(-pairs.logits_P)


def discopop_losses(pairs: ComparedPairs) -> torch.Tensor:
    """DiscoPOP, arXiv 2406.08414 eq. 5: `-(1 - s) * log sigmoid(z) + s * exp(-z)`, z = beta * m, s = sigmoid(z / tau).

    The product s * exp(-z) is computed as the exponential of a sum, which is never far above 0, so it cannot overflow.
    """
    logits_P = pairs.logits_P
    modulated_P = logits_P / pairs.loss.discopop_tau
    return torch.exp(F.logsigmoid(modulated_P) - logits_P) - torch.sigmoid(-modulated_P) * F.logsigmoid(logits_P)


def sft_losses(pairs: ComparedPairs) -> torch.Tensor:
    """-log p of the chosen reply, a mean over its tokens: the second part of iterative RPO, arXiv 2404.19733 eq. 1."""
    return -per_token(pairs.inputs.policy_logps_2P[0], pairs.inputs.lengths_2P[0])


def cpo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """CPO, arXiv 2401.08417 eq. 5: DPO's loss without a reference, and `cpo_alpha` times the chosen reply's -log p.

    The latter is a mean over tokens, as in the authors' program.
    """
    return logistic_losses(pairs) + pairs.loss.cpo_alpha * sft_losses(pairs)


def orpo_losses(pairs: ComparedPairs) -> torch.Tensor:
    """ORPO, arXiv 2403.07691 eq. 6: the chosen reply's mean -log p, and `-beta * log sigmoid(log odds ratio)`.

    The odds of a reply are p / (1 - p), log p its mean log-prob.
    """
    log_odds_ratios_P = _log_odds(pairs.chosen_P) - _log_odds(pairs.rejected_P)
    return sft_losses(pairs) - pairs.loss.beta * F.logsigmoid(log_odds_ratios_P)


def _log_odds(logps_P: torch.Tensor) -> torch.Tensor:
    # Rounding makes a certain reply's log-prob 0, where the odds are infinite.
    certain_P = logps_P.clamp(max=-1e-7)
    return certain_P - torch.log(-torch.expm1(certain_P))


def _smoothed_logistic(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    losses_P = -F.logsigmoid(logits_P)
    if label_smoothing == 0.0:
        return losses_P
    return (1.0 - label_smoothing) * losses_P - label_smoothing * F.logsigmoid(-logits_P)


# The functions of `PREFERENCE_LOSSES`.
PREFERENCE_FUNCTIONS: dict[str, LossFunction] = {
    "dpo": logistic_losses,
    "dpo_norm": logistic_losses,
    "simpo": simpo_losses,
    "wpo": wpo_losses,
    "ipo": ipo_losses,
    "hinge": hinge_losses,
    "robust": robust_losses,
    "exo_pair": exo_losses,
    "nca_pair": nca_losses,
    "bco_pair": bco_losses,
    "sppo_hard": sppo_losses,
    "aot": aot_losses,
    "aot_unpaired": aot_unpaired_losses,
    "apo_zero": apo_zero_losses,
    "apo_down": apo_down_losses,
    "discopop": discopop_losses,
    "sft": sft_losses,
    "cpo": cpo_losses,
    "orpo": orpo_losses,
}


def preference_loss(loss: PreferenceLossSection, inputs: PreferenceLossInputs) -> PreferenceLossOutputs:
    """Losses, rewards and log-probs of P pairs (P may be 0) under the loss that the flags name, or the sum of several.

    A loss that needs a reference must be given one; a loss that needs none ignores it.
    """
    parts = {name: PREFERENCE_FUNCTIONS[name](compared(name, inputs, loss)) for name in loss.names}
    leading = compared(loss.leading, inputs, loss)
    logps_2P = inputs.policy_logps_2P
    if PREFERENCE_LOSSES[loss.leading].per_token:
        logps_2P = per_token(logps_2P, inputs.lengths_2P)
    rounding_P = ROUNDING * logps_2P.abs().sum(dim=0)
    weights = loss.loss_weights or [1.0] * len(parts)
    weighted = [weight * part_P for part_P, weight in zip(parts.values(), weights, strict=True)]
    return PreferenceLossOutputs(
        losses_P=sum(weighted[1:], start=weighted[0]),
        rewards_2P=torch.stack([leading.chosen_rewards_P, leading.rejected_rewards_P]).detach(),
        logps_2P=logps_2P.detach(),
        is_right_P=(leading.chosen_P - leading.rejected_P > rounding_P).float(),
        parts={name: part_P.detach() for name, part_P in parts.items()},
    )


def compared(name: str, inputs: PreferenceLossInputs, loss: PreferenceLossSection) -> ComparedPairs:
    """The values of the chosen and of the rejected replies that the loss of that name compares."""
    known = PREFERENCE_LOSSES[name]
    compared_2P = inputs.policy_logps_2P
    if known.needs_reference:
        assert inputs.reference_logps_2P is not None, f"{name} needs the reference log-probs"
        # Policy and reference are close, so subtracting them before chosen and rejected keeps the most digits.
        compared_2P = compared_2P - inputs.reference_logps_2P
    if known.per_token:
        compared_2P = per_token(compared_2P, inputs.lengths_2P)
    chosen_P, rejected_P = _divergence_terms(compared_2P, loss)
    return ComparedPairs(chosen_P=chosen_P, rejected_P=rejected_P, inputs=inputs, loss=loss)


def _divergence_terms(log_ratios_P: torch.Tensor, loss: PreferenceLossSection) -> torch.Tensor:
    """f'(u) of f-DPO, arXiv 2309.16240 table 1, given log u, shifted by a constant to be 0 at u = 1.

    Reverse KL: log u. Forward KL: 1 - 1 / u. Jensen-Shannon: log(2 u / (1 + u)). The alpha divergence, with the alpha
    of --f_alpha_divergence_coef, 1 - alpha in the paper: (u^(alpha - 1) - 1) / (alpha - 1).
    """
    kind, log_u_P = loss.f_divergence_type, log_ratios_P.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "reverse_kl":
        return log_ratios_P
    if kind == "js_divergence":
        return F.logsigmoid(log_ratios_P) + math.log(2.0)
    exponent = -1.0 if kind == "forward_kl" else loss.f_alpha_divergence_coef - 1.0
    return torch.expm1(exponent * log_u_P) / exponent


def to_match(inputs: PreferenceLossInputs) -> torch.Tensor:
    """The input of `matched_pairs`, shape (3, P), float64: both log-ratios, and the reference's margins."""
    assert inputs.reference_logps_2P is not None
    reference_chosen_P, reference_rejected_P = inputs.reference_logps_2P
    log_ratios_2P = inputs.policy_logps_2P - inputs.reference_logps_2P
    return torch.stack([*log_ratios_2P, reference_chosen_P - reference_rejected_P]).detach().double()


def matched_pairs(to_match_3P: torch.Tensor) -> torch.Tensor:
    """Values for losses over the global batch, which match pairs by the ranks of their values; shape (3, P).

    Row 0 is for aot, which compares a pair's margin under the policy with the reference's margin of the same rank: the
    pair's own reference margin minus the matched one, so that large margins cancel exactly. Rows 1 and 2 are for
    aot_unpaired: the rejected log-ratio with the rank of the pair's chosen one, and the chosen log-ratio with the rank
    of the pair's rejected one. Among equal values the first ranks lower.
    """
    chosen_P, rejected_P, reference_margins_P = to_match_3P
    margins_P = chosen_P - rejected_P + reference_margins_P
    shifts_P = reference_margins_P - _rank_partners(reference_margins_P, margins_P)
    return torch.stack([shifts_P, _rank_partners(rejected_P, chosen_P), _rank_partners(chosen_P, rejected_P)])


def _rank_partners(others_P: torch.Tensor, values_P: torch.Tensor) -> torch.Tensor:
    """For each of `values_P`, the one of `others_P` with the same rank."""
    return torch.empty_like(others_P).index_copy(0, values_P.argsort(stable=True), others_P.sort().values)

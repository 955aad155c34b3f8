"""Preference losses: log-probs of chosen and rejected replies in, one loss per pair out.

No loss here divides by a number of pairs. The caller adds up `losses_P` over microbatches and
ranks and divides by the global number of pairs, so the result does not depend on the split.

Legend: P pairs. All log-probs are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from open_instruct.errors import InputError
from open_instruct.losses.logprobs import per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossInputs:
    """What any preference loss is computed from. Log-probs are sums over the reply's tokens.

    Example: one pair, replies of 2 and 4 tokens, before the first step::

        PreferenceLossInputs(
            policy_chosen_logps_P=torch.tensor([-3.0]),
            policy_rejected_logps_P=torch.tensor([-8.0]),
            chosen_lengths_P=torch.tensor([2]),
            rejected_lengths_P=torch.tensor([4]),
            reference_chosen_logps_P=torch.tensor([-3.0]),
            reference_rejected_logps_P=torch.tensor([-8.0]),
        )
    """

    policy_chosen_logps_P: torch.Tensor
    policy_rejected_logps_P: torch.Tensor
    chosen_lengths_P: torch.Tensor
    rejected_lengths_P: torch.Tensor
    reference_chosen_logps_P: torch.Tensor | None = None
    reference_rejected_logps_P: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # Shapes (B,) and (B, T) broadcast silently into a wrong loss, so every one must be the same (P,).
        num_pairs = self.policy_chosen_logps_P.shape[:1]
        assert (self.reference_chosen_logps_P is None) == (self.reference_rejected_logps_P is None)
        for name in self.__slots__:
            tensor = getattr(self, name)
            assert tensor is None or tensor.shape == num_pairs, f"{name}: {tuple(tensor.shape)}, not {num_pairs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossOutputs:
    """Per-pair results. Only `losses_P` carries a gradient.

    Rewards are beta * (policy - reference) of the log-probs as the loss sees them (simpo: beta * policy):
    sums, or means over the reply's tokens for a length-normalised loss. `*_logps_P` are those of the policy.
    """

    losses_P: torch.Tensor
    chosen_rewards_P: torch.Tensor
    rejected_rewards_P: torch.Tensor
    chosen_logps_P: torch.Tensor
    rejected_logps_P: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossOptions:
    """The knobs of all losses; a loss reads those its equation has."""

    beta: float
    label_smoothing: float = 0.0
    gamma_beta_ratio: float = 0.0


LossFunction = Callable[[torch.Tensor, PreferenceLossInputs, PreferenceLossOptions], torch.Tensor]


def logistic_losses(
    margins_P: torch.Tensor, inputs: PreferenceLossInputs, options: PreferenceLossOptions
) -> torch.Tensor:
    """DPO, arXiv 2305.18290 eq. 7: `-log sigmoid(beta * m)`, m the margin of log-ratios.

    On log-ratios averaged over the reply's tokens it is length-normalised DPO, Tülu 3, arXiv 2411.15124
    section 5.1.2 eq. 6. With label smoothing e, conservative DPO (Mitchell 2023, "A note on DPO with noisy
    preferences"): `-(1 - e) * log sigmoid(beta * m) - e * log sigmoid(-beta * m)`.
    """
    return _smoothed_logistic(options.beta * margins_P, options.label_smoothing)


def simpo_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, options: PreferenceLossOptions) -> torch.Tensor:
    """SimPO, arXiv 2405.14734 eq. 6: `-log sigmoid(beta * m - gamma)`, m the margin of mean log-probs.

    `gamma = gamma_beta_ratio * beta`. Smoothed as DPO is.
    """
    return _smoothed_logistic(options.beta * (margins_P - options.gamma_beta_ratio), options.label_smoothing)


def wpo_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, options: PreferenceLossOptions) -> torch.Tensor:
    """WPO, arXiv 2406.11827 section 3: the DPO loss times `w(chosen) * w(rejected)`.

    `w(y) = exp(mean log-prob of y's tokens)` under the current policy, without gradient, the product
    clamped at 1. The paper's further "weight alignment" needs whole distributions and is left out.
    """
    with torch.no_grad():
        chosen_means_P = per_token(inputs.policy_chosen_logps_P, inputs.chosen_lengths_P)
        rejected_means_P = per_token(inputs.policy_rejected_logps_P, inputs.rejected_lengths_P)
        weights_P = torch.exp(chosen_means_P + rejected_means_P).clamp(max=1.0)
    return weights_P * logistic_losses(margins_P, inputs, options)


def ipo_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, options: PreferenceLossOptions) -> torch.Tensor:
    """IPO, arXiv 2310.12036 eq. 17: `(m - 1 / (2 * beta)) ** 2`; beta is the paper's tau.

    m is the margin of log-ratios averaged over tokens. The paper writes whole-sequence log-probs; its
    authors later advised averages (and TRL uses them), as one target then suits replies of any length.
    """
    return (margins_P - 1.0 / (2.0 * options.beta)).square()


def hinge_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, options: PreferenceLossOptions) -> torch.Tensor:
    """Hinge, `max(0, 1 - beta * m)`: SLiC-HF (arXiv 2305.10425) on DPO's margin, as in RSO (arXiv 2309.06657)."""
    return F.relu(1.0 - options.beta * margins_P)


def _smoothed_logistic(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    losses_P = -F.logsigmoid(logits_P)
    if label_smoothing == 0.0:
        return losses_P
    return (1.0 - label_smoothing) * losses_P - label_smoothing * F.logsigmoid(-logits_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """One entry of `LOSSES`: the function, and what the rest of the program must know of it."""

    name: str
    function: LossFunction
    needs_reference: bool
    length_normalised: bool
    has_label_smoothing: bool
    paper: str


LOSSES: dict[str, PreferenceLoss] = {
    loss.name: loss
    for loss in (
        PreferenceLoss(
            name="dpo",
            function=logistic_losses,
            needs_reference=True,
            length_normalised=False,
            has_label_smoothing=True,
            paper="arXiv 2305.18290",
        ),
        PreferenceLoss(
            name="dpo_norm",
            function=logistic_losses,
            needs_reference=True,
            length_normalised=True,
            has_label_smoothing=True,
            paper="arXiv 2411.15124",
        ),
        PreferenceLoss(
            name="simpo",
            function=simpo_losses,
            needs_reference=False,
            length_normalised=True,
            has_label_smoothing=True,
            paper="arXiv 2405.14734",
        ),
        PreferenceLoss(
            name="wpo",
            function=wpo_losses,
            needs_reference=True,
            length_normalised=False,
            has_label_smoothing=True,
            paper="arXiv 2406.11827",
        ),
        PreferenceLoss(
            name="ipo",
            function=ipo_losses,
            needs_reference=True,
            length_normalised=True,
            has_label_smoothing=False,
            paper="arXiv 2310.12036",
        ),
        PreferenceLoss(
            name="hinge",
            function=hinge_losses,
            needs_reference=True,
            length_normalised=False,
            has_label_smoothing=False,
            paper="arXiv 2305.10425, 2309.06657",
        ),
    )
}


def check_loss_flags(name: str, *, beta: float, label_smoothing: float, gamma_beta_ratio: float) -> PreferenceLoss:
    """The loss of that name, once its flags make sense. Raises `InputError` naming the flag otherwise."""
    if name not in LOSSES:
        raise InputError(f"--loss_type {name}: there is no such loss; choose one of {', '.join(LOSSES)}.")
    if not (math.isfinite(beta) and beta > 0.0):
        raise InputError(f"--beta {beta}: must be a number above 0, for example 0.1.")
    if not 0.0 <= label_smoothing < 0.5:
        raise InputError(
            f"--label_smoothing {label_smoothing}: must be at least 0 and below 0.5 "
            "(at 0.5 the labels say nothing; above it they are taken for their opposite)."
        )
    if not (math.isfinite(gamma_beta_ratio) and gamma_beta_ratio >= 0.0):
        raise InputError(f"--gamma_beta_ratio {gamma_beta_ratio}: must be a number of at least 0, for example 0.3.")
    loss = LOSSES[name]
    if label_smoothing > 0.0 and not loss.has_label_smoothing:
        smoothable = ", ".join(other.name for other in LOSSES.values() if other.has_label_smoothing)
        raise InputError(
            f"--label_smoothing {label_smoothing}: {name} has no label smoothing; leave it at 0 "
            f"or choose --loss_type from {smoothable}."
        )
    return loss


def preference_loss(
    name: str,
    inputs: PreferenceLossInputs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma_beta_ratio: float = 0.0,
) -> PreferenceLossOutputs:
    """Losses, rewards and log-probs of P pairs (P may be 0) under the loss called `name`.

    Raises `InputError` for flags that cannot work (see `check_loss_flags`). A loss that needs a reference
    must be given one; a loss that needs none ignores it.
    """
    loss = check_loss_flags(name, beta=beta, label_smoothing=label_smoothing, gamma_beta_ratio=gamma_beta_ratio)
    options = PreferenceLossOptions(beta=beta, label_smoothing=label_smoothing, gamma_beta_ratio=gamma_beta_ratio)

    chosen_logps_P, chosen_log_ratios_P = _entering(
        loss, inputs.policy_chosen_logps_P, inputs.reference_chosen_logps_P, inputs.chosen_lengths_P
    )
    rejected_logps_P, rejected_log_ratios_P = _entering(
        loss, inputs.policy_rejected_logps_P, inputs.reference_rejected_logps_P, inputs.rejected_lengths_P
    )
    return PreferenceLossOutputs(
        losses_P=loss.function(chosen_log_ratios_P - rejected_log_ratios_P, inputs, options),
        chosen_rewards_P=beta * chosen_log_ratios_P.detach(),
        rejected_rewards_P=beta * rejected_log_ratios_P.detach(),
        chosen_logps_P=chosen_logps_P.detach(),
        rejected_logps_P=rejected_logps_P.detach(),
    )


def _entering(
    loss: PreferenceLoss, policy_P: torch.Tensor, reference_P: torch.Tensor | None, lengths_P: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's log-probs as the loss sees them, and their log-ratios to the reference (if it has one)."""
    log_ratios_P = policy_P
    if loss.needs_reference:
        assert reference_P is not None, f"{loss.name} needs the reference log-probs"
        # Policy and reference are close: subtracting them first, before chosen and rejected, loses no digits.
        log_ratios_P = policy_P - reference_P
    if loss.length_normalised:
        return per_token(policy_P, lengths_P), per_token(log_ratios_P, lengths_P)
    return policy_P, log_ratios_P

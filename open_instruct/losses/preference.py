"""Preference losses: log-probs of chosen and rejected replies in, one loss per pair out.

No loss here divides by a number of pairs. The caller adds up `losses_P` over microbatches and
ranks and divides by the global number of pairs, so the result does not depend on the split.

Legend: P pairs. All log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from open_instruct.config.losses import PREFERENCE_LOSSES
from open_instruct.config.sections import PreferenceLossSection
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


LossFunction = Callable[[torch.Tensor, PreferenceLossInputs, PreferenceLossSection], torch.Tensor]


def logistic_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, loss: PreferenceLossSection) -> torch.Tensor:
    """DPO, arXiv 2305.18290 eq. 7: `-log sigmoid(beta * m)`, m the margin of log-ratios.

    On log-ratios averaged over the reply's tokens it is length-normalised DPO, Tülu 3, arXiv 2411.15124
    section 5.1.2 eq. 6. With label smoothing e, conservative DPO (Mitchell 2023, "A note on DPO with noisy
    preferences"): `-(1 - e) * log sigmoid(beta * m) - e * log sigmoid(-beta * m)`.
    """
    return _smoothed_logistic(loss.beta * margins_P, loss.label_smoothing)


def simpo_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, loss: PreferenceLossSection) -> torch.Tensor:
    """SimPO, arXiv 2405.14734 eq. 6: `-log sigmoid(beta * m - gamma)`, m the margin of mean log-probs.

    `gamma = gamma_beta_ratio * beta`. Smoothed as DPO is.
    """
    return _smoothed_logistic(loss.beta * (margins_P - loss.gamma_beta_ratio), loss.label_smoothing)


def wpo_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, loss: PreferenceLossSection) -> torch.Tensor:
    """WPO, arXiv 2406.11827 section 3: the DPO loss times `w(chosen) * w(rejected)`.

    `w(y) = exp(mean log-prob of y's tokens)` under the current policy, without gradient, the product
    clamped at 1. The paper's further "weight alignment" needs whole distributions and is left out.
    """
    with torch.no_grad():
        chosen_means_P = per_token(inputs.policy_chosen_logps_P, inputs.chosen_lengths_P)
        rejected_means_P = per_token(inputs.policy_rejected_logps_P, inputs.rejected_lengths_P)
        weights_P = torch.exp(chosen_means_P + rejected_means_P).clamp(max=1.0)
    return weights_P * logistic_losses(margins_P, inputs, loss)


def ipo_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, loss: PreferenceLossSection) -> torch.Tensor:
    """IPO, arXiv 2310.12036 eq. 17: `(m - 1 / (2 * beta)) ** 2`; beta is the paper's tau.

    m is the margin of log-ratios averaged over tokens. The paper writes whole-sequence log-probs; its
    authors later advised averages (and TRL uses them), as one target then suits replies of any length.
    """
    return (margins_P - 1.0 / (2.0 * loss.beta)).square()


def hinge_losses(margins_P: torch.Tensor, inputs: PreferenceLossInputs, loss: PreferenceLossSection) -> torch.Tensor:
    """Hinge, `max(0, 1 - beta * m)`: SLiC-HF (arXiv 2305.10425) on DPO's margin, as in RSO (arXiv 2309.06657)."""
    return F.relu(1.0 - loss.beta * margins_P)


def _smoothed_logistic(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    losses_P = -F.logsigmoid(logits_P)
    if label_smoothing == 0.0:
        return losses_P
    return (1.0 - label_smoothing) * losses_P - label_smoothing * F.logsigmoid(-logits_P)


# Of `PREFERENCE_LOSSES`.
PREFERENCE_FUNCTIONS: dict[str, LossFunction] = {
    "dpo": logistic_losses,
    "dpo_norm": logistic_losses,
    "simpo": simpo_losses,
    "wpo": wpo_losses,
    "ipo": ipo_losses,
    "hinge": hinge_losses,
}


def preference_loss(loss: PreferenceLossSection, inputs: PreferenceLossInputs) -> PreferenceLossOutputs:
    """Losses, rewards and log-probs of P pairs (P may be 0) under the loss that the flags name.

    A loss that needs a reference must be given one; a loss that needs none ignores it.
    """
    chosen_logps_P, chosen_log_ratios_P = _entering(
        loss.loss_type, inputs.policy_chosen_logps_P, inputs.reference_chosen_logps_P, inputs.chosen_lengths_P
    )
    rejected_logps_P, rejected_log_ratios_P = _entering(
        loss.loss_type, inputs.policy_rejected_logps_P, inputs.reference_rejected_logps_P, inputs.rejected_lengths_P
    )
    return PreferenceLossOutputs(
        losses_P=PREFERENCE_FUNCTIONS[loss.loss_type](chosen_log_ratios_P - rejected_log_ratios_P, inputs, loss),
        chosen_rewards_P=loss.beta * chosen_log_ratios_P.detach(),
        rejected_rewards_P=loss.beta * rejected_log_ratios_P.detach(),
        chosen_logps_P=chosen_logps_P.detach(),
        rejected_logps_P=rejected_logps_P.detach(),
    )


def _entering(
    name: str, policy_P: torch.Tensor, reference_P: torch.Tensor | None, lengths_P: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's log-probs as the loss sees them, and their log-ratios to the reference (if it has one)."""
    log_ratios_P = policy_P
    if PREFERENCE_LOSSES[name].needs_reference:
        assert reference_P is not None, f"{name} needs the reference log-probs"
        # Policy and reference are close: subtracting them first, before chosen and rejected, loses no digits.
        log_ratios_P = policy_P - reference_P
    if PREFERENCE_LOSSES[name].per_token:
        return per_token(policy_P, lengths_P), per_token(log_ratios_P, lengths_P)
    return policy_P, log_ratios_P

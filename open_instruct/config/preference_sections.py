"""Flags of the preference losses, and which of the losses read each."""

from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.sections import flag, resumable_flag
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.losses.preference_loss import F_DIVERGENCES


def loss_types_reading(flag: str) -> str:
    """What a flag is read with that only some preference losses read."""
    return (
        "loss_type "
        f"{' '.join(name for name, loss in PREFERENCE_LOSSES.items() if flag in loss.reads)}"
    )


@dataclass(kw_only=True)
class PreferenceLossSection:
    """The preference loss, and the numbers that it takes."""

    title: ClassVar[str] = "Loss"

    loss_type: str | list[str] = flag(
        "the preference loss, or several to add up", "dpo_norm", choices=PREFERENCE_LOSSES
    )
    loss_weights: list[float] = flag("one for each of several --loss_type; default: 1 each", [])
    beta: float = flag(
        "strength of the pull towards the reference policy (scale of the reward); default: the "
        "loss's own, "
        + "".join(
            f"{loss.beta} for {name}, "
            for name, loss in PREFERENCE_LOSSES.items()
            if loss.beta != 0.1
        )
        + "0.1 for the others",
        None,
        above=0,
    )
    label_smoothing: float = flag(
        "probability that a label is flipped",
        0.0,
        requires=loss_types_reading,
        minimum=0,
        below=0.5,
        note=" (at 0.5 the label says nothing)",
    )
    gamma_beta_ratio: float = flag(
        "target margin divided by beta", 0.3, requires=loss_types_reading, minimum=0
    )
    cpo_alpha: float = flag(
        "weight of the chosen reply's mean -log p", 1.0, requires=loss_types_reading, minimum=0
    )
    discopop_tau: float = flag(
        "temperature of the sigmoid that mixes the logistic and the exponential loss",
        0.05,
        requires=loss_types_reading,
        above=0,
        maximum=1,
    )
    weight_alignment: bool = flag(
        "divide each token's probability by its expected value under the policy (WPO)",
        False,
        requires=loss_types_reading,
    )
    ld_alpha: float | None = flag(
        "weight of a reply's tokens beyond the length of the shorter reply (LD-DPO)",
        None,
        minimum=0,
        maximum=1,
    )
    f_divergence_type: str = flag(
        "divergence from the reference that is penalised", "reverse_kl", choices=F_DIVERGENCES
    )
    f_alpha_divergence_coef: float = flag(
        "alpha of the divergence",
        0.5,
        requires="f_divergence_type alpha_divergence",
        above=0,
        below=1,
    )
    alpha: float = flag(
        "share of the policy in the updated reference",
        0.6,
        requires="ref_policy_update_freq",
        above=0,
        maximum=1,
    )
    ref_policy_update_freq: int | None = flag(
        "steps between updates of the reference policy; default: it stays frozen", None, minimum=1
    )
    cache_logprobs_only: bool = resumable_flag(
        "compute and store the reference log-probs, then stop", False
    )

    def __post_init__(self) -> None:
        # Filled in here, so that config.yaml and the comparison on resuming have the number.
        if self.beta is None:
            self.beta = PREFERENCE_LOSSES[self.leading].beta

    @property
    def names(self) -> list[str]:
        return [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type

    @property
    def leading(self) -> str:
        """The loss that sets beta and rewards: the first that has a reference, else the first."""
        return next(
            (name for name in self.names if PREFERENCE_LOSSES[name].needs_reference), self.names[0]
        )

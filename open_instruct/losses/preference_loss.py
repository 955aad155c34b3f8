"""What a preference loss is: its inputs, what it compares, and the table that losses register in.

The losses themselves are in preference.py.

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
        return function(self.compare(inputs, section))

    def compare(self, inputs: PreferenceLossInputs, section: Any) -> ComparedPairs:
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
            chosen_P=chosen_P,
            rejected_P=rejected_P,
            inputs=inputs,
            beta=section.beta,
        )


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {}
# Makes the decorated function the loss `--loss_type name`; `facts` are fields of `PreferenceLoss`.
register = make_register(PREFERENCE_LOSSES, PreferenceLoss)


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
        return log_sigmoid(log_ratios) + math.log(2.0)
    exponent = -1.0 if f_divergence_type == "forward_kl" else f_alpha_divergence_coef - 1.0
    return (exponent * log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expm1() / exponent


def log_sigmoid(values: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)

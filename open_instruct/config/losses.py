"""The losses that flags can name: what is known of each without torch. Flags, their help, checks and docs read it here.

The functions are in losses/, under the same names; what they compute is in docs/losses.md, whose tables a test holds
against these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss of --loss_type.

    Attributes:
        papers: their numbers on arXiv.
        beta: the --beta it takes by default. A loss of means over tokens wants a larger one than a loss of sums.
        per_token: whether log-probs are averaged over the reply, or added up.
        needs_reference: whether log-probs are compared with those of the start model.
        has_smoothing: whether it reads --label_smoothing.
        has_margin: whether it reads --gamma_beta_ratio.
        first_loss: of a beta, the loss of a policy that equals its reference; None where that depends on the policy.
    """

    papers: tuple[str, ...]
    beta: float
    per_token: bool = False
    needs_reference: bool = True
    has_smoothing: bool = True
    has_margin: bool = False
    first_loss: Callable[[float], float] | None = None


PREFERENCE_LOSSES = {
    "dpo": PreferenceLoss(papers=("2305.18290",), beta=0.1, first_loss=lambda beta: math.log(2.0)),
    "dpo_norm": PreferenceLoss(papers=("2411.15124",), beta=5.0, per_token=True, first_loss=lambda beta: math.log(2.0)),
    "simpo": PreferenceLoss(papers=("2405.14734",), beta=2.0, per_token=True, needs_reference=False, has_margin=True),
    "wpo": PreferenceLoss(papers=("2406.11827",), beta=0.1),
    "ipo": PreferenceLoss(
        papers=("2310.12036",),
        beta=1.0,
        per_token=True,
        has_smoothing=False,
        first_loss=lambda beta: 1.0 / (4.0 * beta**2),
    ),
    "hinge": PreferenceLoss(
        papers=("2305.10425", "2309.06657"), beta=0.1, has_smoothing=False, first_loss=lambda beta: 1.0
    ),
}
SMOOTHED = [name for name, loss in PREFERENCE_LOSSES.items() if loss.has_smoothing]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss of --loss_fn: its paper's number on arXiv, and what the sum over all tokens is divided by.

    That is the tokens, or (--loss_denominator) a constant length for each completion; the completions, where each is
    averaged first; or --response_length for each completion.
    """

    paper: str
    denominator: Literal["tokens", "completions", "response_length"]


POLICY_LOSSES = {
    "dapo": PolicyLoss(paper="2503.14476", denominator="tokens"),
    "cispo": PolicyLoss(paper="2506.13585", denominator="tokens"),
    "grpo": PolicyLoss(paper="2402.03300", denominator="completions"),
    "dr_grpo": PolicyLoss(paper="2503.20783", denominator="response_length"),
    "gspo": PolicyLoss(paper="2507.18071", denominator="completions"),
}
OVER_TOKENS = [name for name, loss in POLICY_LOSSES.items() if loss.denominator == "tokens"]

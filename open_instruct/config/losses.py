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
    """A loss of --loss_fn.

    Attributes:
        paper: its number on arXiv.
        denominator: what the sum over all tokens is divided by: the tokens, or (--loss_denominator) a constant length
            for each completion; the completions; or --response_length for each completion.
        averaged: whether each completion is averaged over its tokens first.
        reads: the flags that not every loss reads.
        marks: whether it singles out tokens of the whole update by their covariance.
    """

    paper: str
    denominator: Literal["tokens", "completions", "response_length"] = "tokens"
    averaged: bool = False
    reads: tuple[str, ...] = ()
    marks: bool = False


POLICY_LOSSES = {
    "dapo": PolicyLoss(paper="2503.14476", reads=("delta",)),
    "cispo": PolicyLoss(paper="2506.13585", reads=("cispo_clamp_below",)),
    "grpo": PolicyLoss(paper="2402.03300", denominator="completions", averaged=True, reads=("delta",)),
    "dr_grpo": PolicyLoss(paper="2503.20783", denominator="response_length", reads=("delta",)),
    "gspo": PolicyLoss(paper="2507.18071", denominator="completions", averaged=True, reads=("delta",)),
    "bnpo": PolicyLoss(paper="2503.14476", reads=("delta",)),
    "sapo": PolicyLoss(
        paper="2511.20347",
        denominator="completions",
        averaged=True,
        reads=("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "gmpo": PolicyLoss(paper="2507.20673", denominator="completions", averaged=True),
    "luspo": PolicyLoss(paper="2602.05261", denominator="completions", reads=("delta",)),
    "vespo": PolicyLoss(paper="2602.10693"),
    "dppo_tv": PolicyLoss(paper="2602.04879"),
    "dppo_kl": PolicyLoss(paper="2602.04879"),
    "clip_cov": PolicyLoss(
        paper="2505.22617", marks=True, reads=("delta", "cov_fraction", "clip_cov_lower", "clip_cov_upper")
    ),
    "kl_cov": PolicyLoss(paper="2505.22617", marks=True, reads=("cov_fraction", "kl_cov_coef")),
    "gpg": PolicyLoss(paper="2504.02546"),
}
OVER_TOKENS = [name for name, loss in POLICY_LOSSES.items() if loss.denominator == "tokens"]
# A function of the user's own gives a loss a token, and may read any flag of the section.
OWN_POLICY_LOSS = PolicyLoss(paper="", reads=tuple({flag: 0 for loss in POLICY_LOSSES.values() for flag in loss.reads}))


def policy_loss_facts(name: str) -> PolicyLoss:
    """Of a loss of the table, or of one of the user's own."""
    return POLICY_LOSSES.get(name, OWN_POLICY_LOSS)


# Ways to make advantages, with their papers' numbers on arXiv. The functions are in losses/advantages.py.
ADVANTAGES = {
    "standard": "2402.03300",
    "centered": "2503.20783",
    "batch": "2508.08221",
    "rloo": "2402.14740",
    "maxrl": "2602.02710",
    "reinforce_pp": "2501.03262",
    "gdpo": "2601.05242",
    "pass_at_k": "2508.10751",
}

"""The losses that flags can name, described without torch; flags, help texts, checks and docs read these tables.

The functions are in losses/, under the same names; what they compute is in docs/losses.md, whose tables a test holds
against these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

LOG_2 = math.log(2.0)
SMOOTHING, SHORTER, DIVERGENCE = "label_smoothing", "ld_alpha", "f_divergence_type"
# Those of --f_divergence_type; the first is DPO's.
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss of --loss_type.

    Attributes:
        papers: their numbers on arXiv.
        beta: the --beta it takes by default. A loss of means over tokens wants a larger one than a loss of sums.
        reads: those of --label_smoothing, --ld_alpha and --f_divergence_type that apply to it.
        per_token: whether log-probs are averaged over the reply, or added up.
        needs_reference: whether log-probs are compared with those of the start model.
        needs_global_batch: whether a pair's loss depends on the other pairs of the global batch.
        first_loss: of a beta and a label smoothing, the loss of a policy that equals its reference; None where that
            depends on the policy.
    """

    papers: tuple[str, ...]
    beta: float = 0.1
    reads: tuple[str, ...] = ()
    per_token: bool = False
    needs_reference: bool = True
    needs_global_batch: bool = False
    first_loss: Callable[[float, float], float] | None = None


_SUMMED = PreferenceLoss(papers=(), reads=(SHORTER,))
_MARGIN = replace(_SUMMED, reads=(SHORTER, DIVERGENCE))
_LOGISTIC = replace(_MARGIN, reads=(SMOOTHING, SHORTER, DIVERGENCE), first_loss=lambda *_: LOG_2)
_FREE = PreferenceLoss(papers=(), needs_reference=False)

PREFERENCE_LOSSES = {
    "dpo": replace(_LOGISTIC, papers=("2305.18290",)),
    "dpo_norm": replace(_LOGISTIC, papers=("2411.15124",), beta=5.0, per_token=True, reads=(SMOOTHING, DIVERGENCE)),
    "simpo": replace(_FREE, papers=("2405.14734",), beta=2.0, per_token=True, reads=(SMOOTHING,)),
    "wpo": PreferenceLoss(papers=("2406.11827",), reads=(SMOOTHING, DIVERGENCE)),
    "ipo": PreferenceLoss(
        papers=("2310.12036",), beta=1.0, per_token=True, reads=(DIVERGENCE,), first_loss=lambda beta, _: 0.25 / beta**2
    ),
    "hinge": replace(_MARGIN, papers=("2305.10425", "2309.06657"), first_loss=lambda *_: 1.0),
    "robust": replace(_LOGISTIC, papers=("2403.00409",)),
    "exo_pair": replace(_LOGISTIC, papers=("2402.00856",), first_loss=lambda _, e: -LOG_2 - math.log(e - e * e) / 2),
    "nca_pair": replace(_SUMMED, papers=("2402.05369",), first_loss=lambda *_: 2 * LOG_2),
    "bco_pair": replace(_SUMMED, papers=("2404.04656",), first_loss=lambda *_: 2 * LOG_2),
    "sppo_hard": replace(_SUMMED, papers=("2405.00675",), first_loss=lambda beta, _: 1 / (2 * beta**2)),
    "aot": replace(_LOGISTIC, papers=("2406.05882",), reads=(SMOOTHING, SHORTER), needs_global_batch=True),
    "aot_unpaired": replace(_LOGISTIC, papers=("2406.05882",), reads=(SMOOTHING, SHORTER), needs_global_batch=True),
    "apo_zero": replace(_SUMMED, papers=("2408.06266",), first_loss=lambda *_: 1.0),
    "apo_down": replace(_SUMMED, papers=("2408.06266",), first_loss=lambda *_: 1.0),
    "discopop": replace(
        _MARGIN,
        papers=("2406.08414",),
        first_loss=lambda *_: 0.5 + LOG_2 / 2,
    ),
    "sft": replace(_FREE, papers=("2404.19733",), per_token=True),
    "cpo": replace(_FREE, papers=("2401.08417",), reads=(SMOOTHING,)),
    "orpo": replace(_FREE, papers=("2403.07691",), per_token=True),
}
SMOOTHED = [name for name, loss in PREFERENCE_LOSSES.items() if SMOOTHING in loss.reads]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss of --loss_fn.

    Attributes:
        paper: its number on arXiv.
        denominator: what the sum over all tokens is divided by: the tokens, or (--loss_denominator) a constant length
            for each completion; the completions; or --response_length for each completion.
        averaged: whether each completion is averaged over its tokens first.
        by_completion: whether a completion has one ratio, the geometric mean of its tokens'.
        marks: whether it singles out tokens of the whole update by their covariance.
    """

    paper: str
    denominator: Literal["tokens", "completions", "response_length"] = "tokens"
    averaged: bool = False
    by_completion: bool = False
    marks: bool = False


# Losses that average each completion over its tokens, and then the completions.
_AVERAGED = PolicyLoss(paper="2402.03300", denominator="completions", averaged=True)
POLICY_LOSSES = {
    "dapo": PolicyLoss(paper="2503.14476"),
    "cispo": PolicyLoss(paper="2506.13585"),
    "grpo": _AVERAGED,
    "dr_grpo": PolicyLoss(paper="2503.20783", denominator="response_length"),
    "gspo": replace(_AVERAGED, paper="2507.18071", by_completion=True),
    "bnpo": PolicyLoss(paper="2503.14476"),
    "sapo": replace(_AVERAGED, paper="2511.20347"),
    "gmpo": replace(_AVERAGED, paper="2507.20673", by_completion=True),
    "luspo": PolicyLoss(paper="2602.05261", denominator="completions", by_completion=True),
    "vespo": PolicyLoss(paper="2602.10693"),
    "dppo_tv": PolicyLoss(paper="2602.04879"),
    "dppo_kl": PolicyLoss(paper="2602.04879"),
    "clip_cov": PolicyLoss(paper="2505.22617", marks=True),
    "kl_cov": PolicyLoss(paper="2505.22617", marks=True),
    "gpg": PolicyLoss(paper="2504.02546"),
}
OVER_TOKENS = [name for name, loss in POLICY_LOSSES.items() if loss.denominator == "tokens"]


def policy_loss_facts(name: str) -> PolicyLoss:
    """Of a loss of the table, or of a function of the user's own, which returns one loss for each token."""
    return POLICY_LOSSES.get(name, PolicyLoss(paper=""))


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

"""The advantage of each completion of a step, from the rewards of its groups; plain numbers, no
tensors.

To add one, write a function here under `register`, with its formula and paper: `python
scripts/losses_page.py` puts it into the table of docs/losses.md. The flags it reads are
keyword-only arguments of the function, and named in `flags`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from open_instruct.core.errors import InputError
from open_instruct.core.records import RolloutGroup
from open_instruct.losses.registry import bind_flags, make_register

EPSILON = 1e-8
SAME_REWARD = 1e-9

Advantages = list[tuple[float, ...]]
AdvantageFunction = Callable[[Sequence[RolloutGroup]], Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageFormula:
    """A choice of --advantages:

    `function(groups, **flags)`, its formula for the page, and where it is from.
    """

    function: Callable[..., Advantages]
    formula: str
    paper: str
    flags: tuple[str, ...] = ()  # that the function is given


ADVANTAGES: dict[str, AdvantageFormula] = {}
# Makes the decorated function the choice `--advantages name`.
register = make_register(ADVANTAGES, AdvantageFormula)


def compute_advantages(
    groups: Sequence[RolloutGroup],
    name: str,
    section: object,
    *,
    function: AdvantageFunction | None = None,
) -> Advantages:
    """The advantage of each completion by the formula `name`, or by the user's `function`.

    A group with equal rewards has advantages of exactly 0, except under formulas that normalise
    over the whole step. `section` has the flags, as `RolloutSection`.

    Raises:
        InputError: `function` does not give a finite number for every completion.
    """
    if function is None:
        formula = ADVANTAGES[name]
        return bind_flags(formula.function, formula.flags, section)(groups)
    advantages = [tuple(map(float, values)) for values in function(groups)]
    if [len(values) for values in advantages] != [len(group.completions) for group in groups]:
        raise InputError(
            f"--advantages {name}: gives other numbers than one for every completion of every "
            "group",
            kind="own_code",
        )
    if not all(map(math.isfinite, chain.from_iterable(advantages))):
        raise InputError(f"--advantages {name}: gives a number that is not finite", kind="own_code")
    return advantages


def group_advantages(
    rewards: Sequence[float], normalization: Literal["standard", "centered"]
) -> tuple[float, ...]:
    """The advantages of one group; an empty group has none.

    Example: `group_advantages([1.0, 0.0, 0.0, 1.0], "centered") == (0.5, -0.5, -0.5, 0.5)`.
    """
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    mean, std = _mean_and_std(rewards)
    scale = std + EPSILON if normalization == "standard" else 1.0
    return tuple((reward - mean) / scale for reward in rewards)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ."""
    return bool(rewards) and max(rewards) - min(rewards) > SAME_REWARD


@register(
    "standard", "(reward − mean) / (std + 1e-8), std of the population", "2402.03300 section 4.1.2"
)
def standard(groups: Sequence[RolloutGroup]) -> Advantages:
    return [group_advantages(group.rewards, "standard") for group in groups]


@register("centered", "reward − mean", "2503.20783 section 3.2")
def centered(groups: Sequence[RolloutGroup]) -> Advantages:
    return [group_advantages(group.rewards, "centered") for group in groups]


@register("batch", "(reward − mean) / (std of all rewards of the step + 1e-8)", "2508.08221")
def batch(groups: Sequence[RolloutGroup]) -> Advantages:
    _, std = _mean_and_std(list(chain.from_iterable(group.rewards for group in groups)))
    return [tuple(value / (std + EPSILON) for value in values) for values in centered(groups)]


@register("rloo", "reward − mean of the others", "2402.14740")
def rloo(groups: Sequence[RolloutGroup]) -> Advantages:
    # r - mean of the others = (r - mean of all) * G / (G - 1).
    return [
        tuple(value * len(each) / max(len(each) - 1, 1) for value in each)
        for each in centered(groups)
    ]


@register("maxrl", "(reward − mean) / mean, 0 where the mean is not above 0", "2602.02710")
def maxrl(groups: Sequence[RolloutGroup]) -> Advantages:
    means = [_mean_and_std(group.rewards)[0] for group in groups]
    return [
        tuple(value / mean if mean > 0 else 0.0 for value in values)
        for values, mean in zip(centered(groups), means, strict=True)
    ]


@register(
    "reinforce_pp", "`centered`, then normalised over all completions of the step", "2501.03262"
)
def reinforce_pp(groups: Sequence[RolloutGroup]) -> Advantages:
    return _normalize_over_step(centered(groups))


@register(
    "gdpo",
    "`standard` for each verifier's scores, summed, then normalised over the step",
    "2601.05242",
)
def gdpo(groups: Sequence[RolloutGroup]) -> Advantages:
    sums = []
    for group in groups:
        weights: dict[str, float] = {}
        for check in group.prompt.checks:
            weights[check.verifier] = weights.get(check.verifier, 0.0) + check.weight
        names = dict.fromkeys(chain.from_iterable(verdict.scores for verdict in group.verdicts))
        parts = [[0.0] * len(group.verdicts)]
        for name in names:
            scores = [verdict.scores.get(name, 0.0) for verdict in group.verdicts]
            weight = weights.get(name, 1.0)
            parts.append([weight * value for value in group_advantages(scores, "standard")])
        sums.append(tuple(map(math.fsum, zip(*parts, strict=True))))
    return _normalize_over_step(sums)


@register(
    "gae", "the reward; the learner makes an advantage for each token of it", "1506.02438 eq. 16"
)
def gae(groups: Sequence[RolloutGroup]) -> Advantages:
    # losses/values.py, with what the critic says.
    return [group.rewards for group in groups]


@register(
    "pass_at_k",
    "(1 − R) / σ if right, (1 − R − q) / σ if wrong, σ² = R (1 − R)",
    "2508.10751 section 2.4",
    flags=("advantage_pass_k",),
)
def pass_at_k(groups: Sequence[RolloutGroup], *, advantage_pass_k: int) -> Advantages:
    k = advantage_pass_k
    advantages = []
    for group in groups:
        size = len(group.verdicts)
        num_wrong = size - sum(verdict.is_right for verdict in group.verdicts)
        mean = 1 - math.comb(num_wrong, k) / max(math.comb(size, k), 1)
        std = math.sqrt(mean * (1 - mean))
        if std == 0:
            advantages.append((0.0,) * size)
            continue
        # The chance that the other k - 1 members of a wrong completion's sample are all wrong.
        none_right = math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)
        good = (1 - mean) / std
        bad = (1 - mean - none_right) / std
        advantages.append(tuple(good if verdict.is_right else bad for verdict in group.verdicts))
    return advantages


def _normalize_over_step(advantages: Advantages) -> Advantages:
    """The advantages with mean 0 and deviation 1 over all completions; 0 if they are equal."""
    normalised = group_advantages(list(chain.from_iterable(advantages)), "standard")
    groups = []
    start = 0
    for group in advantages:
        groups.append(normalised[start : start + len(group)])
        start += len(group)
    return groups


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; 0 and 0 of no values."""
    mean = math.fsum(values) / max(len(values), 1)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1))

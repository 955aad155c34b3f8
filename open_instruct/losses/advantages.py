"""The advantage of each completion of a step, from the rewards of its groups; plain numbers, no tensors.

With r a reward in a group of G:

    standard      (r - mean) / (std + 1e-8), with the population's standard deviation
                                                                     DeepSeekMath, arXiv 2402.03300, section 4.1.2
    centered      r - mean: groups that are nearly all right or all wrong are not blown up
                                                                     Dr. GRPO, arXiv 2503.20783, section 3.2
    batch         (r - mean) / (std of all rewards of the step + 1e-8)
                                                                     Lite PPO, arXiv 2508.08221
    rloo          r - mean of the others                             RLOO, arXiv 2402.14740
    maxrl         (r - mean) / mean, 0 where the mean is not above 0: the rarer a right answer, the more it counts
                                                                     MaxRL, arXiv 2602.02710
    reinforce_pp  centered, then (a - mean) / (std + 1e-8) over all completions of the step
                                                                     REINFORCE++ with baseline, arXiv 2501.03262
    gdpo          standard for the scores of each verifier apart, added up with the weights of their checks, then
                  normalised over the step as above                  GDPO, arXiv 2601.05242
    pass_at_k     the analytic advantage where the reward is that of k completions, of which one must be right
                                                                     arXiv 2508.10751, section 2.4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal

from open_instruct.errors import InputError
from open_instruct.records import RolloutGroup

EPSILON = 1e-8
SAME_REWARD = 1e-9

Advantages = list[tuple[float, ...]]
AdvantageFunction = Callable[[Sequence[RolloutGroup]], Sequence[Sequence[float]]]


def advantages_of(
    groups: Sequence[RolloutGroup], name: str, *, pass_k: int = 1, own: AdvantageFunction | None = None
) -> Advantages:
    """The advantage of each completion by the formula `name`, or by the user's function `own`.

    A group with equal rewards has advantages of exactly 0, except under formulas that normalise over the whole step.

    Raises:
        InputError: `own` does not give a finite number for every completion.
    """
    if own is None:
        return _pass_at_k(groups, k=pass_k) if name == "pass_at_k" else ADVANTAGE_FUNCTIONS[name](groups)
    given = [tuple(map(float, values)) for values in own(groups)]
    if [len(values) for values in given] != [len(group.completions) for group in groups]:
        raise InputError(f"--advantages {name}: gives other numbers than one for every completion of every group")
    if not all(math.isfinite(value) for values in given for value in values):
        raise InputError(f"--advantages {name}: gives a number that is not finite")
    return given


def group_advantages(rewards: Sequence[float], normalization: Literal["standard", "centered"]) -> tuple[float, ...]:
    """The advantages of one group; an empty group has none.

    Example: `group_advantages([1.0, 0.0, 0.0, 1.0], "centered") == (0.5, -0.5, -0.5, 0.5)`.
    """
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    if normalization == "centered":
        return tuple(differences)
    std = math.sqrt(math.fsum(value * value for value in differences) / len(rewards))
    return tuple(value / (std + EPSILON) for value in differences)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ."""
    return bool(rewards) and max(rewards) - min(rewards) > SAME_REWARD


def _standard(groups: Sequence[RolloutGroup]) -> Advantages:
    return [group_advantages(group.rewards, "standard") for group in groups]


def _centered(groups: Sequence[RolloutGroup]) -> Advantages:
    return [group_advantages(group.rewards, "centered") for group in groups]


def _batch(groups: Sequence[RolloutGroup]) -> Advantages:
    _, std = _mean_and_std([reward for group in groups for reward in group.rewards])
    return [tuple(value / (std + EPSILON) for value in values) for values in _centered(groups)]


def _rloo(groups: Sequence[RolloutGroup]) -> Advantages:
    # r - mean of the others = (r - mean of all) * G / (G - 1).
    return [tuple(value * len(each) / max(len(each) - 1, 1) for value in each) for each in _centered(groups)]


def _maxrl(groups: Sequence[RolloutGroup]) -> Advantages:
    means = [_mean_and_std(group.rewards)[0] for group in groups]
    return [
        tuple(value / mean if mean > 0 else 0.0 for value in values)
        for values, mean in zip(_centered(groups), means, strict=True)
    ]


def _reinforce_pp(groups: Sequence[RolloutGroup]) -> Advantages:
    return _over_the_step(_centered(groups))


def _gdpo(groups: Sequence[RolloutGroup]) -> Advantages:
    summed = []
    for group in groups:
        weights: dict[str, float] = {}
        for check in group.prompt.checks:
            weights[check.verifier] = weights.get(check.verifier, 0.0) + check.weight
        names = dict.fromkeys(name for verdict in group.verdicts for name in verdict.scores)
        parts = [[0.0] * len(group.verdicts)]
        for name in names:
            scores = [verdict.scores.get(name, 0.0) for verdict in group.verdicts]
            parts.append([weights.get(name, 1.0) * value for value in group_advantages(scores, "standard")])
        summed.append(tuple(map(math.fsum, zip(*parts, strict=True))))
    return _over_the_step(summed)


def _pass_at_k(groups: Sequence[RolloutGroup], *, k: int) -> Advantages:
    advantages = []
    for group in groups:
        is_right, size = [verdict.is_right for verdict in group.verdicts], len(group.verdicts)
        num_wrong = size - sum(is_right)
        mean = 1 - math.comb(num_wrong, k) / max(math.comb(size, k), 1)
        std = math.sqrt(mean * (1 - mean))
        # The chance that the other k - 1 members of a wrong completion's sample are all wrong.
        none_right = math.comb(num_wrong - 1, k - 1) / max(math.comb(size - 1, k - 1), 1) if num_wrong else 0.0
        good, bad = (1 - mean, 1 - mean - none_right) if std else (0.0, 0.0)
        advantages.append(tuple((good if right else bad) / (std or 1.0) for right in is_right))
    return advantages


def _over_the_step(advantages: Advantages) -> Advantages:
    """The advantages with mean 0 and standard deviation 1 over all completions; all 0 if they are equal."""
    values = [value for group in advantages for value in group]
    mean, std = _mean_and_std(values)
    normalised = iter((value - mean) / (std + EPSILON) if has_signal(values) else 0.0 for value in values)
    return [tuple(islice(normalised, len(group))) for group in advantages]


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; 0 and 0 of no values."""
    mean = math.fsum(values) / max(len(values), 1)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1))


# The functions of `ADVANTAGES`; pass_at_k stands apart, because it needs its k.
ADVANTAGE_FUNCTIONS: dict[str, Callable[[Sequence[RolloutGroup]], Advantages]] = {
    "standard": _standard,
    "centered": _centered,
    "batch": _batch,
    "rloo": _rloo,
    "maxrl": _maxrl,
    "reinforce_pp": _reinforce_pp,
    "gdpo": _gdpo,
}

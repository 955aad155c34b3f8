"""From the rewards of a group to the advantage of each of its completions. Plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-8
SAME_REWARD = 1e-9


def group_advantages(rewards: Sequence[float], normalization: Literal["standard", "centered"]) -> tuple[float, ...]:
    """How much better each completion did than its group.

    - "standard": (r - mean) / (std + 1e-8), with the population's standard deviation (DeepSeekMath, arXiv 2402.03300,
      section 4.1.2).
    - "centered": r - mean (Dr. GRPO, arXiv 2503.20783, section 3.2): groups that are nearly all right or all wrong
      are not blown up.

    A group whose rewards are all the same has advantages of exactly 0; an empty group has none.

    Example: `group_advantages([1.0, 0.0, 0.0, 1.0], "centered") == (0.5, -0.5, -0.5, 0.5)`.
    """
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centered = [reward - mean for reward in rewards]
    if normalization == "centered":
        return tuple(centered)
    std = math.sqrt(math.fsum(value * value for value in centered) / len(rewards))
    return tuple(value / (std + EPSILON) for value in centered)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ, so that there is something to prefer."""
    return bool(rewards) and max(rewards) - min(rewards) > SAME_REWARD

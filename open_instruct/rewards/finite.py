"""Check that a number may be a reward: that float32 still computes with it."""

import math

# A critic squares rewards, and a step sums the squares of its tokens: 1e15 leaves room for 1e8
# tokens in float32.
MAX_REWARD = 1e15


def describe_unusable(value: float) -> str:
    """A number that cannot be a reward, and why; "" for one that can.

    Example: `describe_unusable(float("nan")) == "nan, which is not finite"`.
    """
    if not math.isfinite(value):
        return f"{value}, which is not finite"
    if abs(value) > MAX_REWARD:
        return (
            f"{value:g}, which is not finite once float32 squares and sums it (at most "
            f"{MAX_REWARD:g})"
        )
    return ""


def read_reward(value: object, name: str) -> float:
    """An environment's reward of that name, as a number.

    Raises:
        ValueError: it is none, is not finite, or is too large for float32.
    """
    try:
        reward = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int of more than 308 digits
        reward = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"the reward {name} is a {type(value).__name__}, and no number") from None
    problem = describe_unusable(reward)
    if problem:
        raise ValueError(f"the reward {name} is {problem}")
    return reward

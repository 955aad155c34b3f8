"""Several ways of doing the same, in turns: other work on the machine comes and goes, and so slows
each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

Result = TypeVar("Result")


def in_turns(
    ways: Mapping[str, Callable[[int], Result]],
    *,
    num_rounds: int,
    num_warmup_rounds: int = 0,
    say: Callable[[int, str, Result], None] | None = None,
) -> dict[str, list[Result]]:
    """What each way gave in each round but those of warm-up.

    Args:
        ways: each is called once a round, with the number of the round from 1 on; those of warm-up
            come before 1.
        say: called with the number of the round, the name and what came of it, as soon as it is
            there.
    """
    results: dict[str, list[Result]] = {name: [] for name in ways}
    for number in range(1 - num_warmup_rounds, num_rounds + 1):
        for name, way in ways.items():
            result = way(number)
            if number < 1:
                continue
            results[name].append(result)
            if say is not None:
                say(number, name, result)
    return results


def paired_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Of each round."""
    return [one / other for one, other in zip(above, below, strict=True)]


def paired_median(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios that were taken round by round."""
    return median(paired_ratios(above, below))

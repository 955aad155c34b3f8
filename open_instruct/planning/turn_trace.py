"""How completions of uneven length fill an engine over its turns, as the conductor asks for them.

An engine begins completions in the order of their prompts, as many at once as it has room for. Its
turn ends when all of one step have ended; those of later steps are paused then, and go on in the
next turn. Lengths are spread evenly, and are told in mean lengths: the longest of a step is four
times the shortest, and without completions of later steps the engine waits for it half empty.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import ceil, sqrt

# An assumption: completions from a quarter of the length limit to all of it, by their mean.
SHORTEST = 0.4
LONGEST = 1.6
# As many completions of a step are followed; each stands for several where a step has more.
MOST_FOLLOWED = 24
FIRST_TURNS = 4  # in which the engine fills up
NUM_TURNS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTrace:
    """An engine's mean turn.

    Example: four completions at once, all of them of one step and of the mean length, would be
    `TurnTrace(durations={4: 1.0}, older_fraction=0.0, num_paused=0.0, paused_length=0.0)`.
    """

    durations: dict[int, float]  # mean lengths for which so many completions run at once
    older_fraction: float  # of a step's tokens: made in earlier turns
    num_paused: float  # completions that a turn begins with, as one before had begun them
    paused_length: float  # mean lengths that they have together by then


@lru_cache(maxsize=4096)
def trace_turns(num_each: int, num_ahead: int, num_slots: int) -> TurnTrace:
    """Follow an engine over some turns.

    Args:
        num_each: completions of a step that it makes.
        num_ahead: how many of later steps it may have begun when the turn ends.
        num_slots: how many it has room for at once.
    """
    scale = ceil(num_each / MOST_FOLLOWED)
    num_followed = ceil(num_each / scale)
    num_open = num_followed + round(num_ahead / scale)
    num_at_once = max(1, num_slots // scale)
    lengths = spread_lengths()
    totals: list[float] = []  # of the open completions, in the order of their prompts
    missing: list[float] = []
    durations: defaultdict[int, float] = defaultdict(float)
    length = older_length = num_paused = paused_length = 0.0
    for turn in range(FIRST_TURNS + NUM_TURNS):
        added = list(islice(lengths, num_open - len(missing)))
        totals += added
        missing += added
        made = [total - left for total, left in zip(totals, missing, strict=True)]
        spent = _run_turn(missing, num_followed, num_at_once)
        if turn >= FIRST_TURNS:
            for width, spent_length in spent.items():
                durations[width] += spent_length
            length += sum(totals[:num_followed])
            older_length += sum(made[:num_followed])
            paused = [each for each, total in zip(made, totals, strict=True) if 0 < each < total]
            num_paused += len(paused)
            paused_length += sum(paused)
        del totals[:num_followed]
        del missing[:num_followed]
    # Lengths of the few that were followed have not quite the mean that all have.
    mean_length = length / (NUM_TURNS * num_followed)
    share = num_each / (num_followed * scale)
    return TurnTrace(
        durations={
            width * scale: spent / NUM_TURNS / mean_length * share
            for width, spent in sorted(durations.items())
        },
        older_fraction=older_length / length,
        num_paused=num_paused / NUM_TURNS * scale,
        paused_length=paused_length / NUM_TURNS / mean_length * scale,
    )


def spread_lengths() -> Iterator[float]:
    """Yield lengths without end, any few of which are spread evenly over all there are."""
    golden_ratio = (sqrt(5) - 1) / 2
    place = 0.5
    while True:
        yield SHORTEST + (LONGEST - SHORTEST) * place
        place = (place + golden_ratio) % 1


def _run_turn(missing: list[float], num_followed: int, num_at_once: int) -> dict[int, float]:
    """Run until the first `num_followed` have ended; returns for how long how many ran at once.

    Args:
        missing: what each still has to make, in the order in which they are begun; changed.
    """
    durations: defaultdict[int, float] = defaultdict(float)
    while any(missing[:num_followed]):
        running = [index for index, left in enumerate(missing) if left][:num_at_once]
        spent = min(missing[index] for index in running)
        durations[len(running)] += spent
        for index in running:
            missing[index] -= spent
            if missing[index] < 1e-9:
                missing[index] = 0.0
    return durations

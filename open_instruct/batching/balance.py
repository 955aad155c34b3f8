"""Divides samples over data-parallel ranks and into microbatches, for any kind of step."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

Microbatches = tuple[tuple[int, ...], ...]
"""`[microbatch]`: indices of samples, ascending."""


def sort_longest_first(samples: Iterable[int], num_tokens_of_sample: Sequence[int]) -> list[int]:
    """The samples from many tokens to few; of equal ones the first comes first."""
    return sorted(samples, key=lambda sample: (-num_tokens_of_sample[sample], sample))


def deal_to_ranks(num_tokens_of_sample: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Each rank's samples, longest first.

    Samples are dealt in rounds, longest first; within a round the longest goes to the rank with the
    fewest tokens so far. If rank a leads rank b by d tokens before a round, b gets the longer
    sample, so afterwards they differ by at most d, or by the spread of the round: never by more
    than the longest sample. Rounds, because a full global batch of pairs leaves no choice but equal
    numbers of them.
    """
    longest_first = sort_longest_first(range(len(num_tokens_of_sample)), num_tokens_of_sample)
    samples_of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens_of_rank = [0] * num_ranks
    for start in range(0, len(longest_first), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (tokens_of_rank[rank], rank))
        next_samples = longest_first[start : start + num_ranks]
        for rank, sample in zip(lightest_first, next_samples, strict=False):
            samples_of_rank[rank].append(sample)
            tokens_of_rank[rank] += num_tokens_of_sample[sample]
    return samples_of_rank


def pack_best_fit(
    samples: Iterable[int], num_tokens_of_sample: Sequence[int], capacity: int
) -> list[list[int]]:
    """Best-fit decreasing: each sample, longest first, into the pack that it fills most.

    See arXiv 2404.10830.

    Among packs with equal room it takes the one that has had that room the longest. Where
    `capacity` holds m of the longest sample, a pack without room for one holds at least m of them,
    so n * m samples never need more than n packs.

    Example: samples of 3, 9, 5 and 2 tokens in packs of 10 are [[1], [2, 0, 3]].
    """
    packs: list[list[int]] = []
    # Each pack's room, the turn since when, its index; ascending.
    by_room: list[tuple[int, int, int]] = []
    for turn, sample in enumerate(sort_longest_first(samples, num_tokens_of_sample)):
        at = bisect_left(by_room, (num_tokens_of_sample[sample],))
        if at == len(by_room):
            by_room.append((capacity, turn, len(packs)))
            packs.append([])
        room, _, pack = by_room.pop(at)
        packs[pack].append(sample)
        insort(by_room, (room - num_tokens_of_sample[sample], turn, pack))
    return packs


def balance_microbatches(
    num_tokens_of_sample: Sequence[int],
    *,
    num_ranks: int,
    cut: Callable[[list[int]], list[list[int]]],
) -> tuple[Microbatches, ...]:
    """`[rank][microbatch]`: deal the samples, and `cut` those of each rank, longest first.

    Every rank gets the same number of microbatches, at least 1, filled up with empty ones. The
    microbatches of a rank go from many tokens to few, so that ranks meet in each collective after
    about the same work.
    """
    plans = [cut(samples) for samples in deal_to_ranks(num_tokens_of_sample, num_ranks)]
    num_microbatches = max(1, *(len(microbatches) for microbatches in plans))

    def sort_key(microbatch: list[int]) -> tuple[int, list[int]]:
        return -sum(num_tokens_of_sample[i] for i in microbatch), microbatch

    balanced_plans: list[Microbatches] = []
    for microbatches in plans:
        microbatches.sort(key=sort_key)
        ascending = tuple(tuple(sorted(microbatch)) for microbatch in microbatches)
        empty = ((),) * (num_microbatches - len(microbatches))
        balanced_plans.append(ascending + empty)
    return tuple(balanced_plans)

"""One global batch: which rank takes which samples (preference pairs, conversations) in which microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from open_instruct.packing.balance import balanced, first_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """`assignments[rank][microbatch]` are indices of samples within the global batch, ascending.

    Every rank has the same number of microbatches; a microbatch may be empty. A rank's microbatches go
    from many tokens to few, so that ranks meet in each collective after about the same work.

    Example: samples of 90, 10, 50 and 40 tokens over two ranks, two samples a microbatch::

        StepPlan(assignments=(((0, 1),), ((2, 3),)))
    """

    assignments: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank."""
        return len(self.assignments[0])


def plan_step(
    num_tokens_of_sample: Sequence[int],
    *,
    num_ranks: int,
    max_samples_per_microbatch: int,
    max_tokens_per_microbatch: int,
    max_microbatches: int,
    packing: bool,
) -> StepPlan:
    """Split the samples of one optimisation step over data-parallel ranks, then into microbatches.

    A pure function of its arguments: every rank computes the whole plan and takes its own part.

    - Ranks: numbers of samples differ by at most one, numbers of tokens by at most the longest sample's.
    - `packing=True`: a microbatch holds at most `max_tokens_per_microbatch` tokens, any number of samples.
      `max_tokens_per_microbatch` must hold `max_samples_per_microbatch` of the longest sample.
    - `packing=False`: a microbatch holds at most `max_samples_per_microbatch` samples, of similar length.
    - The number of microbatches is the smallest that suffices for every rank, between 1 and
      `max_microbatches`; there may be at most num_ranks * max_samples_per_microbatch * max_microbatches samples.
    """
    assert num_ranks >= 1 and max_samples_per_microbatch >= 1 and max_microbatches >= 1
    assert len(num_tokens_of_sample) <= num_ranks * max_samples_per_microbatch * max_microbatches, "too many samples"
    longest = max(num_tokens_of_sample, default=0)
    assert not packing or max_tokens_per_microbatch >= max_samples_per_microbatch * longest, (
        f"{max_tokens_per_microbatch} tokens do not hold {max_samples_per_microbatch} samples of {longest}"
    )

    def cut(samples: list[int]) -> list[list[int]]:
        if packing:
            return first_fit(samples, num_tokens_of_sample, max_tokens_per_microbatch)
        starts = range(0, len(samples), max_samples_per_microbatch)
        return [samples[start : start + max_samples_per_microbatch] for start in starts]

    plan = StepPlan(assignments=balanced(num_tokens_of_sample, num_ranks=num_ranks, cut=cut))
    assert plan.num_microbatches <= max_microbatches
    return plan

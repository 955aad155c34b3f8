"""One global batch of preference pairs: which rank takes which pairs in which microbatch, and as what tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from open_instruct.packing.balance import balanced, first_fit
from open_instruct.packing.documents import empty_batch, pack_documents, pad_documents
from open_instruct.records import PreferenceBatch, PreferenceExample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """`assignments[rank][microbatch]` are indices of pairs within the global batch, ascending.

    Every rank has the same number of microbatches; a microbatch may be empty. A rank's microbatches go
    from many tokens to few, so that ranks meet in each collective after about the same work.

    Example: pairs of 90, 10, 50 and 40 tokens over two ranks, two pairs a microbatch::

        StepPlan(assignments=(((0, 1),), ((2, 3),)))
    """

    assignments: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank."""
        return len(self.assignments[0])


def plan_step(
    num_tokens_of_pair: Sequence[int],
    *,
    num_ranks: int,
    max_pairs_per_microbatch: int,
    max_tokens_per_microbatch: int,
    max_microbatches: int,
    packing: bool,
) -> StepPlan:
    """Split the pairs of one optimisation step over data-parallel ranks, then into microbatches.

    A pure function of its arguments: every rank computes the whole plan and takes its own part.

    - Ranks: numbers of pairs differ by at most one, numbers of tokens by at most the longest pair's.
    - `packing=True`: a microbatch holds at most `max_tokens_per_microbatch` tokens, any number of pairs.
      `max_tokens_per_microbatch` must hold `max_pairs_per_microbatch` of the longest pair.
    - `packing=False`: a microbatch holds at most `max_pairs_per_microbatch` pairs, of similar length.
    - The number of microbatches is the smallest that suffices for every rank, between 1 and
      `max_microbatches`; there may be at most num_ranks * max_pairs_per_microbatch * max_microbatches pairs.
    """
    assert num_ranks >= 1 and max_pairs_per_microbatch >= 1 and max_microbatches >= 1
    assert len(num_tokens_of_pair) <= num_ranks * max_pairs_per_microbatch * max_microbatches, "too many pairs"
    assert not packing or max_tokens_per_microbatch >= max_pairs_per_microbatch * max(num_tokens_of_pair, default=0), (
        f"{max_tokens_per_microbatch} tokens do not hold {max_pairs_per_microbatch} of the longest pair"
    )

    def cut(pairs: list[int]) -> list[list[int]]:
        if packing:
            return first_fit(pairs, num_tokens_of_pair, max_tokens_per_microbatch)
        starts = range(0, len(pairs), max_pairs_per_microbatch)
        return [pairs[start : start + max_pairs_per_microbatch] for start in starts]

    plan = StepPlan(assignments=balanced(num_tokens_of_pair, num_ranks=num_ranks, cut=cut))
    assert plan.num_microbatches <= max_microbatches
    return plan


def preference_batch(
    examples: Sequence[PreferenceExample], *, packing: bool, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PreferenceBatch:
    """The tensors of one microbatch of P pairs: sequences 0..P-1 chosen, P..2P-1 rejected, in pair order.

    Packed, all 2P documents lie in one row, with no padding between chosen and rejected. No examples give
    a batch of one unlabelled document.
    """
    if not examples:
        packed = empty_batch(pad_token_id, num_tokens=pad_to_multiple_of, packing=packing)
        return PreferenceBatch(packed=packed, row_ids=())
    documents = [example.chosen for example in examples] + [example.rejected for example in examples]
    lay_out = pack_documents if packing else pad_documents
    return PreferenceBatch(
        packed=lay_out(documents, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of),
        row_ids=tuple(example.row_id for example in examples),
    )

"""One global batch of preference pairs: which rank takes which pairs in which microbatch, and as what tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    plans: list[list[list[int]]] = []
    for pairs in _deal_to_ranks(num_tokens_of_pair, num_ranks):
        if packing:
            microbatches = _first_fit(pairs, num_tokens_of_pair, max_tokens_per_microbatch)
        else:
            microbatches = [
                pairs[start : start + max_pairs_per_microbatch]
                for start in range(0, len(pairs), max_pairs_per_microbatch)
            ]
        microbatches.sort(key=lambda microbatch: (-sum(num_tokens_of_pair[pair] for pair in microbatch), microbatch))
        plans.append(microbatches)

    num_microbatches = max(1, *(len(microbatches) for microbatches in plans))
    assert num_microbatches <= max_microbatches
    return StepPlan(
        assignments=tuple(
            tuple(tuple(sorted(microbatch)) for microbatch in microbatches)
            + ((),) * (num_microbatches - len(microbatches))
            for microbatches in plans
        )
    )


def _deal_to_ranks(num_tokens_of_pair: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Each rank's pairs, longest first.

    Pairs are dealt in rounds, longest first; within a round the longest goes to the rank with the fewest
    tokens so far. If rank a leads rank b by d tokens before a round, b gets the longer pair, so afterwards
    they differ by at most d, or by the spread of the round: never by more than the longest pair. Rounds,
    because a full global batch leaves no choice but equal numbers of pairs.
    """
    longest_first = sorted(range(len(num_tokens_of_pair)), key=lambda pair: (-num_tokens_of_pair[pair], pair))
    pairs_of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens_of_rank = [0] * num_ranks
    for start in range(0, len(longest_first), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (tokens_of_rank[rank], rank))
        for rank, pair in zip(lightest_first, longest_first[start : start + num_ranks], strict=False):
            pairs_of_rank[rank].append(pair)
            tokens_of_rank[rank] += num_tokens_of_pair[pair]
    return pairs_of_rank


def _first_fit(pairs: Sequence[int], num_tokens_of_pair: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: each pair, longest first, into the first microbatch with room for it.

    Where `capacity` holds m of the longest pair, a microbatch that turned one away holds at least m pairs,
    so n * m pairs never need more than n microbatches.
    """
    microbatches: list[list[int]] = []
    room: list[int] = []
    for pair in pairs:
        num_tokens = num_tokens_of_pair[pair]
        for index, free in enumerate(room):
            if num_tokens <= free:
                microbatches[index].append(pair)
                room[index] -= num_tokens
                break
        else:
            microbatches.append([pair])
            room.append(capacity - num_tokens)
    return microbatches


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

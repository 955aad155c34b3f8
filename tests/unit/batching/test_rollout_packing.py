"""Rollouts over mini-batches, ranks and microbatches, and the tensors that come of them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.batching.rollouts import (
    RankStep,
    build_rollout_batch,
    build_rollout_minibatches,
    plan_rollouts,
    plan_steps_of_ranks,
)
from open_instruct.core.batch_values import RLValues, Stream
from open_instruct.core.records import Document, RolloutSample, Span
from tests.tiers import num_examples

CAPACITY = 40


def sample(
    num_prompt: int, num_generated: int, *, first: int = 1, advantage: float = 0.5
) -> RolloutSample:
    """Token ids count up from `first`; the engine's log-prob of token id i is -i."""
    ids = tuple(range(first, first + num_prompt + num_generated))
    return RolloutSample(
        document=document(ids, start=num_prompt),
        engine_logprobs=tuple(-float(i) for i in ids[num_prompt:]),
        advantage=advantage,
    )


def document(ids: tuple[int, ...], *, start: int) -> Document:
    return Document(token_ids=ids, responses=(Span(start=start, stop=len(ids)),))


def of_lengths(num_tokens: list[int]) -> list[Document]:
    """Documents that share nothing."""
    return [
        document((1000 * number, *range(1, length)), start=1)
        for number, length in enumerate(num_tokens)
    ]


lengths = st.lists(st.integers(2, CAPACITY), max_size=25)


@given(num_tokens=lengths, num_ranks=st.integers(1, 5), num_mini_batches=st.integers(1, 6))
def test_every_plan(num_tokens: list[int], num_ranks: int, num_mini_batches: int) -> None:
    plan = plan_rollouts(
        of_lengths(num_tokens),
        num_ranks=num_ranks,
        max_tokens_per_microbatch=CAPACITY,
        num_mini_batches=num_mini_batches,
    )
    assert len(plan) == num_ranks
    start = 0
    sizes = []
    for of_ranks in zip(*plan, strict=True):
        assert len({len(microbatches) for microbatches in of_ranks}) == 1, (
            "ranks would wait for each other for ever"
        )
        per_rank = [
            [i for microbatch in microbatches for i in microbatch] for microbatches in of_ranks
        ]
        everyone = sorted(i for indices in per_rank for i in indices)
        # A run of the samples as given, each of them once.
        assert everyone == list(range(start, start + len(everyone)))
        start += len(everyone)
        sizes.append(len(everyone))
        for microbatches in of_ranks:
            assert all(
                sum(num_tokens[i] for i in microbatch) <= CAPACITY for microbatch in microbatches
            )
        totals = [sum(num_tokens[i] for i in indices) for indices in per_rank]
        assert max(totals) - min(totals) <= max((num_tokens[i] for i in everyone), default=0)
        if everyone:
            # No microbatch is empty on all ranks.
            assert all(
                any(of_ranks[rank][k] for rank in range(num_ranks)) for k in range(len(of_ranks[0]))
            )
    assert start == len(num_tokens)
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(num_mini_batches, max(1, len(num_tokens)))


@settings(max_examples=num_examples(30))
@given(num_tokens=lengths, num_mini_batches=st.integers(1, 6))
def test_mini_batches_do_not_depend_on_the_ranks(
    num_tokens: list[int], num_mini_batches: int
) -> None:
    def minibatches(num_ranks: int) -> list[list[int]]:
        plan = plan_rollouts(
            of_lengths(num_tokens),
            num_ranks=num_ranks,
            max_tokens_per_microbatch=CAPACITY,
            num_mini_batches=num_mini_batches,
        )
        return [
            sorted(i for rank in ranks for mb in rank for i in mb)
            for ranks in zip(*plan, strict=True)
        ]

    assert minibatches(1) == minibatches(2) == minibatches(4)


def test_example_of_the_docstring() -> None:
    plan = plan_rollouts(
        of_lengths([5, 3, 4, 2]), num_ranks=2, max_tokens_per_microbatch=6, num_mini_batches=2
    )
    assert plan == ((((0,),), ((2,),)), (((1,),), ((3,),)))


def test_sample_that_fits_nowhere_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="do not hold a sample of 9"):
        plan_rollouts(
            of_lengths([3, 9]), num_ranks=1, max_tokens_per_microbatch=8, num_mini_batches=1
        )


def steps_of(
    samples: list[RolloutSample], num_ranks: int, num_mini_batches: int = 1
) -> tuple[RankStep, ...]:
    return plan_steps_of_ranks(
        samples,
        num_ranks=num_ranks,
        max_tokens_per_microbatch=CAPACITY,
        num_mini_batches=num_mini_batches,
    )


def test_every_rank_knows_the_counts_of_all() -> None:
    samples = [sample(3, 2), sample(3, 6), sample(5, 1), sample(2, 2), sample(2, 3)]
    for num_ranks in (1, 2, 4):
        for step in steps_of(samples, num_ranks, num_mini_batches=2):
            counts = [
                tuple(minibatch.counts[name] for name in ("rows", "labels", "tokens"))
                for minibatch in step.minibatches
            ]
            assert counts == [(2, 8, 14), (3, 6, 15)]
            assert step.num_tokens_global == 29


def test_fewer_completions_than_ranks_leave_some_with_an_empty_microbatch() -> None:
    steps = steps_of([sample(3, 2), sample(3, 6)], 4)
    sizes = [[len(microbatch) for microbatch in step.minibatches[0].microbatches] for step in steps]
    assert sorted(sizes) == [[0], [0], [1], [1]]
    assert {step.minibatches[0].counts["rows"] for step in steps} == {2}


def test_step_of_nothing_is_one_empty_microbatch_everywhere() -> None:
    for step in steps_of([], 2, num_mini_batches=3):
        (minibatch,) = step.minibatches
        assert minibatch.microbatches == ((),)
        counts = {**minibatch.counts}
        assert counts.pop("rl_microbatches") == 1
        assert set(counts.values()) == {step.num_tokens_global} == {0}


def test_values_are_in_the_order_of_their_labels() -> None:
    batch = build_rollout_batch(
        [sample(2, 2, first=10, advantage=0.5), sample(1, 3, first=20, advantage=-1.0)],
        pad_to_multiple_of=5,
    )
    assert batch.packed.input_ids_BT.tolist() == [[10, 11, 12, 13, 20, 21, 22, 23, 0, 0]]
    assert batch.packed.labels_BT.tolist() == [[-100, 12, 13, -100, 21, 22, 23, -100, -100, -100]]
    values = RLValues.read(batch.values)
    assert values.engine_logprobs_N.tolist() == [-12, -13, -21, -22, -23]
    assert values.advantages_N.tolist() == [0.5, 0.5, -1, -1, -1]
    assert values.engine_logprobs_N.dtype == values.advantages_N.dtype == torch.float32
    assert values.rl == values.kl == Stream() and values.ce is None


def test_empty_microbatch_still_has_a_document() -> None:
    batch = build_rollout_batch([], pad_to_multiple_of=4)
    assert batch.packed.input_ids_BT.tolist() == [[0, 0, 0, 0]]
    assert (batch.packed.num_sequences, batch.packed.num_tokens) == (0, 0)
    values = RLValues.read(batch.values)
    assert values.engine_logprobs_N.shape == values.advantages_N.shape == (0,)


def test_log_probs_that_do_not_match_their_tokens_are_our_own_mistake() -> None:
    wrong = dataclasses.replace(sample(3, 2), engine_logprobs=(-1.0, -2.0, -3.0))
    with pytest.raises(AssertionError, match="log-probs"):
        build_rollout_batch([wrong])


def test_tensors_of_a_step() -> None:
    samples = [sample(3, 2), sample(3, 6), sample(5, 1), sample(20, 15)]
    (step,) = steps_of(samples, 1, num_mini_batches=2)
    minibatches = build_rollout_minibatches(step, pad_to_multiple_of=2)
    assert [
        (minibatch.counts["rows"], minibatch.counts["labels"]) for minibatch in minibatches
    ] == [(2, 8), (2, 16)]
    assert [
        [b.packed.num_sequences for b in minibatch.microbatches] for minibatch in minibatches
    ] == [[2], [1, 1]]
    assert all(
        b.packed.input_ids_BT.shape[1] % 2 == 0
        for minibatch in minibatches
        for b in minibatch.microbatches
    )

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_core.data.utils import InstancePacker

from open_instruct.batching.balance import pack_best_fit
from open_instruct.batching.documents import PADDING, find_label_positions, pack_documents
from open_instruct.batching.steps import BatchShape, collate, plan_step
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.core.batch_values import PreferenceValues, RowValues, StepLabelValues
from open_instruct.core.records import IGNORE_INDEX, Batch, Document, PackedBatch, Span
from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.losses.preference_loss import PreferenceLossInputs
from open_instruct.objectives.dpo import preference_loss
from tests.tiers import num_examples
from tests.unit.token_data import shape_of

PAD = PADDING
_ = IGNORE_INDEX


def document(*token_ids: int, reply: int) -> Document:
    """A document whose last `reply` tokens are the response."""
    return Document(
        token_ids=token_ids, responses=(Span(start=len(token_ids) - reply, stop=len(token_ids)),)
    )


FIRST, SECOND = document(5, 9, 2, 7, reply=1), document(4, 6, reply=1)


# --- documents
# -------------------------------------------------------------------------------------


def test_packed_row_of_the_records_example() -> None:
    batch = pack_documents([FIRST, SECOND])
    assert batch.input_ids_BT.tolist() == [[5, 9, 2, 7, 4, 6]]
    assert batch.labels_BT.tolist() == [[_, _, 7, _, 6, _]]
    assert (batch.label_positions_N.tolist(), batch.sequence_ids_N.tolist()) == ([2, 4], [0, 1])
    assert batch.document_lengths == (4, 2)
    assert (batch.num_sequences, batch.num_tokens) == (2, 6)
    assert (
        batch.input_ids_BT.dtype
        == batch.labels_BT.dtype
        == batch.sequence_ids_N.dtype
        == torch.int64
    )


def test_tail_padding_of_a_packed_row_is_a_document_of_its_own() -> None:
    batch = pack_documents([FIRST, SECOND], pad_to_multiple_of=8)
    assert batch.input_ids_BT.tolist() == [[5, 9, 2, 7, 4, 6, PAD, PAD]]
    assert batch.labels_BT.tolist() == [[_, _, 7, _, 6, _, _, _]]
    assert (batch.label_positions_N.tolist(), batch.sequence_ids_N.tolist()) == ([2, 4], [0, 1])
    assert batch.document_lengths == (4, 2, 2)
    assert (batch.num_sequences, batch.num_tokens) == (2, 6)


def test_no_padding_document_where_the_length_fits() -> None:
    assert pack_documents([FIRST, SECOND], pad_to_multiple_of=3).document_lengths == (4, 2)


def test_padded_rows() -> None:
    batch = pack_documents([FIRST, SECOND], packing=False, pad_to_multiple_of=5)
    assert batch.input_ids_BT.tolist() == [[5, 9, 2, 7, PAD], [4, 6, PAD, PAD, PAD]]
    assert batch.labels_BT.tolist() == [[_, _, 7, _, _], [6, _, _, _, _]]
    assert (batch.label_positions_N.tolist(), batch.sequence_ids_N.tolist()) == ([2, 5], [0, 1])
    assert batch.document_lengths is None
    assert (batch.num_sequences, batch.num_tokens) == (2, 6)


def test_response_inside_a_document_is_labelled_to_its_end_and_no_further() -> None:
    middle = Document(token_ids=(1, 2, 3, 4, 5, 6), responses=(Span(start=2, stop=4),))
    assert pack_documents([middle]).labels_BT.tolist() == [[_, 3, 4, _, _, _]]


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 2), (2, 4), (-1, 2)])
def test_response_that_cannot_be_predicted_whole_is_refused(start: int, stop: int) -> None:
    wrong = Document(token_ids=(1, 2, 3), responses=(Span(start=start, stop=stop),))
    with pytest.raises(AssertionError, match="response"):
        pack_documents([wrong])
    with pytest.raises(AssertionError, match="response"):
        pack_documents([wrong], packing=False)


@pytest.mark.parametrize("packing", [True, False])
def test_empty_batch(packing: bool) -> None:
    batch = pack_documents([], packing=packing, pad_to_multiple_of=3)
    assert batch.input_ids_BT.tolist() == [[PAD, PAD, PAD]]
    assert batch.labels_BT.tolist() == [[_, _, _]]
    assert batch.label_positions_N.tolist() == batch.sequence_ids_N.tolist() == []
    assert batch.document_lengths == ((3,) if packing else None)
    assert (batch.num_sequences, batch.num_tokens) == (0, 0)


def labels_kept(batch: PackedBatch) -> torch.Tensor:
    """The labels at the positions that the head keeps, as the head takes them."""
    return batch.labels_BT.gather(1, find_label_positions(batch))


def test_kept_positions_fill_short_rows_with_the_last_position() -> None:
    long = document(1, 2, 3, 4, 5, reply=3)
    batch = pack_documents([long, document(6, 7, reply=1)], packing=False)
    assert find_label_positions(batch).tolist() == [[1, 2, 3], [0, 4, 4]]
    assert labels_kept(batch).tolist() == [[3, 4, 5], [7, _, _]]


def test_kept_positions_of_a_packed_row() -> None:
    batch = pack_documents([FIRST, SECOND], pad_to_multiple_of=8)
    assert find_label_positions(batch).tolist() == [[2, 4]]
    assert labels_kept(batch).tolist() == [[7, 6]]


def test_kept_positions_of_an_empty_batch_hold_one_unlabelled_position() -> None:
    batch = pack_documents([], pad_to_multiple_of=4)
    assert find_label_positions(batch).tolist() == [[3]]
    assert labels_kept(batch).tolist() == [[_]]


@st.composite
def documents(draw: Any) -> Document:
    token_ids = draw(st.lists(st.integers(0, 97), min_size=2, max_size=12))
    start = draw(st.integers(1, len(token_ids) - 1))
    stop = draw(st.integers(start + 1, len(token_ids)))
    return Document(token_ids=tuple(token_ids), responses=(Span(start=start, stop=stop),))


@st.composite
def pairs_of_documents(draw: Any) -> tuple[Document, Document]:
    return draw(documents()), draw(documents())


def collated(pairs: Sequence[tuple[Document, ...]], **changes: Any) -> Batch:
    return collate(pairs, range(len(pairs)), shape=shape_of(**changes))


def both_layouts(items: Sequence[Document], multiple: int) -> list[PackedBatch]:
    return [
        pack_documents(items, pad_to_multiple_of=multiple),
        pack_documents(items, packing=False, pad_to_multiple_of=multiple),
    ]


@given(st.lists(documents(), min_size=1, max_size=6), st.integers(1, 9))
def test_both_layouts_hold_every_response_token_once_and_nothing_else(
    items: list[Document], multiple: int
) -> None:
    expected = [
        list(item.token_ids[item.responses[0].start : item.responses[0].stop]) for item in items
    ]
    for batch in both_layouts(items, multiple):
        num_rows, width = batch.input_ids_BT.shape
        assert width % multiple == 0
        assert batch.num_tokens == sum(map(len, items))
        assert batch.num_sequences == len(items)
        if batch.document_lengths is not None:
            assert num_rows == 1 and sum(batch.document_lengths) == width
            assert batch.document_lengths[: len(items)] == tuple(map(len, items))
        assert (
            batch.label_positions_N.tolist()
            == (batch.labels_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0].tolist()
        )
        labels_N = batch.labels_BT.flatten()[batch.label_positions_N]
        for sequence, tokens in enumerate(expected):
            assert labels_N[batch.sequence_ids_N == sequence].tolist() == tokens
        kept_BK, labels_BK = find_label_positions(batch), labels_kept(batch)
        filler = labels_BK == IGNORE_INDEX
        assert (kept_BK[filler] == width - 1).all()
        # A label is always the row's own next token.
        labelled = ~filler
        rows = torch.arange(num_rows)[:, None].expand_as(kept_BK)[labelled]
        following = batch.input_ids_BT[rows, kept_BK[labelled] + 1]
        assert following.tolist() == labels_BK[labelled].tolist()


# --- nothing leaks
# ---------------------------------------------------------------------------------


def pretend_logprobs(batch: PackedBatch) -> torch.Tensor:
    """A 'model' whose log-prob at t depends on every token that attention would let t see, and on
    the label.
    """
    rows = []
    for token_ids, labels in zip(
        batch.input_ids_BT.tolist(), batch.labels_BT.tolist(), strict=True
    ):
        row: list[float] = []
        for length in batch.document_lengths or (len(token_ids),):
            start = len(row)
            seen: tuple[int, ...] = ()
            for position in range(start, start + length):
                seen += (token_ids[position],)
                row.append(-10.0 * random.Random(hash((seen, labels[position]))).random())
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def reply_logps(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and counts per sequence, read where there are labels."""
    logprobs_N = pretend_logprobs(batch).flatten()[batch.label_positions_N]
    return sum_by_sequence(logprobs_N, batch.sequence_ids_N, batch.num_sequences)


@given(st.lists(pairs_of_documents(), min_size=1, max_size=4), st.integers(1, 16))
def test_log_probs_do_not_depend_on_the_layout(
    pairs: list[tuple[Document, Document]], multiple: int
) -> None:
    alone = [reply_logps(pack_documents([chosen])) for chosen, _ in pairs]
    alone += [reply_logps(pack_documents([rejected])) for _, rejected in pairs]
    for packing in (True, False):
        batch = collated(pairs, packing=packing, pad_to_multiple_of=multiple)
        sums, counts = reply_logps(batch.packed)
        torch.testing.assert_close(
            sums, torch.cat([one for one, _ in alone]), rtol=1e-12, atol=1e-12
        )
        assert counts.tolist() == [one.item() for _, one in alone]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("multiple", [1, 64])
def test_chosen_padding_does_not_leak_into_the_first_rejected_document(
    packing: bool, multiple: int
) -> None:
    """Chosen and rejected of very unequal lengths: the reference is scored alone, the policy in a
    batch.
    """
    pairs = [
        (document(1, 2, 3, reply=1), document(*range(10, 40 + row), reply=20)) for row in range(3)
    ]
    reference_chosen = torch.cat([reply_logps(pack_documents([chosen]))[0] for chosen, _ in pairs])
    reference_rejected = torch.cat(
        [reply_logps(pack_documents([rejected]))[0] for _, rejected in pairs]
    )
    batch = collated(pairs, packing=packing, pad_to_multiple_of=multiple)
    sums, counts = reply_logps(batch.packed)
    for name in ("dpo", "dpo_norm"):
        inputs = PreferenceLossInputs(
            policy_logps_2P=sums.view(2, 3),
            lengths_2P=counts.view(2, 3),
            reference_logps_2P=torch.stack([reference_chosen, reference_rejected]),
        )
        losses = preference_loss(PreferenceLossSection(loss_type=name, beta=5.0), inputs).losses_P
        torch.testing.assert_close(
            losses, torch.full_like(losses, math.log(2.0)), rtol=1e-9, atol=0.0
        )


# --- rows of several documents
# ----------------------------------------------------------------------------


def test_chosen_come_first_then_rejected_in_pair_order() -> None:
    pairs = [
        (document(1, 2, reply=1), document(3, 4, 5, reply=1)),
        (document(6, 7, reply=1), document(8, 9, reply=1)),
    ]
    packed = collate(pairs, (7, 3), shape=shape_of(pad_to_multiple_of=4))
    assert packed.row_ids == (7, 3)
    assert packed.packed.input_ids_BT.tolist() == [[1, 2, 6, 7, 3, 4, 5, 8, 9, PAD, PAD, PAD]]
    assert packed.packed.document_lengths == (2, 2, 3, 2, 3)
    assert packed.packed.num_sequences == 4
    padded = collated(pairs, packing=False)
    assert padded.packed.input_ids_BT.tolist() == [[1, 2, PAD], [6, 7, PAD], [3, 4, 5], [8, 9, PAD]]


@pytest.mark.parametrize("packing", [True, False])
def test_scores_follow_their_documents(packing: bool) -> None:
    pairs = [(document(1, 2, reply=1), document(3, 4, 5, reply=1)) for _ in range(2)]
    scores_N2 = np.array([[row, 10 + row] for row in range(5)], dtype=np.float32)
    batch = collate(
        pairs,
        (4, 2),
        shape=shape_of(packing=packing),
        reference_logps_ND=scores_N2,
        values_class=PreferenceValues,
    )
    reference_logps_S = PreferenceValues.read(batch.values).reference_logps_S
    assert reference_logps_S is not None and reference_logps_S.tolist() == [4, 2, 14, 12]


@pytest.mark.parametrize("packing", [True, False])
def test_batch_of_no_rows_is_one_unlabelled_document(packing: bool) -> None:
    shape = shape_of(packing=packing, pad_to_multiple_of=4)
    batch = collate([], (), shape=shape, reference_logps_ND=np.zeros((3, 2), dtype=np.float32))
    reference_logps_S = RowValues.read(batch.values).reference_logps_S
    assert batch.row_ids == ()
    assert reference_logps_S is not None and reference_logps_S.shape == (0,)
    assert batch.packed.num_sequences == 0 and batch.packed.num_tokens == 0
    assert batch.packed.input_ids_BT.tolist() == [[PAD] * 4]
    assert reply_logps(batch.packed)[0].shape == (0,)


# --- planning a step
# -------------------------------------------------------------------------------


def test_plan_by_hand_packed() -> None:
    # Rounds: (90, 50) to ranks 0 and 1; then the lighter rank 1 gets 40 and rank 0 gets 10.
    plan = plan_step([90, 10, 50, 40], shape_of(max_seq_length=95, max_microbatches=2), num_ranks=2)
    assert plan == (((0,), (1,)), ((2, 3), ()))
    assert len(plan[0]) == 2


def test_plan_by_hand_padded_groups_pairs_of_similar_length() -> None:
    plan = plan_step(
        [100, 10, 90, 20],
        shape_of(
            max_samples_per_microbatch=2, max_seq_length=100, max_microbatches=4, packing=False
        ),
        num_ranks=1,
    )
    assert plan == (((0, 2), (1, 3)),)


def test_packing_takes_fewer_microbatches_than_padding_where_pairs_are_short() -> None:
    lengths = [10] * 16
    sizes = {"max_samples_per_microbatch": 2, "max_seq_length": 100, "max_microbatches": 4}
    numbers = [
        len(plan_step(lengths, shape_of(packing=packing, **sizes), num_ranks=2)[0])
        for packing in (True, False)
    ]
    assert numbers == [1, 4]


def test_ranks_beyond_the_pairs_get_empty_microbatches() -> None:
    plan = plan_step([5, 6], shape_of(max_seq_length=6), num_ranks=4)
    assert plan == (((1,),), ((0,),), ((),), ((),))


def test_no_pairs_still_make_one_microbatch() -> None:
    plan = plan_step([], shape_of(max_seq_length=1), num_ranks=2)
    assert plan == (((),), ((),))


@pytest.mark.parametrize(
    ("lengths", "max_tokens"),
    [([1, 1, 1, 1, 1], 10), ([6], 5)],
    ids=["more pairs than fit in a step", "a microbatch too small for the longest pair"],
)
def test_step_that_cannot_be_planned_is_refused(lengths: list[int], max_tokens: int) -> None:
    with pytest.raises(AssertionError):
        plan_step(lengths, shape_of(max_seq_length=max_tokens, max_microbatches=2), num_ranks=2)


@st.composite
def steps(draw: Any) -> tuple[list[int], BatchShape, int]:
    num_ranks, max_pairs, max_microbatches = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    most = num_ranks * max_pairs * max_microbatches
    longest = draw(st.integers(4, 300))
    num_pairs = draw(st.one_of(st.just(most), st.integers(0, most)))
    lengths = draw(st.lists(st.integers(4, longest), min_size=num_pairs, max_size=num_pairs))
    sizes = {
        "max_samples_per_microbatch": max_pairs,
        "max_microbatches": max_microbatches,
        "max_seq_length": longest,
    }
    return lengths, shape_of(packing=draw(st.booleans()), **sizes), num_ranks


@settings(max_examples=num_examples(100))
@given(steps())
def test_every_plan_keeps_its_promises(step: tuple[list[int], BatchShape, int]) -> None:
    lengths, shape, num_ranks = step
    plan = plan_step(lengths, shape, num_ranks=num_ranks)
    assert plan == plan_step(lengths, shape, num_ranks=num_ranks)

    assert len(plan) == num_ranks
    assert 1 <= len(plan[0]) <= shape.max_microbatches
    assert all(len(microbatches) == len(plan[0]) for microbatches in plan)
    # As few microbatches as the busiest rank needs: some rank fills them all.
    if lengths:
        assert any(all(microbatches) for microbatches in plan)

    planned = [pair for microbatches in plan for microbatch in microbatches for pair in microbatch]
    assert sorted(planned) == list(range(len(lengths)))

    pairs_of_rank, tokens_of_rank = [], []
    for microbatches in plan:
        pairs_of_rank.append(sum(map(len, microbatches)))
        tokens_of_microbatch = [
            sum(lengths[pair] for pair in microbatch) for microbatch in microbatches
        ]
        tokens_of_rank.append(sum(tokens_of_microbatch))
        assert tokens_of_microbatch == sorted(tokens_of_microbatch, reverse=True)
        for microbatch, num_tokens in zip(microbatches, tokens_of_microbatch, strict=True):
            assert list(microbatch) == sorted(microbatch)
            if shape.packing:
                assert num_tokens <= shape.max_tokens_per_microbatch
            else:
                assert len(microbatch) <= shape.max_samples_per_microbatch
    assert max(pairs_of_rank) - min(pairs_of_rank) <= 1
    assert max(tokens_of_rank) - min(tokens_of_rank) <= max(lengths, default=0)


class TestEndsOfReplies:
    """Documents of which only the ends of the replies are read."""

    BOTH = (
        Document(
            token_ids=(5, 9, 2, 7, 3),
            responses=(Span(start=1, stop=3), Span(start=4, stop=5)),
            reads_ends=True,
        ),
        Document(token_ids=(4, 8, 6), responses=(Span(start=2, stop=3),), reads_ends=True),
    )

    def test_each_reply_has_one_place(self) -> None:
        assert [document.num_label_tokens for document in self.BOTH] == [2, 1]
        packed = pack_documents(self.BOTH)
        assert packed.sequence_ids_N.tolist() == [0, 0, 1]
        assert packed.kept_BK is not None and packed.kept_BK.tolist() == [[2, 4, 7]]

    def test_padded_row_may_be_filled_up_with_a_position_that_is_read(self) -> None:
        longer = Document(
            token_ids=(1, 2, 3, 4, 5, 6), responses=(Span(start=5, stop=6),), reads_ends=True
        )
        padded = pack_documents([self.BOTH[0], longer], packing=False)
        assert padded.kept_BK is not None and padded.kept_BK.tolist() == [[2, 4], [5, 5]]
        assert padded.sequence_ids_N.tolist() == [0, 0, 1]

    def test_shared_prompt_is_before_what_is_read(self) -> None:
        pair = [
            Document(
                token_ids=(5, 9, 2, reply), responses=(Span(start=3, stop=4),), reads_ends=True
            )
            for reply in (7, 8)
        ]
        packed = pack_documents(pair, groups=[(0, 1)])
        assert packed.input_ids_BT.tolist() == [[5, 9, 2, 7, 2, 8]]
        assert (packed.label_positions_N.tolist(), packed.sequence_ids_N.tolist()) == (
            [3, 5],
            [0, 1],
        )


def test_numbers_that_came_with_the_rows_follow_them() -> None:
    values = [np.array([0.5, 1.0], dtype=np.float32), np.array([2.0], dtype=np.float32)]
    rows = [(FIRST,), (SECOND,)]
    batch = collate(
        rows, (4, 2), shape=shape_of(), row_numbers=values, values_class=StepLabelValues
    )
    assert StepLabelValues.read(batch.values).labels_N.tolist() == [0.5, 1.0, 2.0]
    empty = collate([], (), shape=shape_of(), row_numbers=[], values_class=StepLabelValues)
    assert StepLabelValues.read(empty.values).labels_N.tolist() == []


# --- packs
# -----------------------------------------------------------------------------------------


def plain_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The paper's sentence, carried out: every pack is looked at."""
    packs: list[list[int]] = []
    waiting_since: list[int] = []
    for turn, sample in enumerate(sorted(range(len(lengths)), key=lambda sample: -lengths[sample])):
        rooms = [capacity - sum(lengths[other] for other in pack) for pack in packs]
        fitting = [pack for pack in range(len(packs)) if rooms[pack] >= lengths[sample]]
        if fitting:
            chosen = min(fitting, key=lambda pack: (rooms[pack], waiting_since[pack]))
            packs[chosen].append(sample)
            waiting_since[chosen] = turn
        else:
            packs.append([sample])
            waiting_since.append(turn)
    return packs


@given(lengths=st.lists(st.integers(1, 24), max_size=60), capacity=st.integers(24, 50))
def test_best_fit_is_the_papers(lengths: list[int], capacity: int) -> None:
    assert pack_best_fit(range(len(lengths)), lengths, capacity) == plain_best_fit(
        lengths, capacity
    )


@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_best_fit_is_what_olmo_core_packs(lengths: list[int]) -> None:
    """Which of several conversations of one length goes where is not settled there."""
    bounds = np.array([(0, length) for length in lengths])
    packs, longest_first, _ = InstancePacker(32).pack_documents(bounds)
    theirs = [[int(longest_first[document, 1]) for document in pack] for pack in packs]
    assert [
        [lengths[sample] for sample in pack]
        for pack in pack_best_fit(range(len(lengths)), lengths, 32)
    ] == theirs

"""Rows whose documents share their prompts: how they are laid out, planned, and that nothing
computed changes.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_core.nn.transformer import Transformer, TransformerActivationCheckpointingMode

from open_instruct.batching.documents import pack_documents
from open_instruct.batching.prefixes import (
    count_shared_prefix,
    find_prompt_runs,
    is_worth_sharing,
    order_branches,
    split_unshared_groups,
)
from open_instruct.batching.rollouts import (
    build_rollout_batch,
    build_rollout_minibatches,
    plan_rollouts,
    plan_steps_of_ranks,
)
from open_instruct.batching.steps import collate, num_packed_tokens
from open_instruct.config.sections import PrefixSharing
from open_instruct.core.batch_values import RLValues
from open_instruct.core.families import FAMILIES
from open_instruct.core.records import IGNORE_INDEX, Document, PackedBatch, RolloutSample, Span
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.training.model.forward import token_logprobs
from tests.tiers import num_examples
from tests.unit.small_models import CPU, VOCAB_SIZE, WINDOW, new_model, random_model
from tests.unit.token_data import shape_of

pytestmark = pytest.mark.usefixtures("one_thread")

_ = IGNORE_INDEX


def document(prompt: Sequence[int], reply: Sequence[int]) -> Document:
    return Document(
        token_ids=(*prompt, *reply),
        responses=(Span(start=len(prompt), stop=len(prompt) + len(reply)),),
    )


def some_tokens(count: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def group(
    num_prompt: int, num_replies: Sequence[int], *, seed: int, num_alike: int = 0
) -> list[Document]:
    """Replies to one prompt; each begins with up to `num_alike` tokens of one of two that are
    common to many.
    """
    rng = random.Random(seed)
    prompt = some_tokens(num_prompt, rng)
    common = [some_tokens(num_alike, rng) for _ in range(2)] if num_alike else [()]
    replies = [
        (*rng.choice(common)[: rng.randint(0, num_alike)], *some_tokens(count, rng))
        for count in num_replies
    ]
    return [
        document(prompt, reply[:count]) for reply, count in zip(replies, num_replies, strict=True)
    ]


# --- which tokens are shared
# ------------------------------------------------------------------------


def test_row_of_the_records_example() -> None:
    batch = pack_documents([document([5, 9, 2], [7]), document([5, 9, 2], [8, 3])], groups=[(0, 1)])
    assert batch.input_ids_BT.tolist() == [[5, 9, 2, 7, 2, 8, 3]]
    assert batch.labels_BT.tolist() == [[_, _, 7, _, 8, 3, _]]
    assert (batch.label_positions_N.tolist(), batch.sequence_ids_N.tolist()) == (
        [2, 4, 5],
        [0, 1, 1],
    )
    assert batch.document_lengths == (4, 3)
    assert batch.prefix_lengths == (0, 2)
    assert (batch.num_sequences, batch.num_tokens) == (2, 7)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (([5, 9, 2, 4], [7]), ([5, 9, 3], [8]), 1),  # prompts that end differently
        (([5, 9], [7, 7]), ([5, 9, 7], [7]), 1),
        (([1, 9], [7]), ([2, 9], [7]), 0),
        # Few words of replies that begin alike.
        (([5, 9, 2], [7, 7, 1]), ([5, 9, 2], [7, 7, 4]), 2),
        (([5, 9, 2], range(20)), ([5, 9, 2], [*range(10), 4, 4]), 12),
        (([5, 9, 2], range(20)), ([5, 9, 2], range(11)), 13),
    ],
)
def test_common_beginnings_of_documents_are_shared(one: Any, other: Any, shared: int) -> None:
    assert count_shared_prefix(document(*one), document(*other)) == shared


def test_learned_turns_are_shared_and_their_labels_belong_to_each() -> None:
    """The last token that two begin with predicts 1 in one of them and 2 in the other, so each
    computes it.
    """
    turns = (Span(start=3, stop=10), Span(start=12, stop=13))
    both = [Document(token_ids=(5, 9, 2, *[7] * 7, 4, 4, last), responses=turns) for last in (1, 2)]
    batch = pack_documents(both, groups=[(0, 1)])
    assert (batch.document_lengths, batch.prefix_lengths) == ((13, 2), (0, 11))
    assert batch.labels_BT.tolist() == [[_, _, *[7] * 7, _, _, 1, _, 2, _]]
    assert batch.label_positions_N.tolist() == [*range(2, 9), 11, *range(2, 9), 13]
    assert batch.sequence_ids_N.tolist() == [0] * 8 + [1] * 8


def test_tree_is_walked_depth_first() -> None:
    turn, other_turn = [7] * 9, [8] * 9
    documents = [
        document([5, 9, 2], reply)
        for reply in (
            [*turn, 1],
            [*other_turn, 1],
            [3],
            [*turn, 2, 2],
            [*turn, 1, 4],
            [*other_turn, 2],
        )
    ]
    # What the fifth begins with is the whole of the first, whose last token has no label there.
    assert order_branches(documents, range(6)) == [
        (0, 0),
        (4, 12),
        (3, 11),
        (1, 2),
        (5, 11),
        (2, 2),
    ]


def test_prompt_of_one_token_is_not_shared() -> None:
    batch = pack_documents([document([5], [7]), document([5], [8])], groups=[(0, 1)])
    assert batch.prefix_lengths is None
    assert batch.document_lengths == (2, 2)


@pytest.mark.parametrize(("sharing", "expected"), [("off", False), ("auto", False), ("on", True)])
def test_auto_leaves_what_saves_little(sharing: PrefixSharing, expected: bool) -> None:
    assert is_worth_sharing(4, 100, sharing) is expected
    assert is_worth_sharing(6, 100, sharing) is (sharing != "off")
    assert not is_worth_sharing(0, 100, sharing)


def test_groups_that_do_not_pay_are_taken_apart() -> None:
    documents = [*group(30, (3, 3), seed=1), *group(2, (40, 40), seed=2)]
    assert split_unshared_groups(documents, [(0, 1), (2, 3)], "auto") == [(0, 1), (2,), (3,)]
    assert split_unshared_groups(documents, [(0, 1), (2, 3)], "off") == [(0,), (1,), (2,), (3,)]


@settings(max_examples=num_examples(50))
@given(st.lists(st.tuples(*[st.integers(1, 12)] * 3, st.integers(0, 12)), min_size=1, max_size=5))
def test_pairs_take_the_tokens_that_the_plan_counts(pairs: list[tuple[int, int, int, int]]) -> None:
    rows = [
        tuple(group(prompt, replies, seed=i, num_alike=alike))
        for i, (prompt, *replies, alike) in enumerate(pairs)
    ]
    dataset = dataset_of(rows)
    for sharing in ("off", "on", "auto"):
        batch = collate(rows, range(len(rows)), shape=shape_of(prefix_sharing=sharing)).packed
        planned = sum(num_packed_tokens(dataset, row, sharing) for row in range(len(rows)))
        assert batch.num_tokens == planned == batch.input_ids_BT.numel()


def dataset_of(pairs: Sequence[tuple[Document, ...]]) -> TokenDataset:
    """Of a prompt and its replies each."""
    pieces: list[Sequence[int]] = []
    for pair in pairs:
        start = pair[0].responses[0].start
        pieces += [pair[0].token_ids[:start], *(each.token_ids[start:] for each in pair), ()]
    return TokenDataset(
        documents_per_row=2,
        token_ids_T=np.array([token for piece in pieces for token in piece], dtype=np.int32),
        edges_E=np.array([0, *accumulate(map(len, pieces))][:-1]),
        details_C=np.zeros(0, dtype=np.uint8),
        bounds_N4=np.array([(4 * i, 4 * i + 4, 0, 0) for i in range(len(pairs))]),
        num_tokens=np.array([sum(map(len, pair)) for pair in pairs]),
        num_label_tokens=np.array([sum(each.num_label_tokens for each in pair) for pair in pairs]),
        keys_N32=np.zeros((len(pairs), 32), dtype=np.uint8),
    )


# --- which completions go together
# -------------------------------------------------------------------

groups_of_lengths = st.lists(
    st.tuples(
        st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 16)
    ),
    max_size=6,
)


@settings(max_examples=num_examples(60))
@given(groups_of_lengths, st.integers(1, 4), st.integers(1, 3), st.integers(32, 120))
def test_every_plan_of_groups(
    groups: list[tuple[int, list[int], int]], num_ranks: int, num_mini_batches: int, capacity: int
) -> None:
    documents = [
        each
        for i, (prompt, replies, alike) in enumerate(groups)
        for each in group(prompt, replies, seed=i, num_alike=alike)
    ]
    plans = {
        sharing: plan_rollouts(
            documents,
            num_ranks=num_ranks,
            max_tokens_per_microbatch=capacity,
            num_mini_batches=num_mini_batches,
            prefix_sharing=sharing,
        )
        for sharing in ("off", "on", "auto")
    }
    contents = {}
    for sharing, plan in plans.items():
        everyone = []
        for of_ranks in zip(*plan, strict=True):
            assert len({len(microbatches) for microbatches in of_ranks}) == 1
            for microbatch in (
                microbatch for microbatches in of_ranks for microbatch in microbatches
            ):
                assert list(microbatch) == sorted(microbatch)
                packed = build_rollout_batch(
                    [rollout(documents[i]) for i in microbatch], prefix_sharing=sharing
                ).packed
                assert packed.num_tokens <= capacity
            everyone.append(
                sorted(i for microbatches in of_ranks for mb in microbatches for i in mb)
            )
        contents[sharing] = everyone
    # Whatever is shared, each update learns from the same completions.
    assert contents["off"] == contents["on"] == contents["auto"]
    assert sorted(i for minibatch in contents["off"] for i in minibatch) == list(
        range(len(documents))
    )


def rollout(document: Document) -> RolloutSample:
    return RolloutSample(
        document=document,
        engine_logprobs=tuple(-0.1 * (i + 1) for i in range(document.num_label_tokens)),
        advantage=float(len(document)),
    )


def rows_of_ranks(
    documents: list[Document], num_ranks: int, sharing: PrefixSharing, capacity: int
) -> list[list[int]]:
    """The number of tokens of each row of each rank."""
    work = plan_steps_of_ranks(
        [rollout(document) for document in documents],
        num_ranks=num_ranks,
        max_tokens_per_microbatch=capacity,
        num_mini_batches=1,
        prefix_sharing=sharing,
    )
    rows = []
    for step in work:
        (minibatch,) = build_rollout_minibatches(step)
        rows.append([batch.packed.num_tokens for batch in minibatch.microbatches])
    return rows


def test_groups_are_cut_only_where_ranks_would_be_idle() -> None:
    four = [each for i in range(4) for each in group(101, [20] * 8, seed=i)]
    assert rows_of_ranks(four, 2, "auto", 10_000) == [[2 * (100 + 8 * 21)]] * 2
    assert rows_of_ranks(four, 2, "off", 10_000) == [[2 * 8 * 121]] * 2
    assert rows_of_ranks(group(101, [20] * 8, seed=0), 2, "auto", 10_000) == [[100 + 4 * 21]] * 2
    # The prompt is most of it. Two ranks with a copy each, one of them idle for three groups: still
    # less for the busiest than copies for all.
    three = [each for i in range(3) for each in group(401, [2] * 8, seed=i)]
    assert max(map(sum, rows_of_ranks(three, 2, "auto", 10_000))) <= 2 * (400 + 8 * 3)


@pytest.mark.parametrize("capacity", [8400, 8440, 9000])
def test_row_takes_no_more_than_was_planned(capacity: int) -> None:
    """Two short replies share their prompt; beside two long ones that is little of the row, and
    still planned so.
    """
    (rows,) = rows_of_ranks(group(100, [20, 20, 4000, 4000], seed=0), 1, "auto", capacity)
    assert max(rows) <= capacity


def test_runs_of_one_prompt() -> None:
    documents = [*group(3, (1, 2), seed=1), *group(3, (1,), seed=2), *group(3, (2, 2), seed=1)]
    assert find_prompt_runs(documents) == [(0, 1), (2,), (3, 4)]


def test_values_of_rollouts_are_in_the_order_of_their_labels() -> None:
    documents = [document([5, 9, 2], [7]), document([5, 9, 2], [8, 3])]
    batch = build_rollout_batch([rollout(each) for each in documents], prefix_sharing="on")
    assert batch.packed.labels_BT.tolist() == [[_, _, 7, _, 8, 3, _]]
    torch.testing.assert_close(
        RLValues.read(batch.values).engine_logprobs_N, torch.tensor([-0.1, -0.1, -0.2])
    )
    assert RLValues.read(batch.values).advantages_N.tolist() == [4, 5, 5]


def test_values_of_a_tree_are_those_of_each_sample() -> None:
    """The first and the last begin alike, so the last lies behind the first; each has its own
    weights where they do.
    """
    turn = (7,) * 9
    samples = [
        rollout(document([5, 9, 2], reply)) for reply in ((*turn, 1, 1, 1), (3,), (*turn, 2))
    ]
    streams = {"ce": (0.0,) * 9 + (1.0,), "rl": (2.0,) * 10}
    samples[2] = replace(samples[2], weights=streams)
    batch = build_rollout_batch(samples, prefix_sharing="on")
    assert batch.packed.sequence_ids_N.tolist() == [0] * 12 + [2] * 10 + [1]
    assert batch.packed.label_positions_N.tolist() == [*range(2, 14), *range(2, 11), 15, 17]
    assert RLValues.read(batch.values).advantages_N.tolist() == [15] * 12 + [13] * 10 + [4]
    values = RLValues.read(batch.values)
    assert values.rl.weights_M is not None and values.ce is not None
    assert values.rl.weights_M.tolist() == [1] * 12 + [2] * 10 + [1]
    assert values.ce.tokens_M is not None and values.ce.tokens_M.tolist() == [21]


# --- what is computed
# --------------------------------------------------------------------------------


DOCUMENTS = [
    *group(20, (5, 9, 5, 1, 12), seed=1),  # longer than the window
    *group(4, (2, 3), seed=2),  # within it
    *group(WINDOW, (WINDOW + 1, 3 * WINDOW), seed=3),
    *group(11, (6,), seed=4),
]
GROUPS = [(0, 1, 2, 3, 4), (5, 6), (7, 8), (9,)]


def results(
    model: Transformer, batch: PackedBatch, *, device: torch.device = CPU
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of each document, and the gradient of a weighted sum of them."""
    scores = token_logprobs(model, batch, device=device)
    sums_S, _ = sum_by_sequence(scores.logprobs_N, scores.sequence_ids_N, batch.num_sequences)
    weights_S = torch.linspace(-1, 1, len(sums_S), device=device)
    gradients = torch.autograd.grad((sums_S * weights_S).sum() / 50, list(model.parameters()))
    return sums_S.detach(), dict(
        zip([name for name, _ in model.named_parameters()], gradients, strict=True)
    )


def assert_same(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_is_unshared(family: str) -> None:
    model = random_model(family)
    unshared, shared = (
        pack_documents(DOCUMENTS),
        pack_documents(DOCUMENTS, groups=GROUPS, pad_to_multiple_of=8),
    )
    assert shared.num_tokens < unshared.num_tokens
    assert_same(results(model, shared), results(model, unshared))


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_and_their_entropies(family: str) -> None:
    model = random_model(family)
    with torch.no_grad():
        ours, expected = (
            token_logprobs(model, batch, device=CPU, temperature=0.7, with_entropy=True)
            for batch in (pack_documents(DOCUMENTS, groups=GROUPS), pack_documents(DOCUMENTS))
        )
    assert_same(ours.logprobs_N, expected.logprobs_N)
    assert_same(ours.entropy_N, expected.entropy_N)
    assert torch.equal(ours.sequence_ids_N, expected.sequence_ids_N)


@pytest.mark.parametrize("mode", ["full", "selected_modules", "selected_ops"])
def test_computed_again_in_the_backward_pass(mode: str) -> None:
    model, shared = new_model("olmo3"), pack_documents(DOCUMENTS, groups=GROUPS)
    expected = results(model, shared)
    options = {"modules": ["blocks.*.attention"]} if mode == "selected_modules" else {}
    model.apply_activation_checkpointing(TransformerActivationCheckpointingMode(mode), **options)
    sums_S, gradients = results(model, shared)
    assert torch.equal(sums_S, expected[0])
    assert_same(list(gradients.values()), list(expected[1].values()))


def test_documents_of_a_group_do_not_see_each_other() -> None:
    model = random_model("llama")
    prompt = (3, 1, 4, 1, 5)
    logprobs = []
    for neighbour in ((9, 2, 6), (7, 7, 7)):
        batch = pack_documents(
            [document(prompt, neighbour), document(prompt, (8, 8))], groups=[(0, 1)]
        )
        with torch.no_grad():
            logprobs.append(token_logprobs(model, batch, device=CPU).logprobs_N[3:])
    assert torch.equal(*logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_is_unshared_on_a_gpu(family: str) -> None:
    """Log-probs and gradients, as close to float32 as without sharing."""
    device = torch.device("cuda")
    model = new_model(family).to(device, torch.bfloat16)
    exact_S, exact = results(new_model(family), pack_documents(DOCUMENTS))
    errors = []
    for batch in (pack_documents(DOCUMENTS, groups=GROUPS), pack_documents(DOCUMENTS)):
        sums_S, gradients = results(model, batch, device=device)
        pairs = [(sums_S, exact_S), *((gradients[name], exact[name]) for name in exact)]
        errors.append([(a.float().cpu() - b).norm() / b.norm() for a, b in pairs])
    assert all(ours <= 2 * theirs + 1e-2 for ours, theirs in zip(*errors, strict=True))

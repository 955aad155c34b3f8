"""Documents that begin alike to any depth: packed as a tree they compute what each computes in a
row of its own.
"""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_core.nn.transformer import Transformer

from open_instruct.batching.documents import pack_documents
from open_instruct.batching.prefixes import count_shared_prefix, order_branches
from open_instruct.core.families import FAMILIES
from open_instruct.core.records import Document, PackedBatch, Span
from open_instruct.training.model.forward import token_logprobs
from tests.tiers import mark_extended, num_examples
from tests.unit.small_models import CPU, VOCAB_SIZE, random_model
from tests.unit.varlen_on_cpu import as_on_cuda, varlen_kernels

__all__ = ["as_on_cuda", "varlen_kernels"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_DOCUMENTS = 10


def a_tree(seed: int, *, depth: int, branching: int) -> list[Document]:
    """Conversations in no order; turns are learned or not, and some documents learn fewer of theirs
    than others do.
    """
    rng = random.Random(seed)

    def turn() -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))

    paths = [[turn()]]
    for _ in range(depth):
        paths = [[*path, turn()] for path in paths for _ in range(rng.randint(1, branching))]
        paths = rng.sample(paths, min(len(paths), MOST_DOCUMENTS))
    paths.append(paths[0])
    return [
        document_of(path, [1, *rng.sample(range(2, depth + 1), rng.randint(0, depth - 1))])
        for path in paths
    ]


def document_of(turns: Sequence[tuple[int, ...]], learned: Sequence[int]) -> Document:
    responses, num_before = [], 0
    for index, turn in enumerate(turns):
        if index in learned:
            responses.append(Span(start=num_before, stop=num_before + len(turn)))
        num_before += len(turn)
    return Document(
        token_ids=tuple(token for turn in turns for token in turn), responses=tuple(responses)
    )


trees = st.builds(
    a_tree, st.integers(0, 10**6), depth=st.integers(1, 5), branching=st.integers(1, 4)
)


def results(
    model: Transformer,
    batches: Sequence[PackedBatch],
    values: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Log-probs of each document, a loss of them that is not linear, and its gradients; batches
    hold documents in turn.

    `values` are an advantage and the log-prob that was, of each label of each document.
    """
    logprobs: list[torch.Tensor] = []
    for batch in batches:
        scores = token_logprobs(model, batch, device=CPU)
        logprobs += [
            scores.logprobs_N[scores.sequence_ids_N == index]
            for index in range(batch.num_sequences)
        ]
    losses = []
    for ours, theirs in zip(logprobs, values, strict=True):
        advantages, old = torch.tensor(theirs).T
        losses.append(
            -(advantages * (ours - ours.detach() + 0.1 * old).exp() * ours.sigmoid()).sum()
        )
    loss = torch.stack(losses).sum() / sum(map(len, values))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [each.detach() for each in logprobs], loss.detach(), list(gradients)


def compare(model: Transformer, documents: list[Document], seed: int) -> None:
    rng = random.Random(seed)
    values = [
        [(rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(each.num_label_tokens)]
        for each in documents
    ]
    together = pack_documents(
        documents, groups=[tuple(range(len(documents)))], pad_to_multiple_of=4
    )
    alone = results(model, [pack_documents([each]) for each in documents], values)
    torch.testing.assert_close(results(model, [together], values), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", mark_extended(FAMILIES, but=["olmo2", "olmo_hybrid"]))
def test_tree_computes_what_separate_rows_compute(family: str) -> None:
    @settings(max_examples=num_examples(12), deadline=None)
    @given(trees, st.integers(0, 99))
    def check(documents: list[Document], seed: int) -> None:
        compare(random_model(family), documents, seed)

    check()


@pytest.mark.parametrize("family", mark_extended(FAMILIES, but=["olmo2", "olmo_hybrid"]))
def test_cuda_attention_over_a_tree_gives_the_same(family: str, as_on_cuda: None) -> None:
    documents = a_tree(37, depth=5, branching=3)
    together = pack_documents(documents, groups=[tuple(range(len(documents)))])
    assert together.prefix_lengths is not None and len(set(together.prefix_lengths)) > 3
    compare(random_model(family), documents, seed=7)


@settings(max_examples=num_examples(40))
@given(trees)
def test_no_order_saves_more(documents: list[Document]) -> None:
    """What a walk of the tree saves is a spanning tree of greatest weight;

    Prim's algorithm finds one.
    """
    row = order_branches(documents, range(len(documents)))
    assert sorted(branch.document for branch in row) == list(range(len(documents)))
    for (before, _), (document, prefix_length) in pairwise(row):
        assert prefix_length <= count_shared_prefix(documents[before], documents[document])
    best = {i: count_shared_prefix(documents[0], each) for i, each in enumerate(documents) if i > 0}
    total = 0
    while best:
        nearest = max(best, key=best.__getitem__)
        total += best.pop(nearest)
        for i in best:
            best[i] = max(best[i], count_shared_prefix(documents[nearest], documents[i]))
    assert sum(branch.prefix_length for branch in row) == total

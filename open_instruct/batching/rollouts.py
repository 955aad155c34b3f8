"""The completions of one step, divided into mini-batches, ranks and microbatches, then packed into
tensors.

Every mini-batch is one optimizer update. Samples without a policy loss, such as written
conversations, lie in microbatches of their own, so that they do not change how completions are
computed. Completions without a loss (groups without a signal, masked truncated ones) are left out
before, so they count in no denominator.

Legend: N labelled tokens of a microbatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise, repeat, zip_longest
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from open_instruct.batching.balance import Microbatches, balance_microbatches, pack_best_fit
from open_instruct.batching.documents import pack_documents
from open_instruct.batching.prefixes import (
    Branch,
    find_prompt_runs,
    is_worth_sharing,
    order_branches,
)
from open_instruct.config.sections import PrefixSharing
from open_instruct.core.batch_values import RLValues, Stream
from open_instruct.core.records import (
    USUAL_WEIGHTS,
    Batch,
    Document,
    PackedBatch,
    RolloutSample,
    StepBatch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMiniBatch:
    """One data-parallel rank's part of a mini-batch, with the counts over all ranks.

    Every rank has equally many `microbatches`; some may be empty. Those of completions come first,
    as many as `rl_microbatches` among the counts, on every rank.
    """

    microbatches: tuple[tuple[RolloutSample, ...], ...]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One data-parallel rank's part of a step: at least one mini-batch, which may be empty."""

    minibatches: tuple[RankMiniBatch, ...]
    prefix_sharing: PrefixSharing = "off"
    num_routes: int = 0  # experts of each token that engines report, over all layers

    @property
    def num_tokens_global(self) -> int:
        """Tokens of the step on all ranks, prompts included, padding not."""
        return sum(minibatch.counts["tokens"] for minibatch in self.minibatches)


class Chunk(NamedTuple):
    """Completions that stay together, as indices, and the tokens that they take in a packed row."""

    samples: tuple[int, ...]
    num_tokens: int


def plan_rollouts(
    documents: Sequence[Document],
    samples: Sequence[int] | None = None,
    *,
    num_ranks: int,
    max_tokens_per_microbatch: int,
    num_mini_batches: int,
    prefix_sharing: PrefixSharing = "off",
) -> tuple[tuple[Microbatches, ...], ...]:
    """`[rank][mini_batch][microbatch]`: the indices of its samples, ascending.

    A pure function of its arguments. The samples are the `samples` ones of the documents, or all.

    - Mini-batches are runs of samples in the given order; their numbers of samples differ by at
      most one. They do not depend on the ranks, so neither does the update. With fewer samples than
      `num_mini_batches` there are as many mini-batches as samples; without any there is one empty
      mini-batch.
    - Ranks: within a mini-batch, numbers of samples differ by at most one, numbers of tokens by at
      most the longest sample's. Where completions share their prompt, this holds for chunks of a
      group: groups are cut into the number of equal chunks that gives the busiest rank the fewest
      tokens.
    - Microbatches hold at most `max_tokens_per_microbatch` tokens, which must hold the longest
      sample; within a mini-batch every rank has equally many; some may be empty.

    Example: samples of 5, 3, 4 and 2 tokens, two ranks, 6 tokens a microbatch, two mini-batches::

        ((((0,),), ((2,),)), (((1,),), ((3,),)))
    """
    assert num_ranks >= 1 and num_mini_batches >= 1
    samples = range(len(documents)) if samples is None else samples
    longest = max((len(documents[i]) for i in samples), default=0)
    assert longest <= max_tokens_per_microbatch, (
        f"{max_tokens_per_microbatch} tokens do not hold a sample of {longest}"
    )
    count = min(num_mini_batches, max(1, len(samples)))
    bounds = [len(samples) * index // count for index in range(count + 1)]
    capacity = max_tokens_per_microbatch
    minibatches: list[tuple[Microbatches, ...]] = []
    for start, stop in pairwise(bounds):
        plans = []
        for chunks in _list_chunkings(documents, samples[start:stop], capacity, prefix_sharing):
            plans.append(_plan_chunks(chunks, num_ranks=num_ranks, capacity=capacity))
        _, plan = min(plans, key=itemgetter(0))  # of equal ones the first, with the fewest chunks
        minibatches.append(plan)
    return tuple(zip(*minibatches, strict=True))


def _list_chunkings(
    documents: Sequence[Document],
    samples: Sequence[int],
    capacity: int,
    sharing: PrefixSharing,
) -> Iterator[list[Chunk]]:
    """The ways to cut groups: whole, halves, quarters, down to single samples.

    If nothing is shared, it is the last alone. Groups are cut in the order of their trees, so that
    those which share most stay together.
    """
    runs = [] if sharing == "off" else find_prompt_runs([documents[i] for i in samples])
    groups = [order_branches(documents, [samples[i] for i in run]) for run in runs]
    size = max(map(len, groups), default=1)
    while size > 1:
        chunks: list[Chunk] = []
        for group in groups:
            num_parts = -(-len(group) // size)
            edges = [len(group) * part // num_parts for part in range(num_parts + 1)]
            for first, end in pairwise(edges):
                chunks.extend(_halve_to_fit(documents, group[first:end], capacity, sharing))
        yield chunks
        size = -(-size // 2)
    yield [Chunk((i,), len(documents[i])) for i in samples]


def _halve_to_fit(
    documents: Sequence[Document],
    branches: Sequence[Branch],
    capacity: int,
    sharing: PrefixSharing,
) -> list[Chunk]:
    """The samples as one chunk, halved until each fits a microbatch.

    Where sharing does not pay, they are single ones. The first of the `branches` has nothing before
    it here.
    """
    samples = tuple(branch.document for branch in branches)
    num_tokens = sum(len(documents[i]) for i in samples)
    num_saved = sum(branch.prefix_length for branch in branches[1:])
    if not is_worth_sharing(num_saved, num_tokens, sharing):
        return [Chunk((i,), len(documents[i])) for i in samples]
    if num_tokens - num_saved <= capacity:
        return [Chunk(samples, num_tokens - num_saved)]
    half = len(branches) // 2
    return [
        *_halve_to_fit(documents, branches[:half], capacity, sharing),
        *_halve_to_fit(documents, branches[half:], capacity, sharing),
    ]


def _plan_chunks(
    chunks: Sequence[Chunk], *, num_ranks: int, capacity: int
) -> tuple[int, tuple[Microbatches, ...]]:
    """The tokens of the busiest rank, and the plan: each rank's microbatches of samples."""
    num_tokens = [chunk.num_tokens for chunk in chunks]
    plan = balance_microbatches(
        num_tokens,
        num_ranks=num_ranks,
        cut=partial(pack_best_fit, num_tokens_of_sample=num_tokens, capacity=capacity),
    )
    tokens_of_ranks = []
    plan_of_samples = []
    for microbatches in plan:
        tokens_of_ranks.append(sum(num_tokens[i] for i in chain(*microbatches)))
        plan_of_samples.append(
            tuple(_list_samples(chunks, microbatch) for microbatch in microbatches)
        )
    return max(tokens_of_ranks), tuple(plan_of_samples)


def _list_samples(chunks: Sequence[Chunk], microbatch: Sequence[int]) -> tuple[int, ...]:
    """The samples of a microbatch of chunks, ascending."""
    return tuple(sorted(chain.from_iterable(chunks[i].samples for i in microbatch)))


def plan_steps_of_ranks(
    samples: Sequence[RolloutSample],
    *,
    num_ranks: int,
    max_tokens_per_microbatch: int,
    num_mini_batches: int,
    prefix_sharing: PrefixSharing = "off",
) -> tuple[RankStep, ...]:
    """Each data-parallel rank's part of the step that learns from `samples`; see `plan_rollouts`.

    Samples without a policy loss are spread over the same mini-batches, behind the completions.
    """
    has_rl = [any(sample.stream_weights("rl")) for sample in samples]
    completions = [i for i in range(len(samples)) if has_rl[i]]
    conversations = [i for i in range(len(samples)) if not has_rl[i]]
    plan_part = partial(
        plan_rollouts,
        [sample.document for sample in samples],
        num_ranks=num_ranks,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        prefix_sharing=prefix_sharing,
    )
    plan = completion_plan = plan_part(completions, num_mini_batches=num_mini_batches)
    if conversations:
        plan = _append_microbatches(plan, plan_part(conversations, num_mini_batches=len(plan[0])))
    counts = []
    for ranks, rl_microbatches in zip(zip(*plan, strict=True), completion_plan[0], strict=True):
        microbatches = chain.from_iterable(ranks)
        all_samples = [samples[i] for i in chain.from_iterable(microbatches)]
        counts.append(count_denominators(all_samples) | {"rl_microbatches": len(rl_microbatches)})
    num_routes = max(map(_count_routes, samples), default=0)
    steps = []
    for minibatch_plans in plan:
        minibatches = []
        for minibatch_plan, minibatch_counts in zip(minibatch_plans, counts, strict=True):
            parts = tuple(tuple(samples[i] for i in microbatch) for microbatch in minibatch_plan)
            minibatches.append(RankMiniBatch(microbatches=parts, counts=minibatch_counts))
        steps.append(
            RankStep(
                minibatches=tuple(minibatches),
                prefix_sharing=prefix_sharing,
                num_routes=num_routes,
            )
        )
    return tuple(steps)


def _append_microbatches(
    plan: tuple[tuple[Microbatches, ...], ...], more: tuple[tuple[Microbatches, ...], ...]
) -> tuple[tuple[Microbatches, ...], ...]:
    """`[rank][mini_batch]`: the microbatches of `plan` and behind them those of `more`.

    `more` may have fewer or more mini-batches.
    """
    minibatches = []
    for ours, theirs in zip(plan, more, strict=True):
        pairs = zip_longest(ours, theirs, fillvalue=())
        minibatches.append(tuple(first + second for first, second in pairs))
    return tuple(minibatches)


def _count_routes(sample: RolloutSample) -> int:
    """The experts of each token of the sample, over all layers; 0 where they are not known."""
    if not sample.routes:
        return 0
    num_bytes = len(sample.routes) // (len(sample.document) - 1)
    return num_bytes // np.dtype(np.int16).itemsize


def count_denominators(samples: Sequence[RolloutSample]) -> dict[str, int]:
    """The denominators of losses: `rows` (samples), `labels`, `tokens`, and those of each stream.

    `STREAM_rows` and `STREAM_labels` count those with a weight other than 0 in the stream.
    """
    counts = {
        "rows": len(samples),
        "labels": sum(len(sample.engine_logprobs) for sample in samples),
        "tokens": sum(len(sample.document) for sample in samples),
    }
    for stream in USUAL_WEIGHTS:
        num_labels = [sum(map(bool, sample.stream_weights(stream))) for sample in samples]
        counts[f"{stream}_rows"] = sum(map(bool, num_labels))
        counts[f"{stream}_labels"] = sum(num_labels)
    return counts


def build_rollout_batch(
    samples: Sequence[RolloutSample],
    *,
    pad_to_multiple_of: int = 1,
    prefix_sharing: PrefixSharing = "off",
    num_routes: int = 0,
) -> Batch:
    """The tensors of one microbatch: its samples in one packed row.

    Without samples it is one unlabelled document. Its values are `RLValues`, whose streams list
    their tokens where a sample has other than the usual weights.
    """
    documents = [sample.document for sample in samples]
    groups = None
    if prefix_sharing != "off":
        # The plan has decided that sharing pays, so runs of one prompt are not judged again here.
        groups = find_prompt_runs(documents)
    packed = pack_documents(documents, pad_to_multiple_of=pad_to_multiple_of, groups=groups)
    # Labels are in the order in which samples lie in the row, those of a shared token once for each
    # of them: so every sample has its own advantages, weights and log-probs there.
    samples = [samples[i] for i in packed.sequence_ids_N.unique_consecutive().tolist()]
    num_values = sum(len(sample.engine_logprobs) for sample in samples)
    num_labels = len(packed.sequence_ids_N)
    assert num_values == num_labels, f"{num_values} log-probs for {num_labels} labels"
    if num_routes:
        packed = replace(packed, routes_TR=_build_routes(samples, packed, num_routes))
    engine_logprobs: list[float] = []
    advantages: list[float] = []
    for sample in samples:
        engine_logprobs += sample.engine_logprobs
        advantages += [sample.advantage] * len(sample.engine_logprobs)
    values = RLValues(
        engine_logprobs_N=torch.tensor(engine_logprobs), advantages_N=torch.tensor(advantages)
    )
    if any(sample.weights for sample in samples):
        values = replace(
            values,
            rl=_build_stream("rl", samples),
            kl=_build_stream("kl", samples),
            ce=_build_stream("ce", samples),
        )
    return Batch(packed=packed, row_ids=(), values=values)


def _build_routes(
    samples: Sequence[RolloutSample], packed: PackedBatch, num_routes: int
) -> torch.Tensor:
    """`routes_TR` of a row of `samples`.

    A shared token has the experts that the first of its documents had.
    """
    routes_TR = np.full((packed.input_ids_BT.numel(), num_routes), -1, dtype=np.int16)
    starts = accumulate(packed.document_lengths or (), initial=0)
    prefix_lengths = packed.prefix_lengths or repeat(0)
    for sample, start, prefix_length in zip(samples, starts, prefix_lengths, strict=False):
        routes = np.frombuffer(sample.routes, dtype=np.int16).reshape(-1, num_routes)
        added_routes = routes[prefix_length:]
        routes_TR[start : start + len(added_routes)] = added_routes
    return torch.from_numpy(routes_TR)


def _build_stream(name: str, samples: Sequence[RolloutSample]) -> Stream:
    """The tokens that have a weight in the stream `name`."""
    weights = chain.from_iterable(sample.stream_weights(name) for sample in samples)
    weights_N = torch.tensor(list(weights))
    tokens_M = weights_N.nonzero().squeeze(1)
    return Stream(tokens_M=tokens_M, weights_M=weights_N[tokens_M])


def build_rollout_minibatches(
    step: RankStep, *, pad_to_multiple_of: int = 1
) -> tuple[StepBatch, ...]:
    """The tensors of a rank's part of a step: one `StepBatch` for each optimizer update."""
    build_batch = partial(
        build_rollout_batch,
        pad_to_multiple_of=pad_to_multiple_of,
        prefix_sharing=step.prefix_sharing,
        num_routes=step.num_routes,
    )
    batches = []
    for minibatch in step.minibatches:
        microbatches = tuple(map(build_batch, minibatch.microbatches))
        batches.append(StepBatch(microbatches=microbatches, counts=minibatch.counts))
    return tuple(batches)

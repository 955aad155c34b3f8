"""The collectives over activations, of tensor, context and expert parallelism.

Those of tensor parallelism are `apply_tp`'s of OLMo-core's blocks, attention, feed-forward and
head, which keep hidden states split along the tokens between the layers (sequence parallelism,
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

T tokens of a microbatch on one context rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.exchanges import (
    Axis,
    Calls,
    Collective,
    Exchange,
    build_exchange,
    group_span,
)
from open_instruct.planning.memory.head import logit_chunks
from open_instruct.planning.memory.piece import FLOAT32
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload

# What is exchanged, in the words of a plan.
WHOLE = "activations, whole for a matrix"
SUMMED = "activations, summed and split again"
SWAPPED = "features and logits, split otherwise"


def activation_exchanges(
    shape: ModelShape,
    layout: ShardLayout,
    workload: Workload,
    num_passes: int,
    num_values: int,
    *,
    trains: bool,
) -> Iterator[Exchange]:
    """The exchanges of `num_passes` over a microbatch: forward alone, or forward and backward.

    `num_values` of each label are brought together: its log-prob, its entropy. With 0 the head is
    not run.
    """
    by_axis: dict[Axis, Iterable[Calls]] = {
        "tensor": tensor_calls(shape, layout, workload, num_values, trains=trains),
        "context": context_calls(shape, layout, workload, num_values, trains=trains),
        "expert": expert_calls(shape, workload, trains=trains),
    }
    for axis, calls in by_axis.items():
        yield from repeat_calls(axis, calls, layout, num_passes)


def repeat_calls(
    axis: Axis, calls: Iterable[Calls], layout: ShardLayout, num_passes: int
) -> Iterator[Exchange]:
    """The calls of `num_passes` in the groups of an axis; none in groups of one rank.

    Args:
        calls: of one pass over a microbatch.
    """
    if group_span(layout, axis)[0] == 1:
        return
    for each in calls:
        if each.num_calls > 0:
            num_calls = num_passes * each.num_calls
            yield build_exchange(layout, axis, replace(each, num_calls=num_calls))


def num_head_positions(layout: ShardLayout, workload: Workload) -> int:
    """Positions at which this rank computes logits: its labels; a part of all of several ranks."""
    if layout.tensor_parallel_degree > 1:
        return workload.tokens_per_microbatch // layout.model_parallel_degree
    return workload.label_tokens_per_microbatch // layout.context_parallel_degree


def tensor_calls(
    shape: ModelShape, layout: ShardLayout, workload: Workload, num_values: int, *, trains: bool
) -> Iterator[Calls]:
    """Korthikanti et al.'s sequence parallelism, see above."""
    degree = layout.tensor_parallel_degree
    layers = shape.num_layers
    item_bytes = workload.compute_bytes
    num_tokens = workload.tokens_per_microbatch // layout.context_parallel_degree
    hidden = num_tokens * shape.d_model * item_bytes
    backward = int(trains)
    # Embeddings that are frozen: no gradient goes below the first adapters.
    to_embeddings = int(trains and shape.adapters is None)
    attention_again = backward * workload.recomputes("attention")
    feed_forward_again = backward * workload.recomputes("feed_forward")
    blocks_again = backward * workload.recomputes("")

    # Each sublayer gathers its input, and scatters the sum of what its ranks put out; backwards the
    # other way round. Recomputation stops at the last tensor that is needed: that is before a
    # sublayer's scatter, unless a norm of the block comes after it.
    scatters_again = blocks_again * layers
    if shape.traits.norm_after:
        scatters_again += blocks_again * len(shape.windows)
    gathers_of_layer = 2 * (1 + backward) + attention_again + feed_forward_again
    sums_backward = (2 * layers - 1) * backward + to_embeddings
    # Embeddings put out a sum as well.
    num_gathers = layers * gathers_of_layer + to_embeddings
    num_scatters = 1 + 2 * layers + scatters_again + sums_backward
    yield Calls(what=WHOLE, collective="all_gather", num_bytes=hidden, num_calls=num_gathers)
    yield Calls(
        what=SUMMED,
        collective="reduce_scatter",
        num_bytes=hidden,
        num_calls=num_scatters,
    )

    if shape.traits.qk_norm != "none":
        # Queries and keys, split by heads, are split by tokens for their norms, then by heads
        # again.
        num_swaps = 2 * len(shape.windows) * (1 + backward + attention_again)
        for width in (shape.q_width, shape.kv_width):
            whole_bytes = num_tokens * width * item_bytes
            yield _swaps(whole_bytes, degree, num_swaps, on_cuda=workload.on_cuda)

    if num_values > 0:
        yield from _head_calls(shape, layout, workload, trains=trains)
    yield Calls(
        what="log-probs",
        collective="all_gather",
        num_bytes=num_tokens * FLOAT32,
        num_calls=num_values,
    )


def _head_calls(
    shape: ModelShape, layout: ShardLayout, workload: Workload, *, trains: bool
) -> Iterator[Calls]:
    """The calls of the head, chunk by chunk of its logits."""
    degree = layout.tensor_parallel_degree
    backward = int(trains)
    chunks = logit_chunks(shape, num_head_positions(layout, workload))
    again = int(trains and len(chunks) > 1)
    vocabulary = -(-shape.vocab_size // degree) * degree
    for positions in chunks:
        position_bytes = positions * degree * workload.compute_bytes
        hidden = position_bytes * shape.d_model
        yield Calls(what=WHOLE, collective="all_gather", num_bytes=hidden, num_calls=1 + again)
        yield Calls(
            what=SUMMED,
            collective="reduce_scatter",
            num_bytes=hidden,
            num_calls=backward,
        )
        whole_bytes = position_bytes * vocabulary
        num_swaps = 1 + again + backward
        yield _swaps(whole_bytes, degree, num_swaps, on_cuda=workload.on_cuda)


def _swaps(whole_bytes: int, degree: int, num_calls: int, *, on_cuda: bool) -> Calls:
    """A tensor that is split along one dim, then another; DTensor gathers it without CUDA."""
    collective: Collective = "all_gather"
    num_bytes = whole_bytes
    if on_cuda:
        collective = "all_to_all"
        num_bytes = whole_bytes // degree
    return Calls(what=SWAPPED, collective=collective, num_bytes=num_bytes, num_calls=num_calls)


def context_calls(
    shape: ModelShape, layout: ShardLayout, workload: Workload, num_values: int, *, trains: bool
) -> Iterator[Calls]:
    """Ulysses: around attention, tokens are swapped for heads.

    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.2. At the end of a forward pass every
    rank gets the losses of the whole row, and the entropies if they are recorded.
    """
    num_tokens = workload.tokens_per_microbatch // layout.context_parallel_degree
    # Queries, keys and values, and what attention puts out; so also what is remembered, with two
    # numbers for each head.
    widths: Counter[int] = Counter()
    widths[shape.q_width + 2 * shape.kv_width] += len(shape.windows)
    widths[shape.q_width] += len(shape.windows)
    for layer in shape.layers:
        delta = layer.delta
        if delta is not None:
            widths[sum(delta.widths) + 2 * delta.num_value_heads] += 1
            widths[delta.widths[-1]] += 1
    num_passes = 1
    if trains:
        num_passes = 2 + workload.recomputes("attention")
    for width, num_calls in widths.items():
        # Heads are split between tensor ranks already.
        whole_bytes = num_tokens * width * workload.compute_bytes
        yield Calls(
            what="tokens and heads in attention",
            collective="all_to_all",
            num_bytes=whole_bytes // layout.tensor_parallel_degree,
            num_calls=num_passes * num_calls,
        )
    yield Calls(
        what="losses of a row",
        collective="all_gather",
        num_bytes=FLOAT32 * workload.tokens_per_microbatch,
        num_calls=num_values,
    )


def expert_calls(shape: ModelShape, workload: Workload, *, trains: bool) -> Iterator[Calls]:
    """The exchanges of tokens with the ranks of their experts, if all experts get equally many.

    Source: `models/experts/routed.py`. The numbers of tokens travel before them, in 32 bits.
    """
    again = int(trains and workload.recomputes("feed_forward"))
    num_layers = sum(layer.num_experts > 0 for layer in shape.layers)
    num_pairs = workload.tokens_per_microbatch * shape.experts_per_token
    yield Calls(
        what="tokens at their experts",
        collective="all_to_all",
        num_bytes=num_pairs * shape.d_model * workload.compute_bytes,
        num_calls=num_layers * 2 * (1 + trains + again),
    )
    yield Calls(
        what="numbers of tokens",
        collective="all_to_all",
        num_bytes=4 * shape.num_experts,
        num_calls=num_layers * (1 + again),
    )

"""Every collective of a training step, from the shapes of the model, the layout and the flags
alone.

What is counted here is what the train module issues: tests/ranks/test_traffic.py runs it and
compares call for call. Not counted is what travels outside it: data, the trainer's bookkeeping,
checkpoints; nor the few numbers that metrics are, and those a row or token that a loss over the
whole global batch brings together. Where --lora_target_modules names no matrix of attention, the
backward pass of the first block, whose attention then has none, is counted all the same.

Those over activations are the gathers and scatters of tensor parallelism, and those of context
parallelism. Source: `apply_tp` of OLMo-core's blocks, attention, feed-forward and head, which keep
hidden states split along the tokens between the layers (sequence parallelism, Korthikanti et al.
2022, arXiv:2205.05198, section 4.2.2).

T tokens of a microbatch on one context rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.memory.head import logit_chunks
from open_instruct.planning.memory.piece import FLOAT32
from open_instruct.planning.memory.state import (
    gathered_bytes,
    is_split_stack,
    local_size,
    uses_muon,
)
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Scoring, Workload

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Axis = Literal["shard", "replica", "tensor", "context", "expert", "sync", "world", "all"]
# What, by which collective, bytes of a call, calls in one pass over a microbatch.
Calls = tuple[str, Collective, int, int]

# Muon orthogonalises in bfloat16.
MUON_BYTES = 2
WHOLE, SUMMED = "activations, whole for a matrix", "activations, summed and split again"
SWAPPED = "features and logits, split otherwise"
# Ways of the weights to the engines that use the network.
SENT_BY = ("nccl", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Calls of one collective with the same bytes, as one rank issues them in a step: the first
    rank of the layout.

    Where sizes do not divide, the first rank has the most.

    `bytes_per_call` is, of an all-gather, what comes out of it; of every other collective, what
    goes in: so of a reduce-scatter the whole gradient, of an all-reduce its tensor. `wire_bytes` is
    what all calls together send from each rank in a ring (of a broadcast, whose parts have many
    senders: what each receiver takes). A group of one rank issues its calls and sends nothing.

    Example: the gradients of 32 blocks of 809 MB in float32, in groups of 8::

        Exchange(what="gradients of a block, after it", collective="reduce_scatter", axis="shard",
                 num_calls=32,
                 bytes_per_call=809_533_440, group_size=8, wire_bytes=22_666_936_320,
                 crosses_nodes=False)
    """

    what: str
    collective: Collective
    axis: Axis
    num_calls: int
    bytes_per_call: int
    group_size: int
    wire_bytes: int
    crosses_nodes: bool
    # Of a group that crosses nodes: of its ranks, on the node where it has fewest.
    ranks_on_a_node: int = 1

    @property
    def num_bytes(self) -> int:
        """The bytes of all calls together."""
        return self.num_calls * self.bytes_per_call

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends, over all calls."""
        return self.num_bytes if self.collective == "broadcast" else self.wire_bytes

    @property
    def reach(self) -> str:
        """Among how many GPUs, and whether they leave the node."""
        return f"{self.group_size} {'across nodes' if self.crosses_nodes else 'in a node'}"


def ring_bytes(collective: Collective, num_bytes: int, group_size: int) -> int:
    """Bytes that each rank sends in a ring collective of `num_bytes` among `group_size` ranks: the
    lower bound.

    A ring passes every part but one on from each rank; an all-reduce does so twice, to add up and
    to hand out (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations").
    """
    return (2 if collective == "all_reduce" else 1) * num_bytes * (group_size - 1) // group_size


def exchange_in(
    layout: ShardLayout,
    axis: Axis,
    what: str,
    collective: Collective,
    num_bytes: int,
    num_calls: int,
    within: int = 0,
) -> Exchange:
    """Calls of `num_bytes` each in the groups of one axis of the layout, or `within` so many
    neighbours of each.
    """
    group_size, crosses_nodes, ranks_on_a_node = span_of(layout, axis, within)
    return Exchange(
        what=what,
        collective=collective,
        axis=axis,
        num_calls=num_calls,
        bytes_per_call=num_bytes,
        group_size=group_size,
        wire_bytes=num_calls * ring_bytes(collective, num_bytes, group_size),
        crosses_nodes=crosses_nodes,
        ranks_on_a_node=ranks_on_a_node,
    )


@lru_cache(maxsize=1024)
def span_of(layout: ShardLayout, axis: Axis, within: int = 0) -> tuple[int, bool, int]:
    """Size of an axis's groups, whether any crosses nodes, and the fewest ranks that such a group
    has on a node.
    """
    groups = groups_of(layout, axis)
    if within:
        groups = [
            group[at : at + within] for group in groups for at in range(0, len(group), within)
        ]
    straddling = layout.straddling(groups)
    rank_nodes = layout.rank_nodes
    ranks_by_node = [Counter(rank_nodes[rank] for rank in group) for group in straddling]
    fewest = min((min(counts.values()) for counts in ranks_by_node), default=1)
    return len(groups[0]), bool(straddling), fewest


def groups_of(layout: ShardLayout, axis: Axis) -> Sequence[tuple[int, ...]]:
    """The global ranks of every group of an axis."""
    # Those that have the same part of a matrix that ranks split.
    strides = {"world": layout.tensor_parallel_degree, "all": 1}
    if (stride := strides.get(axis)) is not None:
        return [tuple(range(first, layout.world_size, stride)) for first in range(stride)]
    groups: Sequence[tuple[int, ...]] = getattr(layout, f"{axis}_groups")
    return groups


def traffic_per_step(
    shape: ModelShape, layout: ShardLayout, workload: Workload
) -> tuple[Exchange, ...]:
    """The exchanges of one rank to learn in one step.

    That is forward and backward of all microbatches and the update, and passes without gradients
    before them.
    """
    if layout.single_device:
        return ()
    scored = (
        each for scoring in workload.scorings for each in scoring_pass(scoring, layout, workload)
    )
    return (*scored, *_updates(shape, layout, workload))


def scoring_pass(scoring: Scoring, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Passes over the microbatches of an update without gradients: every unit is gathered once in
    each.
    """
    num_passes = scoring.num_rounds * workload.num_microbatches
    for unit in scoring.shape.units:
        yield from _gathers(layout, workload, unit, num_passes)
    yield from activation_exchanges(
        scoring.shape, layout, workload, num_passes, scoring.num_values, trains=False
    )


def _updates(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    num_updates, num_passes = workload.num_updates, workload.num_updates * workload.num_microbatches
    num_reductions = num_updates if workload.reduces_last else num_passes
    for unit in shape.units:
        # Every unit is freed after its forward pass (`reshard_after_forward`, also of the root),
        # and gathered again in the backward pass; checkpointing does not add to that, since
        # recomputation happens within. Embeddings of their own are not needed backwards.
        num_gathers = 1 if unit.name == "embeddings" else 2
        yield from _gathers(layout, workload, unit, num_passes * num_gathers)
        # `parallel_configs`: gradients are reduced in float32 whatever they are computed in.
        for axis, parameters in _by_axis(unit.trained, layout).items():
            gradient_bytes = gathered_bytes(parameters, layout, FLOAT32)
            if span_of(layout, axis)[0] > 1:
                what, num_calls = "gradients of a block, after it", num_reductions * unit.count
                yield exchange_in(layout, axis, what, "reduce_scatter", gradient_bytes, num_calls)
            if axis == "shard":
                # OLMo-core lets the replicas' sum wait for the last microbatch of an update.
                shard_bytes = gradient_bytes // layout.shard_group_size
                what, num_calls = "gradients of a shard, over replicas", num_updates * unit.count
                yield exchange_in(layout, "replica", what, "all_reduce", shard_bytes, num_calls)
    yield from activation_exchanges(
        shape, layout, workload, num_passes, workload.num_values, trains=True
    )
    # Tensor ranks have whole norms, which see a part of the tokens each, and whole halves of
    # adapters, beside which a matrix is split. Whole gradients are added up in float32.
    norms = Counter(
        each.num_params for each in shape.parameters if each.is_trained and each.tensor_axis is None
    )
    adds_up = workload.reduces_last and workload.num_microbatches > 1
    for width, count in norms.items() if layout.tensor_parallel_degree > 1 else ():
        num_bytes = width * (FLOAT32 if adds_up else workload.compute_bytes)
        yield exchange_in(
            layout, "tensor", "gradients of norms", "all_reduce", num_bytes, num_reductions * count
        )
    # One norm for every parameter, which DTensor stacks and adds up along each axis that cuts some
    # of them. Replicas that have parts of experts are among them.
    cutting: Axis = "world" if layout.expert_parallel_degree > 1 else "shard"
    axes: tuple[Axis, ...] = (cutting, "tensor")
    for axis in axes:
        if span_of(layout, axis)[0] > 1:
            num_bytes = FLOAT32 * sum(each.is_trained for each in shape.parameters)
            yield exchange_in(
                layout, axis, "norm of the gradient", "all_reduce", num_bytes, num_updates
            )
    yield from _muon(shape, layout, workload)


def _muon(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Exchanges by which one rank gets the whole momentum of a matrix to orthogonalise it, in all
    updates of a step.

    Source: `training/optim/muon.py`. The ranks that hold one copy of the matrices take as many at a
    time as they are, the largest first, and give each rank one of them, in bfloat16; then it gives
    them their parts back. Replicas do the same beside them. With tensor parallelism calls are of
    the group of all ranks, where other copies are sent nothing.
    """
    matrices = [each for each in shape.parameters if uses_muon(each, workload)]
    matrices.sort(key=lambda matrix: -matrix.num_params)
    num_owners, calls = layout.shard_group_size * layout.tensor_parallel_degree, Counter[int]()
    for first in range(0, len(matrices), num_owners):
        given = sum(local_size(each, layout).own for each in matrices[first : first + num_owners])
        calls.update([given, matrices[first].num_params])
    axis: Axis = "all" if layout.tensor_parallel_degree > 1 else "shard"
    what, times = "momenta of Muon, orthogonalised", workload.num_updates
    for size, count in calls.items():
        yield exchange_in(
            layout, axis, what, "all_to_all", MUON_BYTES * size, times * count, num_owners
        )


def _gathers(
    layout: ShardLayout, workload: Workload, unit: Unit, num_times: int
) -> Iterator[Exchange]:
    for axis, parameters in _by_axis(unit.parameters, layout).items():
        if span_of(layout, axis)[0] > 1:
            what = "weights of a block, before it runs"
            num_bytes = gathered_bytes(parameters, layout, workload.compute_bytes)
            yield exchange_in(layout, axis, what, "all_gather", num_bytes, num_times * unit.count)


def _by_axis(
    parameters: Iterable[ParameterShape], layout: ShardLayout
) -> dict[Axis, tuple[ParameterShape, ...]]:
    """Parameters by the axis that FSDP shards them over: experts that are split, over the replicas
    alone.
    """
    axes: dict[Axis, tuple[ParameterShape, ...]] = {}
    for each in parameters:
        axis: Axis = "replica" if is_split_stack(each, layout) else "shard"
        axes[axis] = (*axes.get(axis, ()), each)
    return axes


def traffic_of_merging(shape: ModelShape, layout: ShardLayout) -> Iterator[Exchange]:
    """Communication of one rank to merge adapters into its shards: every rank gathers the first
    matrix of each.
    """
    calls: Counter[tuple[Axis, int]] = Counter()
    for half in shape.first_halves:
        local = local_size(half, layout)
        num_parts = layout.tensor_parallel_degree if half.tensor_axis else 1
        calls["tensor", FLOAT32 * num_parts * local.own] += num_parts > 1
        calls["shard", FLOAT32 * num_parts * local.gathered] += layout.shard_group_size > 1
    for (axis, num_bytes), num_calls in (+calls).items():
        yield exchange_in(layout, axis, "adapters, to be added", "all_gather", num_bytes, num_calls)


def traffic_of_weight_sync(
    buckets: Iterable[tuple[int, int]], workload: Workload
) -> tuple[Exchange, ...]:
    """Communication of one rank in a weight sync with the engines.

    Every rank of one copy of the model broadcasts its parts of each bucket, a run of whole tensors
    or a piece of one (weight_sync/manifest.py), in one message to all processes of the engines. A
    receiver takes the whole bucket. Through memory that they share nothing is sent.
    """
    if workload.sync_backend not in SENT_BY:
        return ()
    return tuple(
        Exchange(
            what="weights to the engines",
            collective="broadcast",
            axis="sync",
            num_calls=num_calls,
            bytes_per_call=own_bytes,
            group_size=workload.num_engines * workload.engine_tensor_degree + 1,
            wire_bytes=num_calls * whole_bytes,
            crosses_nodes=workload.sync_crosses_nodes,
        )
        for (own_bytes, whole_bytes), num_calls in Counter(buckets).items()
    )


def activation_exchanges(
    shape: ModelShape,
    layout: ShardLayout,
    workload: Workload,
    num_passes: int,
    num_values: int,
    *,
    trains: bool,
) -> Iterator[Exchange]:
    """Exchanges of so many passes over a microbatch: forward alone, or forward and backward.

    `num_values` of each label are brought together: its log-prob, its entropy. With 0 the head is
    not run.
    """
    yield from along(
        "tensor", _tensor(shape, layout, workload, num_values, trains=trains), layout, num_passes
    )
    yield from along(
        "context",
        context_calls(shape, layout, workload, num_values, trains=trains),
        layout,
        num_passes,
    )
    yield from along("expert", expert_calls(shape, workload, trains=trains), layout, num_passes)


def along(
    axis: Axis, calls: Iterable[Calls], layout: ShardLayout, num_passes: int
) -> Iterator[Exchange]:
    """The calls of so many passes in the groups of an axis, if those have more than one rank."""
    for what, collective, num_bytes, num_calls in calls if span_of(layout, axis)[0] > 1 else ():
        if num_calls:
            yield exchange_in(layout, axis, what, collective, num_bytes, num_passes * num_calls)


def num_head_positions(layout: ShardLayout, workload: Workload) -> int:
    """Positions of a microbatch at which this rank computes logits: its labels; a part of all under
    a tensor degree.
    """
    if layout.tensor_parallel_degree > 1:
        return workload.tokens_per_microbatch // layout.model_parallel_degree
    return workload.label_tokens_per_microbatch // layout.context_parallel_degree


def _tensor(
    shape: ModelShape, layout: ShardLayout, workload: Workload, num_values: int, *, trains: bool
) -> Iterator[Calls]:
    """Korthikanti et al.'s sequence parallelism, see above."""
    degree, layers, number = layout.tensor_parallel_degree, shape.num_layers, workload.compute_bytes
    num_tokens = workload.tokens_per_microbatch // layout.context_parallel_degree
    hidden = num_tokens * shape.d_model * number
    backward = 1 if trains else 0
    # Embeddings that are frozen: no gradient goes below the first adapters.
    to_embeddings = backward if shape.adapters is None else 0
    attention_again, feed_forward_again, blocks_again = (
        backward * workload.recomputes(module) for module in ("attention", "feed_forward", "")
    )

    # Each sublayer gathers its input, and scatters the sum of what its ranks put out; backwards the
    # other way round. Recomputation stops at the last tensor that is needed: that is before a
    # sublayer's scatter, unless a norm of the block comes after it.
    scatters_again = blocks_again * (layers + len(shape.windows) * shape.traits.norm_after)
    gathers_again, sums_backward = (
        attention_again + feed_forward_again,
        (2 * layers - 1) * backward + to_embeddings,
    )
    # Embeddings put out a sum as well.
    yield WHOLE, "all_gather", hidden, layers * (2 * (1 + backward) + gathers_again) + to_embeddings
    yield SUMMED, "reduce_scatter", hidden, 1 + 2 * layers + scatters_again + sums_backward

    if shape.traits.qk_norm != "none":
        # Queries and keys, split by heads, are split by tokens for their norms, then by heads
        # again.
        num_swaps = 2 * len(shape.windows) * (1 + backward + attention_again)
        for width in (shape.q_width, shape.kv_width):
            yield SWAPPED, *_swap(num_tokens * width * number, degree, workload), num_swaps

    chunks = logit_chunks(shape, num_head_positions(layout, workload)) if num_values else ()
    again = backward if len(chunks) > 1 else 0
    vocabulary = -(-shape.vocab_size // degree) * degree
    for positions in chunks:
        all_positions = positions * degree * number
        yield WHOLE, "all_gather", all_positions * shape.d_model, 1 + again
        yield SUMMED, "reduce_scatter", all_positions * shape.d_model, backward
        yield SWAPPED, *_swap(all_positions * vocabulary, degree, workload), 1 + again + backward
    yield "log-probs", "all_gather", num_tokens * FLOAT32, num_values


def _swap(whole_bytes: int, degree: int, workload: Workload) -> tuple[Collective, int]:
    """A tensor that is split along one dim and then along another:

    DTensor gathers all of it where there is no CUDA.
    """
    return (
        ("all_to_all", whole_bytes // degree) if workload.on_cuda else ("all_gather", whole_bytes)
    )


def context_calls(
    shape: ModelShape, layout: ShardLayout, workload: Workload, num_values: int, *, trains: bool
) -> Iterator[Calls]:
    """Ulysses: around attention, tokens are swapped for heads (Jacobs et al. 2023,
    arXiv:2309.14509, section 3.2).

    At the end of a forward pass every rank gets the losses of the whole row, and the entropies if
    they are recorded.
    """
    num_tokens = workload.tokens_per_microbatch // layout.context_parallel_degree
    # Queries, keys and values, and what attention puts out; so also what is remembered, with two
    # numbers for each head.
    widths = Counter([shape.q_width + 2 * shape.kv_width, shape.q_width] * len(shape.windows))
    for delta in (layer.delta for layer in shape.layers if layer.delta is not None):
        widths.update([sum(delta.widths) + 2 * delta.num_value_heads, delta.widths[-1]])
    for width, num_calls in widths.items():
        # Heads are split between tensor ranks already.
        num_bytes = num_tokens * width * workload.compute_bytes // layout.tensor_parallel_degree
        num_passes = 2 + workload.recomputes("attention") if trains else 1
        yield "tokens and heads in attention", "all_to_all", num_bytes, num_passes * num_calls
    yield "losses of a row", "all_gather", FLOAT32 * workload.tokens_per_microbatch, num_values


def expert_calls(shape: ModelShape, workload: Workload, *, trains: bool) -> Iterator[Calls]:
    """Tokens to the ranks of their experts, and back (`models/experts/routed.py`), where each
    expert gets as many.

    How many go to each is told first, in 32 bits.
    """
    again = int(trains and workload.recomputes("feed_forward"))
    num_layers = sum(layer.num_experts > 0 for layer in shape.layers)
    num_pairs = workload.tokens_per_microbatch * shape.experts_per_token
    num_bytes = num_pairs * shape.d_model * workload.compute_bytes
    yield "tokens at their experts", "all_to_all", num_bytes, num_layers * 2 * (1 + trains + again)
    yield "numbers of tokens", "all_to_all", 4 * shape.num_experts, num_layers * (1 + again)

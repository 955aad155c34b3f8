"""Every collective of a training step, from the shapes of the model, the layout and the flags alone.

What is counted here is what the train module issues: tests/ranks/test_traffic.py runs it and compares call for call.
Not counted is what travels outside it: data, the trainer's bookkeeping, checkpoints; nor the few numbers that metrics
are, and those a row or token that a loss over the whole global batch brings together. Where --lora_target_modules names
no matrix of attention, the backward pass of the first block, whose attention then has none, is counted all the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from open_instruct.planning.memory.activations import FLOAT32
from open_instruct.planning.memory.state import gathered_bytes, is_split_stack, local_size, uses_muon
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Scoring, Workload
from open_instruct.planning.traffic.collectives import Axis, Exchange, exchange_in, span_of
from open_instruct.planning.traffic.model_parallel import activation_exchanges
from open_instruct.shard_layout import ShardLayout

# `parallel_configs`: gradients are reduced in float32 whatever they are computed in.
REDUCE_BYTES = NORM_BYTES = 4
# Muon orthogonalises in bfloat16.
MUON_BYTES = 2

# Ways of the weights to the engines that use the network.
SENT_BY = ("nccl", "gloo")


def traffic_per_step(shape: ModelShape, layout: ShardLayout, workload: Workload) -> tuple[Exchange, ...]:
    """The exchanges of one rank to learn in one step.

    That is forward and backward of all microbatches and the update, and passes without gradients before them.
    """
    if layout.single_device:
        return ()
    scored = (each for scoring in workload.scorings for each in forward_passes(scoring, layout, workload))
    return (*scored, *_updates(shape, layout, workload))


def forward_passes(scoring: Scoring, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Passes over the microbatches of an update without gradients: every unit is gathered once in each."""
    num_passes = scoring.num_rounds * workload.num_microbatches
    for unit in scoring.shape.units:
        yield from _gathers(layout, workload, unit, num_passes)
    yield from activation_exchanges(scoring.shape, layout, workload, num_passes, scoring.num_values, trains=False)


def _updates(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    num_updates, num_passes = workload.num_updates, workload.num_updates * workload.num_microbatches
    num_reductions = num_updates if workload.reduces_last else num_passes
    for unit in shape.units:
        # Every unit is freed after its forward pass (`reshard_after_forward`, also of the root), and gathered again
        # in the backward pass; checkpointing does not add to that, since recomputation happens within. Embeddings
        # of their own are not needed backwards.
        num_gathers = 1 if unit.name == "embeddings" else 2
        yield from _gathers(layout, workload, unit, num_passes * num_gathers)
        for axis, parameters in _by_axis(unit.trained, layout).items():
            gradient_bytes = gathered_bytes(parameters, layout, REDUCE_BYTES)
            if span_of(layout, axis)[0] > 1:
                what, num_calls = "gradients of a block, after it", num_reductions * unit.count
                yield exchange_in(layout, axis, what, "reduce_scatter", gradient_bytes, num_calls)
            if axis == "shard":
                # OLMo-core lets the replicas' sum wait for the last microbatch of an update.
                shard_bytes = gradient_bytes // layout.shard_group_size
                what, num_calls = "gradients of a shard, over replicas", num_updates * unit.count
                yield exchange_in(layout, "replica", what, "all_reduce", shard_bytes, num_calls)
    yield from activation_exchanges(shape, layout, workload, num_passes, workload.num_values, trains=True)
    # Tensor ranks have whole norms, which see a part of the tokens each, and whole halves of adapters, beside which a
    # matrix is split. Whole gradients are added up in float32.
    norms = Counter(each.num_params for each in shape.parameters if each.is_trained and each.tensor_axis is None)
    adds_up = workload.reduces_last and workload.num_microbatches > 1
    for width, count in norms.items() if layout.tensor_parallel_degree > 1 else ():
        num_bytes = width * (REDUCE_BYTES if adds_up else workload.compute_bytes)
        yield exchange_in(layout, "tensor", "gradients of norms", "all_reduce", num_bytes, num_reductions * count)
    # One norm for every parameter, which DTensor stacks and adds up along each axis that cuts some of them.
    # Replicas that have parts of experts are among them.
    cutting: Axis = "world" if layout.expert_parallel_degree > 1 else "shard"
    axes: tuple[Axis, ...] = (cutting, "tensor")
    for axis in axes:
        if span_of(layout, axis)[0] > 1:
            num_bytes = NORM_BYTES * sum(each.is_trained for each in shape.parameters)
            yield exchange_in(layout, axis, "norm of the gradient", "all_reduce", num_bytes, num_updates)
    yield from _muon(shape, layout, workload)


def _muon(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Exchanges by which one rank gets the whole momentum of a matrix to orthogonalise it, in all updates of a step.

    Source: `learner/optim/muon.py`. The ranks that hold one copy of the matrices take as many at a time as they are,
    the largest first, and give each rank one of them, in bfloat16; then it gives them their parts back. Replicas do the
    same beside them. With tensor parallelism calls are of the group of all ranks, where other copies are sent nothing.
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
        yield exchange_in(layout, axis, what, "all_to_all", MUON_BYTES * size, times * count, num_owners)


def _gathers(layout: ShardLayout, workload: Workload, unit: Unit, num_times: int) -> Iterator[Exchange]:
    for axis, parameters in _by_axis(unit.parameters, layout).items():
        if span_of(layout, axis)[0] > 1:
            what = "weights of a block, before it runs"
            num_bytes = gathered_bytes(parameters, layout, workload.compute_bytes)
            yield exchange_in(layout, axis, what, "all_gather", num_bytes, num_times * unit.count)


def _by_axis(parameters: Iterable[ParameterShape], layout: ShardLayout) -> dict[Axis, tuple[ParameterShape, ...]]:
    """Parameters by the axis that FSDP shards them over: experts that are split, over the replicas alone."""
    axes: dict[Axis, tuple[ParameterShape, ...]] = {}
    for each in parameters:
        axis: Axis = "replica" if is_split_stack(each, layout) else "shard"
        axes[axis] = (*axes.get(axis, ()), each)
    return axes


def traffic_of_merging(shape: ModelShape, layout: ShardLayout) -> Iterator[Exchange]:
    """Communication of one rank to merge adapters into its shards: every rank gathers the first matrix of each."""
    calls: Counter[tuple[Axis, int]] = Counter()
    for half in shape.first_halves:
        local = local_size(half, layout)
        num_parts = layout.tensor_parallel_degree if half.tensor_axis else 1
        calls["tensor", FLOAT32 * num_parts * local.own] += num_parts > 1
        calls["shard", FLOAT32 * num_parts * local.gathered] += layout.shard_group_size > 1
    for (axis, num_bytes), num_calls in (+calls).items():
        yield exchange_in(layout, axis, "adapters, to be added", "all_gather", num_bytes, num_calls)


def traffic_of_weight_sync(buckets: Iterable[tuple[int, int]], workload: Workload) -> tuple[Exchange, ...]:
    """Communication of one rank in a weight sync with the engines.

    Every rank of one copy of the model broadcasts its parts of each bucket, a run of whole tensors or a piece of one
    (weights/manifest.py), in one message to all processes of the engines. A receiver takes the whole bucket.
    Through memory that they share nothing is sent.
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

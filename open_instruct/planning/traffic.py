"""Every collective of a training step, from the model's shape, the layout and the flags alone.

What is counted here is what the train module issues: tests/ranks/test_traffic.py runs it and
compares call for call. Not counted is what travels outside it: data, the trainer's bookkeeping,
checkpoints; nor the few numbers that metrics are, and those a row or token that a loss over the
whole global batch brings together. Where --lora_target_modules names no matrix of attention, the
backward pass of the first block, whose attention then has none, is counted all the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.activation_traffic import activation_exchanges
from open_instruct.planning.exchanges import Axis, Calls, Exchange, build_exchange, group_span
from open_instruct.planning.memory.piece import FLOAT32
from open_instruct.planning.memory.state import (
    gathered_bytes,
    is_split_stack,
    local_size,
    uses_muon,
)
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Scoring, Workload

# Muon orthogonalises in bfloat16.
MUON_BYTES = 2
# Transports of the weights to the engines that use the network.
NETWORK_TRANSPORTS = ("nccl", "gloo")


def traffic_per_step(
    shape: ModelShape, layout: ShardLayout, workload: Workload
) -> tuple[Exchange, ...]:
    """The exchanges of one rank to learn in one step.

    That is forward and backward of all microbatches and the update, and passes without gradients
    before them.
    """
    if layout.single_device:
        return ()
    exchanges: list[Exchange] = []
    for scoring in workload.scorings:
        exchanges += scoring_pass(scoring, layout, workload)
    exchanges += _updates(shape, layout, workload)
    return tuple(exchanges)


def scoring_pass(scoring: Scoring, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Passes over the microbatches of an update without gradients, which gather each unit once."""
    num_passes = scoring.num_rounds * workload.num_microbatches
    for unit in scoring.shape.units:
        yield from _gathers(layout, workload, unit, num_passes)
    yield from activation_exchanges(
        scoring.shape, layout, workload, num_passes, scoring.num_values, trains=False
    )


def _updates(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    num_updates = workload.num_updates
    num_passes = num_updates * workload.num_microbatches
    num_reductions = num_passes
    if workload.reduces_last:
        num_reductions = num_updates
    for unit in shape.units:
        # Every unit is freed after its forward pass (`reshard_after_forward`, also of the root),
        # and gathered again in the backward pass; checkpointing does not add to that, since
        # recomputation happens within. Embeddings of their own are not needed backwards.
        num_gathers = 1 if unit.name == "embeddings" else 2
        yield from _gathers(layout, workload, unit, num_passes * num_gathers)
        yield from _reductions(layout, unit, num_reductions, num_updates)
    yield from activation_exchanges(
        shape, layout, workload, num_passes, workload.num_values, trains=True
    )
    yield from _whole_gradients(shape, layout, workload, num_reductions)
    # One norm for every parameter, which DTensor stacks and adds up along each axis that cuts some
    # of them. Replicas that have parts of experts are among them.
    cutting: Axis = "world" if layout.expert_parallel_degree > 1 else "shard"
    axes: tuple[Axis, ...] = (cutting, "tensor")
    norms = Calls(
        what="norm of the gradient",
        collective="all_reduce",
        num_bytes=FLOAT32 * sum(each.is_trained for each in shape.parameters),
        num_calls=num_updates,
    )
    for axis in axes:
        if group_span(layout, axis)[0] > 1:
            yield build_exchange(layout, axis, norms)
    yield from _muon(shape, layout, workload)


def _reductions(
    layout: ShardLayout,
    unit: Unit,
    num_reductions: int,
    num_updates: int,
) -> Iterator[Exchange]:
    """Gradients of a unit to their shards, and the sums of shards over replicas.

    Source: `build_parallel_configs`: the reduction is in float32, whatever gradients are made in.
    """
    for axis, parameters in _by_axis(unit.trained, layout).items():
        gradient_bytes = gathered_bytes(parameters, layout, FLOAT32)
        if group_span(layout, axis)[0] > 1:
            calls = Calls(
                what="gradients of a block, after it",
                collective="reduce_scatter",
                num_bytes=gradient_bytes,
                num_calls=num_reductions * unit.count,
            )
            yield build_exchange(layout, axis, calls)
        if axis == "shard":
            # OLMo-core lets the replicas' sum wait for the last microbatch of an update.
            calls = Calls(
                what="gradients of a shard, over replicas",
                collective="all_reduce",
                num_bytes=gradient_bytes // layout.shard_group_size,
                num_calls=num_updates * unit.count,
            )
            yield build_exchange(layout, "replica", calls)


def _whole_gradients(
    shape: ModelShape,
    layout: ShardLayout,
    workload: Workload,
    num_reductions: int,
) -> Iterator[Exchange]:
    """Sums over tensor ranks of the gradients of what each of them has whole.

    That are norms, which see a part of the tokens each, and halves of adapters, beside which a
    matrix is split. Whole gradients are added up in float32.
    """
    if layout.tensor_parallel_degree == 1:
        return
    item_bytes = workload.compute_bytes
    if workload.reduces_last and workload.num_microbatches > 1:
        item_bytes = FLOAT32
    trained_parameters = (each for each in shape.parameters if each.is_trained)
    sizes = Counter(each.num_params for each in trained_parameters if each.tensor_axis is None)
    for num_values, count in sizes.items():
        calls = Calls(
            what="gradients of norms",
            collective="all_reduce",
            num_bytes=num_values * item_bytes,
            num_calls=num_reductions * count,
        )
        yield build_exchange(layout, "tensor", calls)


def _muon(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Exchanges of a step by which one rank gets a whole momentum, to orthogonalise it.

    Source: `training/optim/muon.py`. The ranks that hold one copy of the matrices take as many at a
    time as they are, the largest first, and give each rank one of them, in bfloat16; then it gives
    them their parts back. Replicas do the same beside them. With tensor parallelism calls are of
    the group of all ranks, where other copies are sent nothing.
    """
    matrices = [each for each in shape.parameters if uses_muon(each, workload)]
    matrices.sort(key=lambda matrix: matrix.num_params, reverse=True)
    num_owners = layout.shard_group_size * layout.tensor_parallel_degree
    counts: Counter[int] = Counter()
    for first in range(0, len(matrices), num_owners):
        batch = matrices[first : first + num_owners]
        num_sent = sum(local_size(each, layout).shard for each in batch)
        counts.update([num_sent, batch[0].num_params])
    axis: Axis = "all" if layout.tensor_parallel_degree > 1 else "shard"
    for num_values, count in counts.items():
        calls = Calls(
            what="momenta of Muon, orthogonalised",
            collective="all_to_all",
            num_bytes=MUON_BYTES * num_values,
            num_calls=workload.num_updates * count,
        )
        yield build_exchange(layout, axis, calls, within=num_owners)


def _gathers(
    layout: ShardLayout,
    workload: Workload,
    unit: Unit,
    num_times: int,
) -> Iterator[Exchange]:
    for axis, parameters in _by_axis(unit.parameters, layout).items():
        if group_span(layout, axis)[0] > 1:
            calls = Calls(
                what="weights of a block, before it runs",
                collective="all_gather",
                num_bytes=gathered_bytes(parameters, layout, workload.compute_bytes),
                num_calls=num_times * unit.count,
            )
            yield build_exchange(layout, axis, calls)


def _by_axis(
    parameters: Iterable[ParameterShape], layout: ShardLayout
) -> dict[Axis, tuple[ParameterShape, ...]]:
    """Parameters by the axis that FSDP shards them over: split experts, over replicas alone."""
    axes: dict[Axis, tuple[ParameterShape, ...]] = {}
    for each in parameters:
        axis: Axis = "replica" if is_split_stack(each, layout) else "shard"
        axes[axis] = (*axes.get(axis, ()), each)
    return axes


def merging_traffic(shape: ModelShape, layout: ShardLayout) -> Iterator[Exchange]:
    """Communication of one rank to merge adapters: it gathers the first matrix of each."""
    counts: Counter[tuple[Axis, int]] = Counter()
    for half in shape.first_halves:
        local = local_size(half, layout)
        num_parts = 1
        if half.tensor_axis:
            num_parts = layout.tensor_parallel_degree
        if num_parts > 1:
            counts["tensor", FLOAT32 * num_parts * local.shard] += 1
        if layout.shard_group_size > 1:
            counts["shard", FLOAT32 * num_parts * local.gathered] += 1
    for (axis, num_bytes), num_calls in counts.items():
        calls = Calls(
            what="adapters, to be added",
            collective="all_gather",
            num_bytes=num_bytes,
            num_calls=num_calls,
        )
        yield build_exchange(layout, axis, calls)


def weight_sync_traffic(
    buckets: Iterable[tuple[int, int]], workload: Workload
) -> tuple[Exchange, ...]:
    """Communication of one rank in a weight sync with the engines.

    Every rank of one copy of the model broadcasts its parts of each bucket, a run of whole tensors
    or a piece of one (weight_sync/manifest.py), in one message to all processes of the engines. A
    receiver takes the whole bucket. Through memory that they share nothing is sent.
    """
    if workload.sync_backend not in NETWORK_TRANSPORTS:
        return ()
    num_receivers = workload.num_engines * workload.engine_tensor_degree
    exchanges = []
    for (own_bytes, whole_bytes), num_calls in Counter(buckets).items():
        exchange = Exchange(
            what="weights to the engines",
            collective="broadcast",
            axis="sync",
            num_calls=num_calls,
            bytes_per_call=own_bytes,
            group_size=num_receivers + 1,
            wire_bytes=num_calls * whole_bytes,
            crosses_nodes=workload.sync_crosses_nodes,
        )
        exchanges.append(exchange)
    return tuple(exchanges)

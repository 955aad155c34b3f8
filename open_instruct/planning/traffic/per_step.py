"""Every collective of a training step, from the shapes of the model, the layout and the flags alone.

What is counted here is what the train module issues: tests/ranks/test_traffic.py runs it and compares call for call.
Not counted is what travels outside it: data, the trainer's bookkeeping, checkpoints; nor the few numbers a row or token
that a loss over the whole global batch brings together. Only estimated are Muon's exchanges where there are replicas or
tensor ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from types import SimpleNamespace

from open_instruct.models.names import TensorNames
from open_instruct.planning.memory.state import gathered_params, local_size, tensor_local_shape
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Scoring, Workload
from open_instruct.planning.traffic.collectives import Axis, Exchange, exchange_in
from open_instruct.planning.traffic.model_parallel import activation_exchanges
from open_instruct.planning.traffic.muon import muon_exchanges
from open_instruct.records import ShardLayout

# `build_data_parallel_config`: gradients are reduced in float32 whatever they are computed in.
REDUCE_BYTES = NORM_BYTES = 4
METRIC_BYTES = 8

# Ways of the weights to the engines that use the network.
SENT_BY = ("nccl", "gloo")


def traffic_per_step(shape: ModelShape, layout: ShardLayout, workload: Workload) -> tuple[Exchange, ...]:
    """What one rank exchanges in one step.

    That is forward and backward of all microbatches and the update, passes without gradients before them, and for GRPO
    the weights' way to the engines.
    """
    exchanges: list[Exchange] = []
    if not layout.single_device:
        for scoring in workload.scorings:
            exchanges += forward_passes(scoring, layout, workload)
        exchanges += _updates(shape, layout, workload)
    if workload.num_engines:
        exchanges += traffic_of_weight_sync(shape, layout, workload)
    return tuple(exchanges)


def traffic_of_reference_pass(shape: ModelShape, layout: ShardLayout, workload: Workload) -> tuple[Exchange, ...]:
    """What one rank exchanges for one microbatch of DPO's pass over the data before training."""
    once = replace(workload, num_microbatches=1)
    return () if layout.single_device else tuple(forward_passes(Scoring(shape=shape), layout, once))


def forward_passes(scoring: Scoring, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Passes over the microbatches of an update without gradients: every unit is gathered once in each."""
    num_passes = scoring.num_rounds * workload.num_microbatches
    for what, unit, count in _kinds_of_units(scoring.shape):
        yield from _gathers(layout, workload, f"{what}, without gradients", unit, num_passes * count)
    yield from activation_exchanges(scoring.shape, layout, workload, num_passes, scoring.num_values, trains=False)


def _updates(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    num_updates, num_passes = workload.num_updates, workload.num_updates * workload.num_microbatches
    num_reductions = num_updates if workload.reduces_last else num_passes
    for what, unit, count in _kinds_of_units(shape):
        # Every unit is freed after its forward pass (`reshard_after_forward`, also of the root), and gathered again
        # in the backward pass; checkpointing does not add to that, since recomputation happens within. Embeddings
        # of their own are not needed backwards.
        num_gathers = 1 if unit.name == "embeddings" else 2
        yield from _gathers(layout, workload, what, unit, num_passes * count * num_gathers)
        gradient_bytes = gathered_params(unit.parameters, layout) * REDUCE_BYTES
        if layout.shard_group_size > 1:
            num_calls = num_reductions * count
            yield exchange_in(layout, "shard", f"gradients of {what}", "reduce_scatter", gradient_bytes, num_calls)
        # OLMo-core lets the replicas' sum wait for the last microbatch of an update.
        shard_bytes = gradient_bytes // layout.shard_group_size
        yield exchange_in(layout, "replica", f"gradients of {what}", "all_reduce", shard_bytes, num_updates * count)
    yield from activation_exchanges(shape, layout, workload, num_passes, workload.num_values, trains=True)
    # Tensor ranks have whole norms, which see a part of the tokens each. Whole gradients are added up in float32.
    norms = Counter(parameter.num_params for parameter in shape.parameters if parameter.tensor_axis is None)
    adds_up = workload.reduces_last and workload.num_microbatches > 1
    for width, count in norms.items() if layout.tensor_parallel_degree > 1 else ():
        num_bytes = width * (REDUCE_BYTES if adds_up else workload.compute_bytes)
        yield exchange_in(layout, "tensor", "gradients of norms", "all_reduce", num_bytes, num_reductions * count)
    # One norm for every parameter, which DTensor stacks and adds up along each axis that cuts some of them.
    degrees: dict[Axis, int] = {"shard": layout.shard_group_size, "tensor": layout.tensor_parallel_degree}
    for axis, degree in degrees.items():
        if degree > 1:
            num_bytes = NORM_BYTES * len(shape.parameters)
            yield exchange_in(layout, axis, "gradient norm", "all_reduce", num_bytes, num_updates)
    yield from muon_exchanges(shape, layout, workload)
    yield from metrics_exchanges(layout, workload)


def _gathers(layout: ShardLayout, workload: Workload, what: str, unit: Unit, num_calls: int) -> Iterator[Exchange]:
    if layout.shard_group_size > 1:
        num_bytes = gathered_params(unit.parameters, layout) * workload.compute_bytes
        yield exchange_in(layout, "shard", f"parameters of {what}", "all_gather", num_bytes, num_calls)


def _kinds_of_units(shape: ModelShape) -> Iterator[tuple[str, Unit, int]]:
    """What it is called, one of its kind, and how many there are: all blocks are alike."""
    yield from ((unit.name, unit, 1) for unit in shape.units if not unit.name.startswith("blocks."))
    yield "blocks", shape.units[-1], shape.num_layers


def metrics_exchanges(layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Once an update."""
    # A mean travels as two numbers, a maximum as one for each rank.
    num_means, num_sums, num_maxima = workload.num_metrics
    # With the shares of padding and of what is shared; with the norm of the gradient and the peak of memory, of a GPU
    # also of what is reserved, and how often that was short.
    num_maxima += 4 if workload.on_cuda else 2
    num_bytes = METRIC_BYTES * (2 * (num_means + 2) + num_sums + num_maxima * layout.data_parallel_world_size)
    if layout.data_parallel_world_size > 1:
        yield exchange_in(layout, "metrics", "metrics", "all_reduce", num_bytes, workload.num_updates)


def traffic_of_weight_sync(shape: ModelShape, layout: ShardLayout, workload: Workload) -> tuple[Exchange, ...]:
    """What one rank exchanges to bring its weights to the engines once.

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
        for (own_bytes, whole_bytes), num_calls in Counter(sync_buckets(shape, layout, workload)).items()
    )


def sync_buckets(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[tuple[int, int]]:
    """Of each bucket, the bytes that the first rank brings and those of all ranks."""
    by_name = {parameter.name: parameter for parameter in shape.parameters}
    own, whole = 0, 0
    fields = {"model_type": shape.family, "tie_word_embeddings": shape.is_tied, "num_hidden_layers": shape.num_layers}
    for name in TensorNames(SimpleNamespace(**fields)).olmo_core_names:
        parameter = by_name[name]
        more = parameter.num_params * workload.sync_bytes_per_param
        if whole and whole + more > workload.sync_bucket_bytes:
            yield own, whole
            own, whole = 0, 0
        if more > workload.sync_bucket_bytes:
            yield from _pieces(parameter, layout, workload)
            continue
        own += local_size(parameter, layout).own * workload.sync_bytes_per_param
        whole += more
    if whole:
        yield own, whole


def _pieces(parameter: ParameterShape, layout: ShardLayout, workload: Workload) -> Iterator[tuple[int, int]]:
    """Those of a tensor that is larger than a bucket: the rows of every rank, the first of which has most, are cut."""
    degree = layout.tensor_parallel_degree
    ranks = range(0, layout.shard_group_size * degree, degree if parameter.tensor_axis is None else 1)
    widths = [prod(tensor_local_shape(parameter, degree, rank % degree)[1:]) for rank in ranks]
    rows = [local_size(parameter, layout, rank=rank).own // width for rank, width in zip(ranks, widths, strict=True)]
    num_pieces = min(-(-parameter.num_params * workload.sync_bytes_per_param // workload.sync_bucket_bytes), rows[0])
    for piece in range(num_pieces):
        cut = [size * (piece + 1) // num_pieces - size * piece // num_pieces for size in rows]
        sizes = [of_rank * width * workload.sync_bytes_per_param for of_rank, width in zip(cut, widths, strict=True)]
        yield sizes[0], sum(sizes)

"""The state that a rank holds from step to step (shards of parameters, gradients and optimizer
states), and the buckets in which the parameters go to the engines, cut as `weight_sync/manifest.py`
cuts them.

Sources, in PyTorch 2.13 and OLMo-core 3.0:

- Master weights are float32; so are gradients, which are reduced in float32, and AdamW's two
  moments. In single-GPU mode nothing is sharded, and where `--param_dtype` is not float32 a copy of
  the model in it stays beside the masters (`training/olmo_core/fsdp2.py`), whose gradients go to
  the masters as they are made.
- Where adapters are trained, all else has neither gradient nor moments, and is held in
  `--param_dtype` alone, or in 4 bits (`models/nf4.py`).
- Tensor parallelism (`apply_tp`) splits one axis of a matrix first. FSDP2
  (`FSDPParam._init_sharded_param`) then cuts axis 0 of what is left into chunks of ceil(rows /
  shards) rows: the last ranks may have fewer, or none.
- Experts that a shard group splits are whole on their ranks, and FSDP2 cuts those over the replicas
  alone (`models/experts/routed.py`).
- Shards of parameters are kept padded to the size of the first (`reset_sharded_param`), and
  gradients are views into the padded output of their unit's reduce-scatter (`foreach_reduce`).
  Moments have the size of the shard itself.
- AdamW counts steps in one float32 a parameter. Muon keeps one moment, for the matrices of the
  blocks; everything else is AdamW's. 8-bit AdamW has a code in one byte for each value of a matrix,
  and a float32 scale for each block of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, gcd, prod
from types import SimpleNamespace
from typing import NamedTuple

from open_instruct.core.families import FULL, LINEAR
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.weight_buckets import plan_buckets
from open_instruct.models.hf.names import TensorNames, is_of_adapter, is_stack
from open_instruct.planning.subject.model import ModelShape, ParameterShape
from open_instruct.planning.subject.workload import Workload

# Also where the forward pass is in bfloat16.
MASTER_BYTES = GRADIENT_BYTES = MOMENT_BYTES = 4
STEP_BYTES = 4
ADAMW_MOMENTS = 2
MUON_MOMENTS = 1
# 8-bit AdamW: the sizes of a block, the least values of a matrix that has them, and how many are
# stepped at once, with six float32 numbers for each.
BLOCK_SIZES = (32, 256)
LEAST_VALUES = 4096
CHUNK_VALUES = 2**22
CHUNK_BYTES = 6 * 4 * CHUNK_VALUES


class LocalSize(NamedTuple):
    """Numbers of elements of one parameter on a rank.

    `own` is its shard, `padded` the largest rank's shard, `gathered` what its unit holds once
    gathered: the padded shards of all ranks of the shard group.
    """

    own: int
    padded: int
    gathered: int


def state_bytes(
    shape: ModelShape, layout: ShardLayout, workload: Workload, *, rank: int = 0
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states on `rank`, after a first step.

    Rank 0 never has least.
    """
    # A single device that computes in another dtype has a copy in that.
    has_copy = (
        layout.single_device and workload.compute_bytes < MASTER_BYTES and shape.adapters is None
    )
    trained_bytes = MASTER_BYTES + (workload.compute_bytes if has_copy else 0)
    parameters = gradients = optimizer = 0
    for unit in shape.units:
        for parameter in unit.parameters:
            local = local_size(parameter, layout, rank=rank)
            if not parameter.is_trained:
                parameters += unit.count * sum(
                    parameter.bytes_of(local.padded, workload.compute_bytes)
                )
                continue
            parameters += unit.count * local.padded * trained_bytes
            gradients += unit.count * local.padded * GRADIENT_BYTES
            step_bytes = 0 if uses_muon(parameter, workload) else STEP_BYTES
            optimizer += unit.count * (
                sum(moment_bytes(parameter, local.own, layout, workload)) + step_bytes
            )
    return parameters, gradients, optimizer


def moment_bytes(
    parameter: ParameterShape, own: int, layout: ShardLayout, workload: Workload
) -> tuple[int, ...]:
    """Bytes of each tensor of the optimizer's moments, of a parameter of which a rank has so many
    values as its own.
    """
    num_cuts = (
        layout.tensor_parallel_degree if parameter.tensor_axis == len(parameter.shape) - 1 else 1
    )
    if workload.optimizer == "adamw_8bit" and (size := values_in_block(parameter.shape, num_cuts)):
        return (own, own // size * MASTER_BYTES) * ADAMW_MOMENTS
    return (own * MOMENT_BYTES,) * (
        MUON_MOMENTS if uses_muon(parameter, workload) else ADAMW_MOMENTS
    )


def values_in_block(shape: Sequence[int], num_cuts: int) -> int:
    """Values of a row that share a scale in 8-bit AdamW; 0 for what has float32 moments: vectors
    and small matrices.

    It depends on no number of ranks, unless these cut rows of the matrix, into `num_cuts` parts.
    """
    least, most = BLOCK_SIZES
    size = gcd(most, shape[-1] // num_cuts) if shape[-1] % num_cuts == 0 else 0
    return size if size >= least and len(shape) > 1 and prod(shape) >= LEAST_VALUES else 0


def uses_muon(parameter: ParameterShape, workload: Workload) -> bool:
    """Whether Muon takes a step with it; source: `MuonWithAdamWConfig.build_groups`."""
    return (
        workload.optimizer == "muon" and len(parameter.shape) == 2 and parameter.layer is not None
    )


def is_split_stack(parameter: ParameterShape, layout: ShardLayout) -> bool:
    """Whether ranks of a shard group have some of the matrices of a stack each."""
    degree = layout.expert_parallel_degree
    return degree > 1 and is_stack(parameter.name) and parameter.shape[0] % degree == 0


def gathered_shape(
    parameter: ParameterShape, layout: ShardLayout, *, rank: int = 0
) -> tuple[int, ...]:
    """The shape of a parameter on `rank` while its unit is gathered."""
    if is_split_stack(parameter, layout):
        return (parameter.shape[0] // layout.expert_parallel_degree, *parameter.shape[1:])
    degree = layout.tensor_parallel_degree
    return tensor_local_shape(parameter, degree, rank % degree)


def tensor_local_shape(
    parameter: ParameterShape, tensor_degree: int, tensor_rank: int
) -> tuple[int, ...]:
    """The shape of a parameter's part on one tensor rank."""
    if (axis := parameter.tensor_axis) is None:
        return parameter.shape
    rows = chunk_rows(parameter.shape[axis], tensor_degree, tensor_rank)
    return (*parameter.shape[:axis], rows, *parameter.shape[axis + 1 :])


def local_size(parameter: ParameterShape, layout: ShardLayout, *, rank: int = 0) -> LocalSize:
    """The sizes of `parameter` on `rank`, by its places in its tensor group and in its shard
    group.
    """
    neighbours, num_shards = layout.tensor_parallel_degree, layout.shard_group_size
    if is_split_stack(parameter, layout):
        neighbours, num_shards = layout.shard_degree, layout.num_replicas
    rows, *others = gathered_shape(parameter, layout, rank=rank)
    own_rows = chunk_rows(rows, num_shards, rank // neighbours % num_shards)
    padded = ceil(rows / num_shards) * prod(others)
    return LocalSize(own=own_rows * prod(others), padded=padded, gathered=padded * num_shards)


def chunk_rows(num_rows: int, num_chunks: int, index: int) -> int:
    """Rows of chunk `index`, as `torch.chunk` cuts them: all of ceil(rows / chunks) but the last
    ones.
    """
    size = ceil(num_rows / num_chunks)
    return max(0, min(size, num_rows - index * size))


def gathered_bytes(
    parameters: tuple[ParameterShape, ...], layout: ShardLayout, bytes_each: int
) -> int:
    """Bytes of a unit that was gathered on rank 0, padding included."""
    return sum(
        sum(each.bytes_of(local_size(each, layout).gathered, bytes_each)) for each in parameters
    )


def sync_buckets(
    shape: ModelShape, layout: ShardLayout, workload: Workload
) -> Iterator[tuple[int, int]]:
    """The bytes of the first rank and of all ranks in each bucket."""
    sent = _sent(shape, workload)
    rows = {each.name: list(rows_of_ranks(layout, each)) for each in sent}
    each_bytes = workload.sync_bytes_per_param
    sizes = {
        each.name: (each.num_params * each_bytes, max(n for _, n, _ in rows[each.name]))
        for each in sent
    }
    for names, piece, num_pieces in plan_buckets(sizes, workload.sync_bucket_bytes):
        own = whole = 0
        for name in names:
            cut = [
                ((piece + 1) * n // num_pieces - piece * n // num_pieces) * width
                for _, n, width in rows[name]
            ]
            own += cut[0]
            whole += sum(
                num_ranks * size for (num_ranks, *_), size in zip(rows[name], cut, strict=True)
            )
        yield own * each_bytes, whole * each_bytes


def _sent(shape: ModelShape, workload: Workload) -> list[ParameterShape]:
    """The parameters that travel, in their order: adapters in the model's, others in that of the
    names.
    """
    if workload.sends_adapter:
        return [each for each in shape.parameters if is_of_adapter(each.name)]
    by_name = {each.name: each for parameter in shape.parameters for each in _in_files(parameter)}
    fields = {
        "model_type": shape.family,
        "tie_word_embeddings": shape.is_tied,
        "num_hidden_layers": shape.num_layers,
    }
    fields["layer_types"] = [LINEAR if layer.delta else FULL for layer in shape.layers]
    fields["mlp_only_layers"] = [
        number for number, layer in enumerate(shape.layers) if not layer.num_experts
    ]
    fields["num_experts"] = shape.num_experts
    return [by_name[name] for name in TensorNames(SimpleNamespace(**fields)).olmo_core_names]


def _in_files(parameter: ParameterShape) -> list[ParameterShape]:
    """The parameter, or each matrix of a stack of them, which is whole on one rank."""
    if not is_stack(parameter.name):
        return [parameter]
    number, *shape = parameter.shape
    return [
        replace(parameter, name=f"{parameter.name}.{row}", shape=tuple(shape), row_of=(row, number))
        for row in range(number)
    ]


def rows_of_ranks(layout: ShardLayout, parameter: ParameterShape) -> Iterator[tuple[int, int, int]]:
    """(number of ranks, rows of each, width of a row) of one parameter, in the order of ranks.

    Counts one copy of a model that FSDP2 shards, where the first rank has most rows.
    """
    degree = layout.tensor_parallel_degree
    if parameter.row_of is not None:
        row, number = parameter.row_of
        num_shards = (
            layout.world_size if layout.expert_parallel_degree > 1 else layout.shard_group_size
        )
        if row >= chunk_rows(number, num_shards, 0):
            yield 1, 0, 0
        yield 1, *parameter.shape  # type: ignore[misc]
        return
    for tensor_rank in range(1 if parameter.tensor_axis is None else degree):
        num_rows, *others = tensor_local_shape(parameter, degree, tensor_rank)
        size = chunk_rows(num_rows, layout.shard_group_size, 0)
        yield num_rows // max(1, size), size, prod(others)
        yield 1, num_rows % max(1, size), prod(others)

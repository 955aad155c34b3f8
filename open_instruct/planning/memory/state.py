"""The state that a rank holds from step to step: shards of weights, gradients and moments.

Sources, in PyTorch 2.13 and OLMo-core 3.0:

- Master weights are float32; so are gradients, which are reduced in float32, and AdamW's two
  moments. In single-GPU mode nothing is sharded, and where `--param_dtype` is not float32 a copy of
  the model in it stays beside the masters (`training/olmo_core/fsdp2.py`), whose gradients go to
  the masters as they are made.
- Where adapters are trained, all else has neither gradient nor moments, and is resident in
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

from collections.abc import Sequence
from math import ceil, gcd, prod
from typing import NamedTuple

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.hf.names import is_expert_stack
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

    `shard` is the rank's own, `padded` the largest rank's, `gathered` what its unit holds once
    gathered: the padded shards of all ranks of the shard group.
    """

    shard: int
    padded: int
    gathered: int


def state_bytes(
    shape: ModelShape,
    layout: ShardLayout,
    workload: Workload,
    *,
    rank: int = 0,
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states on `rank`, after a first step.

    Rank 0 never has least.
    """
    item_bytes = workload.compute_bytes
    trained_bytes = MASTER_BYTES
    # A single device that computes in another dtype has a copy in that.
    if layout.single_device and item_bytes < MASTER_BYTES and shape.adapters is None:
        trained_bytes += item_bytes
    parameters = 0
    gradients = 0
    optimizer = 0
    for unit in shape.units:
        for parameter in unit.parameters:
            local = local_size(parameter, layout, rank=rank)
            if not parameter.is_trained:
                parameters += unit.count * sum(parameter.tensor_bytes(local.padded, item_bytes))
                continue
            parameters += unit.count * local.padded * trained_bytes
            gradients += unit.count * local.padded * GRADIENT_BYTES
            optimizer_bytes = sum(moment_bytes(parameter, local.shard, layout, workload))
            if not uses_muon(parameter, workload):
                optimizer_bytes += STEP_BYTES
            optimizer += unit.count * optimizer_bytes
    return parameters, gradients, optimizer


def moment_bytes(
    parameter: ParameterShape,
    num_values: int,
    layout: ShardLayout,
    workload: Workload,
) -> tuple[int, ...]:
    """Bytes of each tensor of the optimizer's moments for so many values of a parameter."""
    if uses_muon(parameter, workload):
        return (num_values * MOMENT_BYTES,) * MUON_MOMENTS
    if workload.optimizer == "adamw_8bit":
        num_cuts = 1
        if parameter.tensor_axis == len(parameter.shape) - 1:
            num_cuts = layout.tensor_parallel_degree
        block_values = values_in_block(parameter.shape, num_cuts)
        if block_values > 0:
            scale_bytes = num_values // block_values * MASTER_BYTES
            return (num_values, scale_bytes) * ADAMW_MOMENTS
    return (num_values * MOMENT_BYTES,) * ADAMW_MOMENTS


def values_in_block(shape: Sequence[int], num_cuts: int) -> int:
    """Values of a row that share a scale in 8-bit AdamW; 0 for vectors and small matrices.

    Those have float32 moments. The number depends on no number of ranks, unless these cut rows of
    the matrix, into `num_cuts` parts.
    """
    is_small = len(shape) < 2 or prod(shape) < LEAST_VALUES
    if is_small or shape[-1] % num_cuts:
        return 0
    least, most = BLOCK_SIZES
    size = gcd(most, shape[-1] // num_cuts)
    if size < least:
        return 0
    return size


def uses_muon(parameter: ParameterShape, workload: Workload) -> bool:
    """Whether Muon takes a step with it; source: `MuonWithAdamWConfig.build_groups`."""
    return (
        workload.optimizer == "muon" and len(parameter.shape) == 2 and parameter.layer is not None
    )


def muon_temporaries(shape: ModelShape, workload: Workload) -> int:
    """Bytes of the largest matrix that a rank orthogonalises whole, in bfloat16.

    It has that, torch's momentum and step of it, two iterates, and two squares of its shorter side.
    AdamW is not fused there.
    """
    most_values = 0
    for parameter in shape.parameters:
        if uses_muon(parameter, workload):
            num_values = 5 * parameter.num_params + 2 * min(parameter.shape) ** 2
            most_values = max(most_values, num_values)
    return 2 * most_values


def is_split_stack(parameter: ParameterShape, layout: ShardLayout) -> bool:
    """Whether ranks of a shard group have some of the matrices of a stack each."""
    degree = layout.expert_parallel_degree
    return degree > 1 and is_expert_stack(parameter.name) and parameter.shape[0] % degree == 0


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
    axis = parameter.tensor_axis
    if axis is None:
        return parameter.shape
    rows = chunk_rows(parameter.shape[axis], tensor_degree, tensor_rank)
    return (*parameter.shape[:axis], rows, *parameter.shape[axis + 1 :])


def local_size(parameter: ParameterShape, layout: ShardLayout, *, rank: int = 0) -> LocalSize:
    """The sizes of a parameter on `rank`, by its places in its tensor group and shard group."""
    if is_split_stack(parameter, layout):
        neighbours = layout.shard_degree
        num_shards = layout.num_replicas
    else:
        neighbours = layout.tensor_parallel_degree
        num_shards = layout.shard_group_size
    rows, *others = gathered_shape(parameter, layout, rank=rank)
    width = prod(others)
    shard_rows = chunk_rows(rows, num_shards, rank // neighbours % num_shards)
    padded = ceil(rows / num_shards) * width
    return LocalSize(shard=shard_rows * width, padded=padded, gathered=padded * num_shards)


def chunk_rows(num_rows: int, num_chunks: int, index: int) -> int:
    """Rows of a chunk as `torch.chunk` cuts them: ceil(rows / chunks), but in the last ones."""
    size = ceil(num_rows / num_chunks)
    return max(0, min(size, num_rows - index * size))


def gathered_bytes(
    parameters: tuple[ParameterShape, ...], layout: ShardLayout, bytes_each: int
) -> int:
    """Bytes of a unit that was gathered on rank 0, padding included."""
    num_bytes = 0
    for parameter in parameters:
        num_values = local_size(parameter, layout).gathered
        num_bytes += sum(parameter.tensor_bytes(num_values, bytes_each))
    return num_bytes

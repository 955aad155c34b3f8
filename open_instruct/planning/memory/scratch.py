"""The memory of a GPU that no tensor shows: scratch of kernels, CUDA and its libraries.

Formulas, with the place where each can be read:

- Flash attention's backward pass over documents (Dao 2023, arXiv:2307.08691, algorithm 2, which
  adds up dQ; PyTorch's `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`,
  `mha_varlen_bwd`): `dq_accum`, `softmax_d` and, where heads share keys, `dk_expanded` and
  `dv_expanded`. Its forward pass splits no keys over documents (`set_params_splitkv` is of single
  queries); the statistic that it keeps is counted among activations.
- cuBLAS (`aten/src/ATen/cuda/CublasHandlePool.cpp`, `parseChosenWorkspaceSize`): 32 MiB on Hopper
  and Blackwell, 8 on others, for each handle and stream; cuBLASLt has the same memory. A thread has
  a handle: forward's, and autograd's.
- CUDA's allocator (`c10/core/AllocatorConfig.h`, `kMinBlockSize`): tensors take multiples of 512
  bytes.
- NCCL, of every communicator. Each ring channel receives into buffers of three protocols
  (`src/init.cc`, `computeBuffSizes`: 8 x 512 x 8 x 16, 120 x 640 x 8 x 8 and 2^22 bytes) and has a
  head and a tail, each a multiple of 2 MiB (`src/transport/p2p.cc`, `p2pSendSetup` and
  `p2pRecvSetup`). With NVLink SHARP, from three GPUs of a node on, twice 8 steps of 128 KiB for
  each channel and GPU (`src/transport/nvls.cc`, `ncclNvlsBufferSetup`).
"""

from bisect import bisect_left
from collections.abc import Sequence

from open_instruct.core.shard_layout import ShardLayout

MIB = 2**20
ACCUMULATOR_BYTES = 4
QUERY_BLOCK = 128
"""Rows of `dq_accum` behind every document."""
CUBLAS_BYTES = 2 * 32 * MIB
BLOCK_BYTES = 512
# NCCL's own choice on eight GPUs of an NVSwitch; it logs it as "24 coll channels, 16 nvls
# channels".
NUM_CHANNELS = 24
NUM_NVLS_CHANNELS = 16
# Received: 0.5 + 4.7 + 4 MiB and the tail, to the next multiple; sent: the head.
CHANNEL_BYTES = (10 + 2) * MIB
NVLS_CHANNEL_BYTES = 2 * 8 * MIB // 8
# An allowance, not a formula: the driver's own memory and the code of the kernels that were loaded.
CONTEXT_BYTES = 2**29
# Measured, not a formula: what a DPO run of SmolLM2-135M on a CPU has at its peak beside tensors
# (PyTorch 2.13, freed tensors given back at once); it has as much before it reads weights. Of it
# 120 MiB are pages of library files, which the processes of a machine share.
PROCESS_BYTES = 465 * MIB


def attention_scratch(
    *,
    num_queries: int,
    num_keys: int,
    num_documents: int,
    heads: tuple[int, int],
    dim: int,
) -> int:
    """Bytes within flash attention's backward pass over documents, in 16 bits.

    Args:
        heads: of queries, and of keys.
        dim: of one head; the accumulator has it in steps of 32, above 128 of 64.
    """
    num_heads, num_kv_heads = heads
    step = 32 if dim <= QUERY_BLOCK else 64
    num_columns = -(-dim // step) * step + 1  # of `dq_accum`, and of `softmax_d`
    num_rows = (num_queries + QUERY_BLOCK * num_documents) * num_heads
    num_bytes = num_rows * num_columns * ACCUMULATOR_BYTES
    if num_kv_heads != num_heads:
        num_bytes += 2 * num_keys * num_heads * dim * 2  # `dk_expanded` and `dv_expanded`
    return num_bytes


def parts_scratch(num_bytes: int, bytes_per_number: int, share_of_longest: float) -> int:
    """Bytes beside the gradients in attention's backward pass over parts of documents, on a CPU.

    They are sums in float32 of gradients in 16 bits, or else the gradients of the largest part.

    Args:
        num_bytes: of queries, keys and values.
        share_of_longest: the longest document's part of the row.
    """
    if bytes_per_number < ACCUMULATOR_BYTES:
        return num_bytes * ACCUMULATOR_BYTES // bytes_per_number
    return int(num_bytes * share_of_longest)


def communicator_bytes(num_members: int, num_in_node: int) -> int:
    """Bytes of one NCCL communicator; `num_in_node` of its members are on this GPU's node."""
    if num_members == 1:
        return 0
    num_bytes = NUM_CHANNELS * CHANNEL_BYTES
    if num_in_node > 2:
        num_bytes += NUM_NVLS_CHANNELS * NVLS_CHANNEL_BYTES * num_in_node
    return num_bytes


def library_bytes(layout: ShardLayout, *, sends_weights: bool, num_trained: int = 1) -> int:
    """Bytes of CUDA's context and of a communicator for each group that rank 0 is in.

    Args:
        sends_weights: whether one of them is to the receivers of engines.
        num_trained: models that are trained, each of which has groups of its own.
    """
    node = layout.nodes[0]
    groups: list[Sequence[int]] = [range(layout.world_size)]
    for _ in range(num_trained):
        groups.append(layout.replica_groups[0])
        groups.append(layout.shard_groups[0])
        groups.append(layout.tensor_groups[0])
        groups.append(layout.context_groups[0])
    num_bytes = CONTEXT_BYTES
    for group in groups:
        num_in_node = bisect_left(group, node.stop)
        num_bytes += communicator_bytes(len(group), num_in_node)
    if sends_weights:
        num_bytes += communicator_bytes(2, 1)
    return num_bytes

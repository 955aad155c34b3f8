"""The bytes of training state: what is kept of each parameter from step to step, and whether it fits.

Weights, their gradients and the optimizer's moments are float32 whatever is computed in. `layout` asks with a number of
parameters alone; the planner adds what the shape of each parameter decides.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from open_instruct.parallel.layout import divisors
from open_instruct.parallel.wording import degrees_of
from open_instruct.records import ShardLayout

MASTER_BYTES = GRADIENT_BYTES = MOMENT_BYTES = 4
ADAMW_MOMENTS = 2
BYTES_PER_PARAM = MASTER_BYTES + GRADIENT_BYTES + ADAMW_MOMENTS * MOMENT_BYTES


def training_state_gib(layout: ShardLayout, *, num_params: int) -> float:
    """GiB of weights, gradients and AdamW's states on each GPU, activations not counted."""
    return num_params * BYTES_PER_PARAM / (layout.shard_group_size * layout.tensor_parallel_degree) / 2**30


def unsharded_memory_warning(layout: ShardLayout, *, num_params: int, device_memory_gib: float) -> str | None:
    """Words for a model whose training state alone is more than a GPU has, or None where it fits.

    Args:
        layout: the layout the model would train in.
        num_params: parameters of the whole model.
        device_memory_gib: memory of one GPU in GiB.
    """
    each_gib = training_state_gib(layout, num_params=num_params)
    if each_gib <= device_memory_gib:
        return None
    product = " / ".join([f"{num_params / 1e9:.3g}B parameters x {BYTES_PER_PARAM} bytes", *degrees_of(layout)])
    problem = (
        f"The training state does not fit: {product} = {each_gib:.1f} GiB on each GPU, which has "
        f"{device_memory_gib:g} GiB (and activations come on top)."
    )
    for shard_degree in divisors(layout.data_parallel_world_size):
        sharded = replace(
            layout, shard_degree=shard_degree, num_replicas=layout.data_parallel_world_size // shard_degree, warnings=()
        )
        sharded_gib = training_state_gib(sharded, num_params=num_params)
        if sharded_gib <= device_memory_gib:
            return (
                f"{problem} The smallest shard degree that fits is --fsdp_shard_degree {shard_degree} "
                f"--fsdp_num_replicas {sharded.num_replicas}: {sharded_gib:.1f} GiB on each GPU"
                + (", with shard groups across nodes." if sharded.straddles_nodes else ".")
            )
    at_least = ceil(num_params * BYTES_PER_PARAM / 2**30 / device_memory_gib)
    without = ", without --single_gpu_mode" if layout.single_device else ""
    return f"{problem} It needs at least {at_least} such GPUs to shard over{without}."

"""OLMo-core's parallel configs of a layout, and the mesh that OLMo-core keeps for a process.

Both train modules build theirs here and nowhere else. OLMo-core's public functions can only make a
mesh, once.
"""

from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.distributed import parallel
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.train.train_module import transformer
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.core.shard_layout import ShardLayout


def build_data_parallel_config(
    layout: ShardLayout, *, param_dtype: str = "bfloat16", prefetch_factor: int = 0
) -> transformer.TransformerDataParallelConfig | None:
    """OLMo-core's config of data parallelism for a layout: HSDP, with each block a unit of its own.

    Both degrees are always given: by default OLMo-core makes as many replicas as the environment
    counts nodes, and with nodes of unequal size these replicas straddle nodes.

    Args:
        layout: the sharding decision.
        param_dtype: "bfloat16" or "float32", in which parameters are gathered and computed with;
            the shards themselves, and the reduction of their gradients, are float32.
        prefetch_factor: blocks whose gathering is launched, in the forward pass, before the one at
            work.

    Returns:
        The config; None on a single device, where nothing is wrapped.

    Example: `build_data_parallel_config(resolve_layout([8, 8]))` has two replicas, each sharded
    over eight ranks.
    """
    if layout.single_device:
        return None
    return transformer.TransformerDataParallelConfig(
        name=DataParallelType.hsdp,
        wrapping_strategy=transformer.TransformerDataParallelWrappingStrategy.blocks,
        num_replicas=layout.num_replicas,
        shard_degree=layout.shard_degree,
        param_dtype=DType(param_dtype),
        reduce_dtype=DType.float32,
        prefetch_factor=prefetch_factor,
    )


def build_parallel_configs(
    layout: ShardLayout, *, param_dtype: str = "bfloat16", prefetch_factor: int = 0
) -> dict[str, Any]:
    """OLMo-core's configs of data, tensor and context parallelism: `dp`, `tp` and `cp`.

    They are HSDP (`build_data_parallel_config`, whose arguments these are), matrices split over
    ranks, and rows split in Ulysses style. Each has the layout's degrees, and is None where nothing
    is wrapped or split.
    """
    tensor = layout.tensor_parallel_degree
    context = layout.context_parallel_degree
    configs: dict[str, Any] = {
        "dp": build_data_parallel_config(
            layout, param_dtype=param_dtype, prefetch_factor=prefetch_factor
        ),
        "tp": None,
        "cp": None,
    }
    if tensor > 1:
        configs["tp"] = transformer.TransformerTensorParallelConfig(degree=tensor)
    if context > 1:
        configs["cp"] = transformer.TransformerContextParallelConfig.ulysses(context)
    return configs


def find_mesh(layout: ShardLayout, device: torch.device) -> DeviceMesh | None:
    """The mesh of this process, made if there is none: replica, shard, context, tensor.

    None on a single device.
    """
    mesh = parallel.get_world_mesh()
    if mesh is not None or layout.single_device:
        return mesh
    return parallel.build_world_mesh(**build_parallel_configs(layout), device_type=device.type)


def set_mesh(mesh: DeviceMesh | None) -> None:
    """Set the mesh of this process; after None, the next call that needs a mesh makes one."""
    parallel._WORLD_MESH = mesh

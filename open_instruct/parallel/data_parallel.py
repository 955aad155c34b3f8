"""A layout as OLMo-core's parallel configs. Both train modules build theirs here and nowhere else."""

from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.train.train_module.transformer import (
    TransformerContextParallelConfig,
    TransformerDataParallelConfig,
    TransformerDataParallelWrappingStrategy,
    TransformerTensorParallelConfig,
)

from open_instruct.shard_layout import ShardLayout


def build_data_parallel_config(
    layout: ShardLayout, *, param_dtype: str = "bfloat16", prefetch_factor: int = 0
) -> TransformerDataParallelConfig | None:
    """HSDP with the layout's degrees, each block a unit of its own; None where nothing is wrapped.

    Both degrees are always given. By default OLMo-core makes as many replicas as the environment counts nodes, and
    with nodes of unequal size these replicas straddle nodes.

    Args:
        layout: the sharding decision.
        param_dtype: "bfloat16" or "float32", in which parameters are gathered and computed with; the
            shards themselves, and the reduction of their gradients, are float32.
        prefetch_factor: blocks whose gathering is launched, in the forward pass, before the one at work.
    """
    if layout.single_device:
        return None
    return TransformerDataParallelConfig(
        name=DataParallelType.hsdp,
        wrapping_strategy=TransformerDataParallelWrappingStrategy.blocks,
        num_replicas=layout.num_replicas,
        shard_degree=layout.shard_degree,
        param_dtype=DType(param_dtype),
        reduce_dtype=DType.float32,
        prefetch_factor=prefetch_factor,
    )


def build_tensor_parallel_config(layout: ShardLayout) -> TransformerTensorParallelConfig | None:
    """Tensor parallelism of the layout's degree; None where every matrix stays whole."""
    if layout.tensor_parallel_degree == 1:
        return None
    return TransformerTensorParallelConfig(degree=layout.tensor_parallel_degree)


def build_context_parallel_config(layout: ShardLayout) -> TransformerContextParallelConfig | None:
    """Rows split over the layout's context degree, in Ulysses style; None where every rank has whole rows."""
    if layout.context_parallel_degree == 1:
        return None
    return TransformerContextParallelConfig.ulysses(layout.context_parallel_degree)

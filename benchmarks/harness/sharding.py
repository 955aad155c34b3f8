"""Models in shards over gloo, as a run divides them."""

from collections.abc import Callable
from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
from olmo_core.train.train_module.transformer.common import parallelize_model


def sharder(num_ranks: int) -> Callable[[Any], Any]:
    """What divides a model among so many ranks, whose process group is there: fp32 shards,
    computing in bfloat16.
    """
    dp = TransformerDataParallelConfig(
        name=DataParallelType.hsdp,
        num_replicas=1,
        shard_degree=num_ranks,
        param_dtype=DType.bfloat16,
    )
    mesh = build_world_mesh(dp=dp, device_type="cpu")

    def sharded(model: Any) -> Any:
        return parallelize_model(
            model,
            world_mesh=mesh,
            device=torch.device("cpu"),
            max_sequence_length=128,
            dp_config=dp,
        )

    return sharded

"""Models are sharded alike: the policy, and a second model beside it without weights and without an optimizer."""

from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from olmo_core.train.train_module.transformer.common import parallelize_model

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.model.kernels import compiles
from open_instruct.parallel.data_parallel import mesh_of, parallel_configs
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


def build_replica(pretrained: Pretrained, *, run: Run, config: LearnerConfig, **kernels: Any) -> Transformer:
    """Build the model under the policy's own mesh; on a single device, in the compute dtype.

    `kernels`: OLMo-core's configs of activation checkpointing and of float8 products; default: neither.
    """
    model = pretrained.build(init_device=config.model.init_device)
    model.splits_experts = run.layout.expert_parallel_degree > 1
    if run.layout.single_device:
        model = model.to(getattr(torch, config.model.param_dtype))
    return parallelize_model(
        model,
        world_mesh=mesh_of(run.layout, run.process.device),
        compile_model=compiles(config.memory, layout=run.layout, device=run.process.device),
        **kernels,
        **sharding(run, config),
    )


def sharding(run: Run, config: LearnerConfig) -> dict[str, Any]:
    """The arguments that OLMo-core shards a model by: the same for the policy and for each model beside it."""
    configs = parallel_configs(
        run.layout, param_dtype=config.model.param_dtype, prefetch_factor=config.parallel.fsdp_prefetch_factor
    )
    return {
        "device": run.process.device,
        "max_sequence_length": config.data.max_seq_length,
        "rank_microbatch_size": config.data.max_seq_length,
        **{f"{kind}_config": of_kind for kind, of_kind in configs.items()},
    }

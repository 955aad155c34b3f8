"""From a checkpoint on disk to shards of FSDP2 with its weights in place."""

import math

from torch.distributed.checkpoint.state_dict import StateDictOptions

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.model.float8 import float8_config
from open_instruct.learner.model.kernels import choose_kernels, compiles
from open_instruct.learner.olmo_core.fsdp2 import FSDP2Backend
from open_instruct.learner.optim.optimizers import build_optimizer_config, build_scheduler
from open_instruct.learner.reference import build_replica, sharding
from open_instruct.learner.sharded import unfilled
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained

# Checkpoints of adapters hold no frozen weights.
STATE_OF_ADAPTERS = {
    "state_dict_save_opts": StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True),
    "state_dict_load_opts": StateDictOptions(
        flatten_optimizer_state_dict=True, strict=False, ignore_frozen_params=True
    ),
}


def build_backend(pretrained: Pretrained, *, run: Run, config: LearnerConfig, num_steps: int) -> FSDP2Backend:
    """FSDP-first: build without weights, parallelize, then stream the checkpoint into the shards."""
    model, optim, device = config.model, config.optim, run.process.device
    transformer = unfilled(pretrained, config, init_device=model.init_device)
    transformer.splits_experts = run.layout.expert_parallel_degree > 1
    kernels = {
        "ac_config": choose_kernels(transformer, run=run, config=config),
        "float8_config": float8_config(model.float8_linears, model=transformer, device=device),
    }
    # FSDP gathers in the compute dtype; on a single device a copy in that dtype computes, unless the model is frozen.
    has_copy = run.layout.single_device and model.param_dtype != "float32" and config.adapters is None
    module = FSDP2Backend(
        reduces_last=config.parallel.gradient_reduction == "last",
        model=transformer,
        optim=build_optimizer_config(optim, device=device, names=pretrained.names.olmo_core_names),
        scheduler=build_scheduler(optim, num_steps=num_steps),
        compile_model=not has_copy and compiles(config.memory, layout=run.layout, device=device),
        # Infinity clips nothing and still measures the norm.
        max_grad_norm=optim.max_grad_norm or math.inf,
        **sharding(run, config),
        **({} if has_copy else kernels),
        **({} if config.adapters is None else STATE_OF_ADAPTERS),
    )
    if has_copy:
        module.compute_with(build_replica(pretrained, run=run, config=config, **kernels))
    module.fill(pretrained, run=run, config=config)
    return module

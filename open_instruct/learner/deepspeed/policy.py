"""From a checkpoint on disk to a DeepSpeed engine with its weights in place."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import build_world_mesh, get_cp_mesh

from open_instruct.config.training import LearnerConfig
from open_instruct.errors import InputError
from open_instruct.learner.deepspeed.library import deepspeed
from open_instruct.learner.deepspeed.settings import engine_settings
from open_instruct.learner.deepspeed.train_module import DeepSpeedTrainModule, HeldAdamWConfig
from open_instruct.learner.olmo_core.inputs_on_host import offload_inputs
from open_instruct.learner.olmo_core.optimizers import build_optimizer_config, build_scheduler
from open_instruct.learner.olmo_core.policy import choose_kernels
from open_instruct.models.load import stream_load
from open_instruct.objectives.objective import BoundLoss
from open_instruct.parallel.data_parallel import build_context_parallel_config, build_data_parallel_config
from open_instruct.parallel.peers import doing
from open_instruct.parallel.wording import counted
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


def join_deepspeed(*, timeout_s: int) -> None:
    """Have DeepSpeed use the process group that is there. Seeds, device and the group itself were set by the run.

    It remembers the groups of an earlier run in this process, which are gone.
    """
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.init_distributed(timeout=timedelta(seconds=timeout_s))


def build_policy(
    pretrained: Pretrained, *, run: Run, config: LearnerConfig, num_steps: int, loss: BoundLoss
) -> DeepSpeedTrainModule:
    """Build without weights, share, then stream the checkpoint into the shards of what is trained."""
    doing("loading the start model")
    parallel, model, optim = config.parallel, config.model, config.optim
    join_deepspeed(timeout_s=parallel.dist_timeout_s)
    device, max_seq_length = run.process.device, config.data.max_seq_length
    transformer = pretrained.build(init_device="meta").to(getattr(torch, model.param_dtype))
    if len({parameter.dtype for parameter in transformer.parameters()}) > 1:
        raise InputError(
            f"--param_dtype {model.param_dtype}: the matrix of the score stays float32, and DeepSpeed takes one dtype "
            "for all; use --param_dtype float32, or --backend olmo_core"
        )
    checkpointing = choose_kernels(transformer, run=run, config=config)
    module = DeepSpeedTrainModule(
        settings=engine_settings(parallel, model=model, optim=optim, on_cuda=device.type == "cuda"),
        loss=loss,
        model=transformer,
        optim=HeldAdamWConfig(
            **vars(build_optimizer_config(optim, device=device, has_biases=pretrained.names.has_biases))
        ),
        scheduler=build_scheduler(optim, num_steps=num_steps),
        rank_microbatch_size=max_seq_length,
        max_sequence_length=max_seq_length,
        ac_config=checkpointing,
        max_grad_norm=optim.max_grad_norm or math.inf,
        device=device,
    )
    # DeepSpeed is told of none: it averages over all ranks, whichever of them split a row. Frozen models that stand
    # beside the policy are FSDP2's, over the same ranks.
    dp, cp = build_data_parallel_config(run.layout), build_context_parallel_config(run.layout)
    module.world_mesh = build_world_mesh(dp=dp, cp=cp, device_type=device.type)
    if cp is not None:
        module.model.apply_cp(get_cp_mesh(module.world_mesh))
    offload_inputs(module.model, config.memory, device)
    report = stream_load(module.model, pretrained.files, pretrained.names)
    module.masters.changed(num_steps=0)
    dist.barrier()  # no rank is ready before all are
    run.console.say(
        f"loaded {counted(report.num_tensors, 'tensor')} ({report.num_bytes_read / 1e6:,.1f} MB on this rank) "
        f"in {report.wall_time_s:.1f} s"
    )
    return module

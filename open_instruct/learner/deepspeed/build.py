"""From a checkpoint on disk to a DeepSpeed engine with its weights in place."""

import math
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed import parallel as olmo_core_parallel
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.deepspeed.library import deepspeed
from open_instruct.learner.deepspeed.optimizers import adam_for, choose_adam
from open_instruct.learner.deepspeed.settings import engine_settings
from open_instruct.learner.deepspeed.zero import ZeroBackend
from open_instruct.learner.model.inputs_on_host import offload_inputs
from open_instruct.learner.model.kernels import choose_kernels
from open_instruct.learner.optim.optimizers import build_optimizer_config, build_scheduler
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.models.load import stream_load
from open_instruct.models.lora.adapters import adapt, fill_adapter
from open_instruct.parallel.data_parallel import keep_mesh, mesh_of
from open_instruct.parallel.peers import doing
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.wording import counted


def set_up(run: Run, config: LearnerConfig) -> tuple[DeviceMesh, dict[str, Any]]:
    """Set DeepSpeed up on the process group of `start_process`. Returns the mesh and DeepSpeed's config."""
    parallel, process = config.parallel, run.process
    # DeepSpeed reads a launcher's variables, and remembers the groups of an earlier run in this process.
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.init_distributed(timeout=timedelta(seconds=parallel.dist_timeout_s))
    mesh = mesh_of(run.layout, process.device)
    assert mesh is not None
    on_cuda = process.device.type == "cuda"
    # The config names no gradient accumulation, so DeepSpeed does not divide by it.
    return mesh, engine_settings(parallel, model=config.model, optim=config.optim, on_cuda=on_cuda)


def uncompiled(config: LearnerConfig) -> LearnerConfig:
    """The config without --compile_model: DeepSpeed compiles no blocks, so a broken compiler needs no warning."""
    return replace(config, memory=replace(config.memory, compile_model=False))


def build_backend(pretrained: Pretrained, *, run: Run, config: LearnerConfig, num_steps: int) -> ZeroBackend:
    """Build without weights, partition, then stream the checkpoint into the shards of the trained weights."""
    doing("loading the start model")
    mesh, settings = set_up(run, config)
    model, optim, parallel = config.model, config.optim, config.parallel
    device, max_seq_length = run.process.device, config.data.max_seq_length
    transformer, param_dtype = pretrained.build(init_device="meta"), getattr(torch, model.param_dtype)
    if (lora := config.adapters) is not None:
        adapt(transformer, lora, dtype=param_dtype)
    if isinstance(transformer.lm_head, ValueHead):
        transformer.lm_head.keeps_float32 = False  # DeepSpeed takes one dtype for all, and steps float32 ones
    transformer.to(param_dtype)  # adapters too
    adamw = build_optimizer_config(optim, device=device, names=pretrained.names.olmo_core_names)
    keep_mesh(None)  # OLMo-core's train module makes a mesh of its own, which nothing reads
    module = ZeroBackend(
        settings=settings,
        model=transformer,
        optim=choose_adam(adamw, adam_for(device, adam_offload=parallel.adam_offload), warn=run.console.warn),
        scheduler=build_scheduler(optim, num_steps=num_steps),
        rank_microbatch_size=max_seq_length,
        max_sequence_length=max_seq_length,
        ac_config=choose_kernels(transformer, run=run, config=uncompiled(config)),
        max_grad_norm=optim.max_grad_norm or math.inf,
        device=device,
    )
    # DeepSpeed does not know which ranks split rows: it averages over all ranks. Frozen models beside the policy are
    # sharded by FSDP2 over the same ranks.
    module.world_mesh = mesh
    keep_mesh(mesh)
    if run.layout.context_parallel_degree > 1:
        module.model.apply_cp(olmo_core_parallel.get_cp_mesh(mesh))
    offload_inputs(module.model, config.memory, device)
    report = stream_load(module.model, pretrained.files, pretrained.names)
    if lora is not None:
        fill_adapter(module.model, lora, seed=optim.seed, start=pretrained.adapter)
    module.masters.changed(num_steps=0)
    dist.barrier()  # no rank is ready before all are
    run.console.say(
        f"loaded {counted(report.num_tensors, 'tensor')} ({report.num_bytes_read / 1e6:,.1f} MB on this rank) "
        f"in {report.wall_time_s:.1f} s; {type(module.optim).__name__.removeprefix('Held')} takes the steps"
    )
    return module

"""From a checkpoint on disk to a DeepSpeed engine with its weights in place."""

import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from olmo_core.distributed import parallel as olmo_core_parallel
from olmo_core.optim import OptimConfig
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.deepspeed.library import deepspeed
from open_instruct.learner.deepspeed.settings import engine_settings
from open_instruct.learner.deepspeed.zero import ZeroBackend
from open_instruct.learner.model.kernels import choose_kernels
from open_instruct.learner.optim.optimizers import AdamLikeConfig, build_optimizer_config, build_scheduler
from open_instruct.learner.sharded import unfilled
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.parallel.data_parallel import keep_mesh, mesh_of
from open_instruct.parallel.process import gathered
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained

Adam = Literal["FusedAdam", "CPUAdam", "AdamW"]


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
    mesh, settings = set_up(run, config)
    optim, device, max_seq_length = config.optim, run.process.device, config.data.max_seq_length
    transformer = unfilled(pretrained, config, init_device="meta")
    if isinstance(transformer.lm_head, ValueHead):
        transformer.lm_head.keeps_float32 = False  # DeepSpeed takes one dtype for all, and steps float32 ones
    transformer.to(getattr(torch, config.model.param_dtype))  # adapters too
    adamw = build_optimizer_config(optim, device=device, names=pretrained.names.olmo_core_names)
    keep_mesh(None)  # OLMo-core's train module makes a mesh of its own, which nothing reads
    module = ZeroBackend(
        settings=settings,
        model=transformer,
        optim=choose_adam(adamw, adam_for(device, adam_offload=config.parallel.adam_offload), warn=run.console.warn),
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
    module.fill(pretrained, run=run, config=config)
    run.console.say(f"{type(module.optim).__name__} takes the steps")
    dist.barrier()  # no rank is ready before all are
    return module


def adam_for(device: torch.device, *, adam_offload: bool) -> Adam:
    """DeepSpeed's Adam on CUDA, for states on the device or in host memory; PyTorch's on a CPU, without a compiler."""
    return "AdamW" if device.type != "cuda" else "CPUAdam" if adam_offload else "FusedAdam"


def building_problem(adam: Adam) -> str | None:
    """Why the kernel of DeepSpeed's Adam cannot be compiled here. It takes a minute or two, once a machine."""
    try:
        getattr(deepspeed.ops.op_builder, f"{adam}Builder")().load()
    except Exception as error:  # a compiler, or the lack of one, may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


class FusedAdamConfig(AdamLikeConfig):
    """DeepSpeed's Adam on CUDA."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.Optimizer]:
        return deepspeed.ops.adam.FusedAdam


class CPUAdamConfig(FusedAdamConfig):
    """DeepSpeed's Adam for states in host memory."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.Optimizer]:
        return deepspeed.ops.adam.DeepSpeedCPUAdam


def choose_adam(adamw: OptimConfig[Any], adam: Adam, *, warn: Callable[[str], None]) -> OptimConfig[Any]:
    """The config of `adam` if every rank can compile its kernel, otherwise PyTorch's `adamw`. Collective."""
    if adam == "AdamW":
        return adamw
    if problems := [why for why in gathered(building_problem(adam)) if why]:
        warn(f"DeepSpeed's {adam} cannot be compiled here ({problems[0]}); PyTorch's AdamW takes the steps")
        return adamw
    kind = FusedAdamConfig if adam == "FusedAdam" else CPUAdamConfig
    return kind(**{each.name: getattr(adamw, each.name) for each in fields(kind)})

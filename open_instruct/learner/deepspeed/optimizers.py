"""The choice of AdamW: DeepSpeed's own for the device, or PyTorch's."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

import torch
from olmo_core.optim import OptimConfig

from open_instruct.learner.deepspeed.library import deepspeed
from open_instruct.learner.optim.optimizers import AdamLikeConfig
from open_instruct.parallel.process import gathered

Adam = Literal["FusedAdam", "CPUAdam", "AdamW"]


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

"""Which AdamW takes the steps: DeepSpeed's own for the device, or PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

import torch
from olmo_core.optim import OptimConfig

from open_instruct.learner.deepspeed.library import deepspeed
from open_instruct.learner.olmo_core.optimizers import AdamLikeConfig
from open_instruct.parallel.process import gathered

Adam = Literal["FusedAdam", "CPUAdam", "AdamW"]


def adam_for(device: torch.device, *, adam_offload: bool) -> Adam:
    """On CUDA that which was made for where the states are; a CPU's is PyTorch's, and needs no compiler."""
    return "AdamW" if device.type != "cuda" else "CPUAdam" if adam_offload else "FusedAdam"


def building_problem(adam: Adam) -> str | None:
    """Why the kernel of DeepSpeed's Adam cannot be compiled here. It takes a minute or two, once a machine."""
    try:
        getattr(deepspeed.ops.op_builder, f"{adam}Builder")().load()
    except Exception as error:  # whatever a compiler, or the lack of one, makes of it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


class FusedAdamConfig(AdamLikeConfig):
    """DeepSpeed's Adam on CUDA."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.Optimizer]:
        return deepspeed.ops.adam.FusedAdam


class CPUAdamConfig(FusedAdamConfig):
    """The same for states in host memory."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.Optimizer]:
        return deepspeed.ops.adam.DeepSpeedCPUAdam


def choose_adam(adamw: OptimConfig[Any], adam: Adam, *, warn: Callable[[str], None]) -> OptimConfig[Any]:
    """`adamw`, PyTorch's, or what `adam` has for it, if every rank can compile that. Collective."""
    if adam == "AdamW":
        return adamw
    if problems := [why for why in gathered(building_problem(adam)) if why]:
        warn(f"DeepSpeed's {adam} cannot be compiled here ({problems[0]}); PyTorch's AdamW takes the steps")
        return adamw
    config = CPUAdamConfig if adam == "CPUAdam" else FusedAdamConfig
    return config(**{each.name: getattr(adamw, each.name) for each in fields(config)})

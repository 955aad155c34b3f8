"""Which Adam a run on DeepSpeed steps with: its own, where the kernel can be compiled."""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from olmo_core.optim import OptimConfig
from torch.utils.cpp_extension import get_default_build_root

from open_instruct.parallel.process import gather_objects
from open_instruct.training.deepspeed.library import deepspeed
from open_instruct.training.optim.optimizers import AdamLikeConfig

Adam = Literal["FusedAdam", "CPUAdam", "AdamW"]


def choose_adam_kind(device: torch.device, *, adam_offload: bool) -> Adam:
    """DeepSpeed's Adam on CUDA, and PyTorch's on a CPU, where it needs no compiler."""
    if device.type != "cuda":
        return "AdamW"
    return "CPUAdam" if adam_offload else "FusedAdam"  # states in host memory, or on the device


def find_build_locks(adam: Adam) -> list[Path]:
    """The files by which a process says that it is compiling the kernel, in PyTorch's folder of
    extensions. Others wait until they are gone, for ever if it was killed.
    """
    builder = getattr(deepspeed.ops.op_builder, f"{adam}Builder")
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return [*folder.glob(f"{builder.NAME}/lock"), *folder.glob(f"*/{builder.NAME}/lock")]


def find_build_problem(adam: Adam) -> str | None:
    """Why the kernel of DeepSpeed's Adam cannot be compiled here.

    It takes a minute or two, once a machine.
    """
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


def choose_adam_config(
    adamw: OptimConfig[Any], adam: Adam, *, warn: Callable[[str], None]
) -> OptimConfig[Any]:
    """The config of `adam` if every rank can compile its kernel, otherwise PyTorch's `adamw`.

    Collective.
    """
    if adam == "AdamW":
        return adamw
    for lock in find_build_locks(adam):
        warn(
            f"this run waits for another process that compiles DeepSpeed's {adam}: if there is "
            f"none, end the run and remove {lock}"
        )
    problems = [why for why in gather_objects(find_build_problem(adam)) if why]
    if problems:
        warn(f"DeepSpeed's {adam} cannot be compiled here ({problems[0]}); PyTorch's AdamW is used")
        return adamw
    kind = FusedAdamConfig if adam == "FusedAdam" else CPUAdamConfig
    return kind(**{each.name: getattr(adamw, each.name) for each in fields(kind)})

"""Which Adam a run on DeepSpeed steps with: its own, where the kernel can be compiled."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from olmo_core.optim import OptimConfig
from torch.utils.cpp_extension import _get_build_directory

from open_instruct.parallel.process import gather_objects
from open_instruct.training.deepspeed.library import deepspeed
from open_instruct.training.optim.optimizers import AdamLikeConfig

Adam = Literal["FusedAdam", "CPUAdam", "AdamW"]


def choose_adam_kind(device: torch.device, *, adam_offload: bool) -> Adam:
    """DeepSpeed's Adam on CUDA, and PyTorch's on a CPU, where it needs no compiler."""
    if device.type != "cuda":
        return "AdamW"
    return "CPUAdam" if adam_offload else "FusedAdam"  # states in host memory, or on the device


def find_builder(adam: Adam) -> Any:
    """DeepSpeed's class that compiles the kernel."""
    return getattr(deepspeed.ops.op_builder, f"{adam}Builder")


def find_build_lock(adam: Adam) -> Path | None:
    """The file by which a process says that it is compiling the kernel, if it is there.

    Others wait until it is gone, for ever if that process was killed.
    """
    folder = _get_build_directory(find_builder(adam).NAME, verbose=False)
    lock = Path(folder) / "lock"
    return lock if lock.exists() else None


def find_build_problem(adam: Adam) -> str | None:
    """Why the kernel of DeepSpeed's Adam cannot be compiled here.

    It takes a minute or two, once a machine.
    """
    try:
        find_builder(adam)().load()
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
    # All ranks look before any of them compiles: the lock is none of theirs.
    locks = [lock for lock in gather_objects(find_build_lock(adam)) if lock]
    if locks:
        warn(
            f"this run waits for another process that compiles DeepSpeed's {adam}: if there is "
            f"none, end the run and remove {locks[0]}"
        )
    problems = [why for why in gather_objects(find_build_problem(adam)) if why]
    if problems:
        warn(f"DeepSpeed's {adam} cannot be compiled here ({problems[0]}); PyTorch's AdamW is used")
        return adamw
    kind = FusedAdamConfig if adam == "FusedAdam" else CPUAdamConfig
    return kind(**{each.name: getattr(adamw, each.name) for each in fields(kind)})

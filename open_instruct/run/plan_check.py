"""A run's plan against the memory that its devices really have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from open_instruct.config.training import LearnerConfig
from open_instruct.parallel.process import gathered, on_main_process
from open_instruct.planning.shown.start_check import check_plan
from open_instruct.planning.subject.workload import RunConfig
from open_instruct.run.console import Console
from open_instruct.run.opened import Run
from open_instruct.run.run_directory import RunDirectory

ConfigT = TypeVar("ConfigT", bound=LearnerConfig)
CHOSEN = ("activation_checkpointing", "activation_checkpointing_modules")


def planned_run(config: ConfigT, run: Run, folder: Path) -> ConfigT:
    """Print the plan of a run whose ranks have met; `folder` holds the model's config.json.

    Returns the flags with the plan's choices for the smallest device, the same on every rank.

    :raises InputError: if it surely cannot fit, on every rank.
    """
    process, nodes = run.process, run.layout.gpus_per_node
    memory_bytes = min(gathered(memory_of(process.device, num_sharing=nodes[run.layout.node_of(process.rank)])))

    def say() -> dict[str, Any]:
        on_cuda, directory = process.device.type == "cuda", run.directory
        return say_plan(
            config, nodes, folder, memory_bytes=memory_bytes, on_cuda=on_cuda, console=run.console, directory=directory
        )

    return with_chosen(config, on_main_process(say))


def say_plan(
    config: LearnerConfig,
    gpus_per_node: Sequence[int],
    folder: Path,
    *,
    memory_bytes: int,
    on_cuda: bool,
    console: Console,
    directory: RunDirectory,
) -> dict[str, Any]:
    """Print the plan of a run on devices of `memory_bytes`, write it to the run's folder, and return what was written.

    One process does this for all; `with_chosen` reads the result.

    :raises InputError: if it surely cannot fit.
    """
    verdict = check_plan(
        cast(RunConfig, config),  # which of them, the planner asks the object itself
        gpus_per_node,
        model_folder=str(folder),
        memory_bytes=memory_bytes,
        on_cuda=on_cuda,
    )
    console.say(verdict.line, style="yellow" if verdict.warning else None)
    if verdict.warning:
        console.warn(verdict.warning)
    directory.write_plan(verdict.memory)
    return verdict.memory


def with_chosen(config: ConfigT, plan: Mapping[str, Any]) -> ConfigT:
    """The flags with the saved plan's choice for --activation_checkpointing auto; unchanged without a plan."""
    if config.memory.activation_checkpointing != "auto":
        return config
    chosen = {"activation_checkpointing": "none"} | {name: plan[name] for name in CHOSEN if plan.get(name)}
    return replace(config, memory=replace(config.memory, **chosen))


def memory_of(device: torch.device, *, num_sharing: int) -> int:
    """Bytes of a GPU; without CUDA `num_sharing` processes share the host's."""
    on_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory if on_cuda else _host_bytes() // num_sharing


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

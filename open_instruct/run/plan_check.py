"""A run's plan against the memory that its devices really have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from open_instruct.config.training import LearnerConfig
from open_instruct.planning.start_check import check_plan
from open_instruct.planning.subject.workload import RunConfig
from open_instruct.run.console import Console
from open_instruct.run.opened import Run


def check_plan_of_run(config: LearnerConfig, run: Run, folder: Path) -> None:
    """Say the plan of a run whose ranks have met; `folder` holds the model's config.json.

    :raises InputError: if it surely cannot fit, on every rank.
    """
    process, nodes = run.process, run.layout.gpus_per_node
    num_sharing = nodes[run.layout.node_of(process.rank)]
    say_plan(config, nodes, folder, device=process.device, num_sharing=num_sharing, console=run.console)


def say_plan(
    config: LearnerConfig,
    gpus_per_node: Sequence[int],
    folder: Path,
    *,
    device: torch.device,
    num_sharing: int,
    console: Console,
) -> None:
    """Say the plan of a run on devices like `device`; without CUDA `num_sharing` processes share the host's memory.

    :raises InputError: if it surely cannot fit.
    """
    on_cuda = device.type == "cuda"
    verdict = check_plan(
        cast(RunConfig, config),  # which of them, the planner asks the object itself
        gpus_per_node,
        model_folder=str(folder),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_cuda else _host_bytes() // num_sharing,
        on_cuda=on_cuda,
    )
    warning = verdict.warning or verdict.refusal
    console.say(verdict.line, style="yellow" if warning else None)
    if warning is not None:
        console.warn(warning)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""A run's plan against the memory that its devices really have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from open_instruct.planning.start_check import check_plan
from open_instruct.run.console import Console
from open_instruct.run.opened import Run


def check_plan_of_run(config: Any, run: Run, folder: Path) -> None:
    """Say the plan of a run whose ranks have met; `folder` holds the model's config.json.

    :raises InputError: if it surely cannot fit, on every rank.
    """
    process, nodes = run.process, run.layout.gpus_per_node
    num_sharing = nodes[run.layout.node_of(process.rank)]
    say_plan(config, nodes, folder, device=process.device, num_sharing=num_sharing, console=run.console)


def say_plan(
    config: Any,
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
        config,
        gpus_per_node,
        model_folder=str(folder),
        memory_bytes=_gpu_bytes(device) if on_cuda else _host_bytes() // num_sharing,
        on_cuda=on_cuda,
    )
    warning = verdict.warning or verdict.refusal
    console.say(verdict.line, style="yellow" if warning else None)
    if warning is not None:
        console.warn(warning)


def _gpu_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

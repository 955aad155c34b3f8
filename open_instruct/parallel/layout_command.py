"""`open-instruct layout`: show which rank belongs to which group, before any GPU is taken."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from rich.console import Console

from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.parser import parse
from open_instruct.config.sections import ParallelSection, flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.errors import InputError
from open_instruct.parallel.layout import layout_of
from open_instruct.parallel.node_sizes import read_node_sizes
from open_instruct.parallel.picture import draw_layout
from open_instruct.parallel.training_state import training_state_gib, unsharded_memory_warning
from open_instruct.records import ShardLayout

DEFAULT_MEMORY_GIB = 80.0


@dataclass(kw_only=True)
class LayoutSection:
    """Layout"""

    gpus_per_node: list[str] = flag(
        "GPUs that train on each node, one number for each node; 4x8 stands for four nodes of 8"
    )
    fsdp_shard_degree: int | None = flag(
        "GPUs that share one copy of the model; default: as many as never make a group straddle nodes", None, minimum=1
    )
    fsdp_num_replicas: int | None = flag(
        "copies of the model; default: what the shard degree leaves, one for each node of equal size", None, minimum=1
    )
    tensor_parallel_degree: int = flag("neighbouring GPUs that split every matrix", 1, minimum=1)
    context_parallel_degree: int = flag("GPUs that split every row of tokens", 1, minimum=1)
    single_gpu_mode: bool = flag("one GPU without FSDP; refuses any flag that shards", False)
    num_params: str | None = flag(
        "parameters of the model, such as 7B or 370M: also say whether its training state fits; default: unknown", None
    )
    device_memory_gib: float | None = flag("memory of one GPU, for --num_params; default: 80", None, above=0)
    json: bool = flag("print JSON, with every group as a list of global ranks", False)


@dataclass(kw_only=True)
class LayoutFlags:
    """Show how a model would be sharded: which GPUs share one copy of it (a shard group), which hold
    the same shard of it (a replica group), and which of the traffic leaves a node. Nothing is started.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct layout --gpus_per_node 8 8",
        "open-instruct layout --gpus_per_node 2 4",
        "open-instruct layout --gpus_per_node 128x8 --fsdp_shard_degree 16",
        "open-instruct layout --gpus_per_node 4x8 --tensor_parallel_degree 8 --num_params 32B",
        "open-instruct layout --gpus_per_node 8 8 --json",
    )

    layout: LayoutSection


def layout_command(args: Sequence[str]) -> int:
    """Run `open-instruct layout` with the words after it; returns the exit code.

    Raises:
        InputError: a flag is wrong, or there is no such layout.
    """
    if asks_for_help(args):
        print_help(LayoutFlags, "open-instruct layout")
        return 0
    flags = parse(LayoutFlags, args).layout
    refuse(limit_problems(flags))
    layout, state_gib = _resolve(flags)
    if flags.json:
        record = layout.as_json()
        if state_gib is not None:
            record["training_state_gib_per_gpu"] = round(state_gib, 3)
        # One key to a line: readable, and still short for a thousand ranks.
        print("{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()) + "\n}")
        return 0
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    console.print(draw_layout(layout))
    if state_gib is not None:
        memory_gib = flags.device_memory_gib or DEFAULT_MEMORY_GIB
        console.print(f"\ntraining state: {state_gib:.1f} GiB on each GPU of {memory_gib:g} GiB, before activations")
    return 0


def _resolve(flags: LayoutSection) -> tuple[ShardLayout, float | None]:
    """The layout, and the GiB of training state on each GPU where --num_params was given."""
    gpus_per_node = read_node_sizes(flags.gpus_per_node)
    of_run = {each.name: getattr(flags, each.name) for each in fields(ParallelSection) if hasattr(flags, each.name)}
    layout = layout_of(ParallelSection(**of_run), gpus_per_node)
    if flags.num_params is None:
        if flags.device_memory_gib is not None:
            raise InputError("--device_memory_gib is read only with --num_params; add that, or leave it out")
        return layout, None
    num_params, memory_gib = _number_of_params(flags.num_params), flags.device_memory_gib or DEFAULT_MEMORY_GIB
    warning = unsharded_memory_warning(layout, num_params=num_params, device_memory_gib=memory_gib)
    if warning is not None:
        layout = replace(layout, warnings=(*layout.warnings, warning))
    return layout, training_state_gib(layout, num_params=num_params)


def _number_of_params(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?(?:[eE]\d{1,2})?)([KMBT]?)", text.strip(), re.ASCII | re.IGNORECASE)
    number = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0.0
    if number < 1:
        raise InputError(f"--num_params {text!r} is not a number of parameters; write it as 7B, 370M or 6.9e9")
    return round(number)

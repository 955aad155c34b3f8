"""`open-instruct layout`: show which rank belongs to which group, before any GPU is taken."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rich.console import Console

from open_instruct.commands.run_flags import find_backend
from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.config.sharding_sections import DegreesSection, ParallelSection
from open_instruct.config.validation import limit_problems, parallel_problems, refuse
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.node_sizes import read_node_sizes
from open_instruct.parallel.picture import draw_layout


@dataclass(kw_only=True)
class LayoutFlags(DegreesSection):
    """Show how a model would be sharded: which GPUs share one copy of it (a shard group), which
    hold the same shard of it (a replica group), and which of the traffic leaves a node. Nothing is
    started.

    Examples:
        open-instruct layout --gpus_per_node 8 8
        open-instruct layout --gpus_per_node 2 4
        open-instruct layout --gpus_per_node 128x8 --fsdp_shard_degree 16
        open-instruct layout --gpus_per_node 4x8 --tensor_parallel_degree 8
        open-instruct layout --gpus_per_node 8 8 --json
    """

    gpus_per_node: list[str] = flag(
        "GPUs that train on each node, one number for each node; 4x8 stands for four nodes of 8"
    )
    single_gpu_mode: bool = flag("one GPU without FSDP; refuses any flag that shards", False)
    json: bool = flag("print JSON, with every group as a list of global ranks", False)


def main(args: Sequence[str]) -> int:
    """Run `open-instruct layout` with the words after it; returns the exit code.

    Raises:
        InputError: a flag is wrong, or there is no such layout.
    """
    flags = parse(LayoutFlags, args)
    degrees = {each.name: getattr(flags, each.name) for each in fields(DegreesSection)}
    parallel = ParallelSection(single_gpu_mode=flags.single_gpu_mode, **degrees)
    refuse([*limit_problems(flags), *parallel_problems(parallel)])
    nodes = read_node_sizes(flags.gpus_per_node)
    layout = find_layout(parallel, nodes, find_backend(parallel.backend))
    if flags.json:
        # One key to a line: readable, and still short for a thousand ranks.
        lines = (
            f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in layout.as_json().items()
        )
        print("{\n" + ",\n".join(lines) + "\n}")
    else:
        Console(file=sys.stdout, soft_wrap=True, highlight=False).print(draw_layout(layout))
    return 0

"""`open-instruct layout`: show which rank belongs to which group, before any GPU is taken."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import NoReturn

from rich.console import Console

from open_instruct.errors import EXIT_INPUT, InputError
from open_instruct.parallel.layout import resolve_layout
from open_instruct.parallel.node_sizes import MAX_GPUS, read_node_sizes
from open_instruct.parallel.picture import print_layout
from open_instruct.parallel.training_state import training_state_gib, unsharded_memory_warning
from open_instruct.records import ShardLayout

DEFAULT_MEMORY_GIB = 80.0
DESCRIPTION = """\
Show how a model would be sharded: which GPUs share one copy of it (a shard group), which hold
the same shard of it (a replica group), and which of the traffic leaves a node. Nothing is started.
"""

EXAMPLES = """\
examples:
  open-instruct layout --gpus_per_node 8 8
  open-instruct layout --gpus_per_node 2 4
  open-instruct layout --gpus_per_node 128x8 --fsdp_shard_degree 16
  open-instruct layout --gpus_per_node 4x8 --tensor_parallel_degree 8 --num_params 32B
  open-instruct layout --gpus_per_node 8 8 --json
"""


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as an InputError rather than by leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def layout_command(args: Sequence[str]) -> int:
    """Run `open-instruct layout` with the words after it; returns the exit code, 2 for bad input."""
    parser = _build_parser()
    try:
        try:
            flags, unknown = parser.parse_known_args(list(args))
        except SystemExit:  # --help has printed itself
            return 0
        if unknown:
            raise InputError(_unknown_flag(unknown[0], parser))
        layout, state_gib = _resolve(flags)
    except InputError as error:
        print(f"open-instruct layout: {error}", file=sys.stderr)
        return EXIT_INPUT

    if flags.json:
        record = layout.as_json()
        if state_gib is not None:
            record["training_state_gib_per_gpu"] = round(state_gib, 3)
        # One key to a line: readable, and still short for a thousand ranks.
        print("{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()) + "\n}")
        return 0
    console = Console(file=sys.stdout)
    print_layout(layout, console)
    if state_gib is not None:
        console.print(
            f"\ntraining state: {state_gib:.1f} GiB on each GPU of {flags.device_memory_gib:g} GiB, before activations",
            soft_wrap=True,
            highlight=False,
        )
    return 0


def _resolve(flags: argparse.Namespace) -> tuple[ShardLayout, float | None]:
    """The layout, and the GiB of training state on each GPU where --num_params was given."""
    gpus_per_node = [num_gpus for sizes in flags.gpus_per_node for num_gpus in sizes]
    if sum(gpus_per_node) > MAX_GPUS:
        raise InputError(f"--gpus_per_node names {sum(gpus_per_node)} GPUs in all; at most {MAX_GPUS} can be shown")
    layout = resolve_layout(
        gpus_per_node,
        fsdp_shard_degree=flags.fsdp_shard_degree,
        fsdp_num_replicas=flags.fsdp_num_replicas,
        tensor_parallel_degree=flags.tensor_parallel_degree,
        context_parallel_degree=flags.context_parallel_degree,
        single_device=flags.single_gpu_mode,
    )
    if flags.num_params is None:
        if flags.device_memory_gib is not None:
            raise InputError("--device_memory_gib is read only with --num_params; add that, or leave it out")
        return layout, None
    flags.device_memory_gib = flags.device_memory_gib or DEFAULT_MEMORY_GIB
    warning = unsharded_memory_warning(layout, num_params=flags.num_params, device_memory_gib=flags.device_memory_gib)
    if warning is not None:
        layout = replace(layout, warnings=(*layout.warnings, warning))
    return layout, training_state_gib(layout, num_params=flags.num_params)


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="open-instruct layout",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpus_per_node",
        type=_node_sizes,
        nargs="+",
        required=True,
        metavar="N",
        help="GPUs that train on each node, one number for each node; 4x8 stands for four nodes of 8",
    )
    parser.add_argument(
        "--fsdp_shard_degree",
        type=_count,
        metavar="N",
        help="GPUs that share one copy of the model; default: as many as never make a group straddle nodes",
    )
    parser.add_argument(
        "--fsdp_num_replicas",
        type=_count,
        metavar="N",
        help="copies of the model; default: what the shard degree leaves, one for each node of equal size",
    )
    parser.add_argument(
        "--tensor_parallel_degree",
        type=_count,
        default=1,
        metavar="N",
        help="neighbouring GPUs that split every matrix (default: 1)",
    )
    parser.add_argument(
        "--context_parallel_degree",
        type=_count,
        default=1,
        metavar="N",
        help="GPUs that split every row of tokens (default: 1)",
    )
    parser.add_argument(
        "--single_gpu_mode", action="store_true", help="one GPU without FSDP; refuses any flag that shards"
    )
    parser.add_argument(
        "--num_params",
        type=_num_params,
        metavar="N",
        help="parameters of the model, such as 7B or 370M: also say whether its training state fits",
    )
    parser.add_argument(
        "--device_memory_gib",
        type=_gib,
        metavar="GIB",
        help="memory of one GPU, for --num_params (default: 80)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every group as a list of global ranks")
    return parser


def _unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{word!r} is not a flag; see open-instruct layout --help"
    name = word.split("=")[0]
    near = difflib.get_close_matches(name, list(parser._option_string_actions), n=1)
    return f"unknown flag {name}; " + (f"did you mean {near[0]}?" if near else "see open-instruct layout --help")


def _count(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _node_sizes(text: str) -> list[int]:
    try:
        return read_node_sizes(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _num_params(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?(?:[eE]\d{1,2})?)([KMBT]?)", text.strip(), re.ASCII | re.IGNORECASE)
    number = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0.0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write it as 7B, 370M or 6.9e9")
    return round(number)


def _gib(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not (isfinite(gib) and gib > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB above 0")
    return gib

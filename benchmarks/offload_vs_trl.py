"""Memory of DPO with its shards in host memory (`--offload`), beside TRL's on accelerate's FSDP2
with the same.

    python benchmarks/offload_vs_trl.py                      # some minutes on two cores
    python benchmarks/offload_vs_trl.py --parts host --size base
    python benchmarks/offload_vs_trl.py --parts device --layers 32

host: under offload that is where all of it lies. Both run for real on gloo ranks of CPUs, where
nothing has to move: the same model, rows, float32 and batch, reference log-probs computed before.
The peak is of a rank's process (VmHWM): in its steps alone, and in all of the run up to their end,
with what loading and the reference took.

device: the most that a step holds of a GPU, of one microbatch and of two, each a pair of --length
tokens whose prompt is not shared, as rank 0 of 8: a public model cut to --layers, float32 shards,
bfloat16 products, blocks recomputed and nothing compiled. Both sides' own code runs on the
pretended GPU of tests/fake_cuda, whose tensors have sizes and no values; see
trl_programs/dpo_traced.py for what stands in there. Kernels' scratch and gaps between tensors are
in neither. Beside it the same with the shards on the GPU, where there is no goal. Ours reduces
gradients in float32, and accelerate in bfloat16, where --trl_reduces_in_float32 does not have it do
as ours.

TRL has an environment of its own, made on the first run. The exit code is 1 where offload takes
more than TRL's.
"""

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from harness import BENCHMARKS
from harness.memory import ALLOCATOR
from harness.processes import read_metrics, read_numbers, run, torchrun
from harness.program import end, parser_of
from harness.training import our_flags, run_trl
from harness.trl_environment import DEFAULT_VENV, trl_python

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.families import FAMILIES
from open_instruct.planning.subject.read_shape import public_models
from scripts.demo_data.pairs import write_synthetic_preferences

GIB = 2**30
MOST_OF_TRL = 1.0
WORLD, PROMPT = 8, 8
PLACES = {"in host memory": ["--offload"], "on the GPU": []}
MICROBATCHES = {"a microbatch": 1, "two microbatches": 2}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--parts", nargs="+", default=["host", "device"], choices=["host", "device"]
    )
    parser.add_argument(
        "--size",
        default="small",
        choices=["mini", "small", "base"],
        help="4M, 50M or 500M parameters",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="pairs a microbatch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--num_steps", type=int, default=2)
    parser.add_argument(
        "--model", default="allenai/OLMo-2-1124-7B", help="of the device's part, without windows"
    )
    parser.add_argument("--layers", type=int, default=8, help="that it is cut to")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each document there")
    parser.add_argument(
        "--trl_reduces_in_float32", action="store_true", help="gradients, as ours does; there"
    )
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    args = parser.parse_args()
    python = trl_python(args.trl_venv)
    end(
        [
            missed
            for part in args.parts
            for missed in {"host": host, "device": device}[part](args, python)
        ]
    )


def host(args: Namespace, python: Path) -> list[str]:
    """Print what ranks held; returns which goals were missed."""
    args.sharded, args.num_warmup_steps = True, 0
    os.environ |= ALLOCATOR
    with tempfile.TemporaryDirectory(prefix="offload_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size)
        rows = folder / "rows.jsonl"
        num_rows = args.num_steps * args.ranks * args.batch * args.accumulation
        write_synthetic_preferences(rows, num_rows=num_rows, seed=0)
        out = folder / "ours"
        out.mkdir()
        words = [out, *our_flags(args, model, rows, out / "run"), "--packing", "--offload"]
        torchrun(sys.executable, args.ranks, BENCHMARKS / "offload_runs" / "ranks.py", words)
        our_losses = [row["loss"] for row in read_metrics(out / "run")]
        their_losses = run_trl(args, python, model, rows, folder / "trl", more=["--offload"]).losses
        ours, theirs = (peaks_of(each, args.ranks) for each in (out, folder / "trl"))
    for name, losses in {"ours": our_losses, "TRL": their_losses}.items():
        print(f"{name}: loss", *(f"{loss:.4f}" for loss in losses))
    print(f"\n{'host, GiB of the largest rank':34}{'ours':>8}{'TRL':>8}{'of TRL':>8}")
    named = {"steps": "its steps", "all": "all of the run"}
    return [
        missed
        for key, name in named.items()
        for missed in row_of(name, ours[key], theirs[key], is_goal=True)
    ]


def peaks_of(folder: Path, num_ranks: int) -> dict[str, int]:
    """Of the rank that held the most: in its steps, and in all of its run."""
    peaks = [rank["peak_bytes"] for rank in read_numbers(folder, num_ranks)]
    return {
        "steps": max(each["steps"] for each in peaks),
        "all": max(max(each.values()) for each in peaks),
    }


def device(args: Namespace, python: Path) -> list[str]:
    """Print what a step holds of a GPU; returns which goals were missed."""
    print(
        f"\n{f'device, GiB, {args.layers} layers':34}{'ours':>8}{'TRL':>8}{'of TRL':>8}", flush=True
    )
    missed = []
    for place, flags in PLACES.items():
        for name, num_microbatches in MICROBATCHES.items():
            ours = ours_on_device(
                args, [*flags, "--activation_checkpointing", "full"], num_microbatches
            )
            theirs = theirs_on_device(args, python, num_microbatches, offload=bool(flags))
            missed += row_of(f"{place}, {name}", ours, theirs, is_goal=bool(flags))
    return missed


def ours_on_device(args: Namespace, flags: Sequence[str], num_microbatches: int) -> int:
    case = {
        "flags": " ".join(flags),
        "family": args.model,
        "num_layers": args.layers,
        "world": WORLD,
    }
    case |= {"longest": args.length, "prompt": PROMPT, "microbatches": num_microbatches}
    program = BENCHMARKS / "offload_runs" / "traced.py"
    return largest_phase(run([sys.executable, program, json.dumps(case)]))


def theirs_on_device(args: Namespace, python: Path, num_microbatches: int, *, offload: bool) -> int:
    fields = public_models()[args.model] | {"num_hidden_layers": args.layers}
    case = {
        "config_class": FAMILIES[fields["model_type"]].config_class,
        "fields": {
            name: value for name, value in fields.items() if name not in ("model_type", "dtype")
        },
        "offload": offload,
        "world": WORLD,
        "length": args.length,
        "prompt": PROMPT,
        "microbatches": num_microbatches,
        "reduces_in_float32": args.trl_reduces_in_float32,
    }
    return largest_phase(
        run([python, BENCHMARKS / "trl_programs" / "dpo_traced.py", json.dumps(case)])
    )


def largest_phase(printed: str) -> int:
    """Of the JSON object in the last line, bytes by phase."""
    phases: dict[str, int] = json.loads(printed.splitlines()[-1])
    return max(phases.values())


def row_of(name: str, ours: int, theirs: int, *, is_goal: bool) -> list[str]:
    """Print it; returns what is missed by it."""
    ratio = ours / theirs
    print(f"{name:34}{ours / GIB:>8.2f}{theirs / GIB:>8.2f}{ratio:>8.2f}", flush=True)
    return [f"{name}: {ratio:.3f} of TRL's"] if is_goal and ratio > MOST_OF_TRL else []


if __name__ == "__main__":
    main()

"""FSDP2, ZeRO 1, 2 and 3, and TRL on ZeRO-2 at the same DPO: model, rows, precision, global batch
and ranks.

As in dpo_vs_trl.py: gloo ranks under torchrun, float32, reference log-probs computed beforehand and
not timed; only real tokens count, and steps of warm-up do not. All take turns, so that a busy
machine slows each. Ours pack rows and share prompts, as they do by default; TRL pads. The peak is
of a whole process, DeepSpeed's bucket of 2 GB among it as far as it is used; loading is until the
policy can step, of TRL until its first step, less the reference's pass.

    python benchmarks/backends.py [--rows FILE] [--num_steps 10] [--num_rounds 2] [--size mini]
    [--ranks 2]

TRL has an environment of its own and DeepSpeed beside it, both made on the first run.
"""

import os
import statistics
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.against_trl import arguments, write_pairs
from harness.processes import read_numbers
from harness.program import print_ratio
from harness.rounds import in_turns
from harness.training import our_speed, run_timed_dpo, run_trl
from harness.trl_environment import beside, our_version, trl_python

from open_instruct.commands.tiny_model import write_tiny_model

DEEPSPEED = (
    our_version("deepspeed"),
    "hjson",
    "ninja",
    "py-cpuinfo",
    "msgpack",
    "einops",
    "psutil",
)
OURS = {
    "FSDP2": [],
    **{
        f"ZeRO-{stage}": ["--backend", "deepspeed", "--deepspeed_stage", str(stage)]
        for stage in (1, 2, 3)
    },
}
THEIRS, AGAINST = "TRL, ZeRO-2", "ZeRO-2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one of them: medians over the timed steps, and what came before and after."""

    tokens_per_second: float
    peak_gib: float
    load_s: float
    export_s: float | None
    losses: list[float]


def main() -> None:
    args = arguments(__doc__, "preference pairs", always_sharded=True)
    python = trl_python(args.trl_venv)
    path = beside(python, "trl_deepspeed", [*DEEPSPEED])
    with tempfile.TemporaryDirectory(prefix="backends_") as name:
        folder = Path(name)
        model = write_tiny_model(
            folder / "model", family="olmo2", size=args.size, vocab_size=args.vocab_size
        )
        rows = args.rows or write_pairs(folder / "rows.jsonl")

        def ours(backend: str, number: int) -> Run:
            return run_one(args, model, rows, folder / f"{backend}_{number}", OURS[backend])

        def theirs(number: int) -> Run:
            os.environ["PYTHONPATH"] = str(path)
            run = run_theirs(args, python, model, rows, folder / f"trl_{number}")
            del os.environ["PYTHONPATH"]
            return run

        ways = {**{backend: partial(ours, backend) for backend in OURS}, THEIRS: theirs}
        report(in_turns(ways, num_rounds=args.num_rounds, say=say))


def run_one(args: Namespace, model: Path, rows: Path, out: Path, flags: list[str]) -> Run:
    metrics, seconds = run_timed_dpo(args, model, rows, out, flags)
    speed = our_speed(args, metrics)
    return Run(
        tokens_per_second=speed.tokens_per_second,
        peak_gib=max(row["peak_memory_gib"] for row in metrics),
        load_s=seconds["build_backend"],
        export_s=seconds["export_hf"],
        losses=speed.losses,
    )


def run_theirs(args: Namespace, python: Path, model: Path, rows: Path, out: Path) -> Run:
    speed = run_trl(args, python, model, rows, out, more=["--zero_stage", 2])
    ranks = read_numbers(out, args.ranks)
    return Run(
        tokens_per_second=speed.tokens_per_second,
        peak_gib=max(rank["peak_gib"] for rank in ranks),
        load_s=max(rank["load_s"] for rank in ranks),
        export_s=None,
        losses=speed.losses,
    )


def say(_: int, name: str, run: Run) -> None:
    print(f"{name:12} {run.tokens_per_second:9,.0f} tokens/s", flush=True)


def report(runs: dict[str, list[Run]]) -> None:
    """The medians of all rounds, ratios, and losses as a check that all train the same thing."""

    def median(name: str, field: str) -> float:
        values = [value for run in runs[name] if (value := getattr(run, field)) is not None]
        return statistics.median(values) if values else float("nan")

    theirs = median(THEIRS, "tokens_per_second")
    print(
        f"\n{'':12}{'tokens/s':>10}{'x TRL':>8}{'x FSDP2':>9}{'peak GiB':>10}{'load s':>8}{'export s':>10} "
        ""
        " loss"
    )
    for name, of_name in runs.items():
        speed, losses = median(name, "tokens_per_second"), of_name[0].losses
        print(
            f"{name:12}{speed:>10,.0f}{speed / theirs:>8.2f}{speed / median('FSDP2', 'tokens_per_second'):>9.2f}{median(name, 'peak_gib'):>10.2f}{median(name, 'load_s'):>8.1f}{median(name, 'export_s'):>10.1f} "
            ""
            f" {losses[0]:.4f} -> {statistics.mean(losses[-3:]):.4f}"
        )
    print_ratio("ours to TRL on ZeRO-2", median(AGAINST, "tokens_per_second") / theirs)


if __name__ == "__main__":
    main()

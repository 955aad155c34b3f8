"""Adapters of rank 16: memory and speed of DPO, and what a weight sync takes with the adapter
merged and alone.

    python benchmarks/lora.py                         # 500M parameters
    python benchmarks/lora.py --size small --parts train
    python benchmarks/lora.py --parts sync
    python benchmarks/lora.py --parts qlora --size small

train: the same model, rows, float32 and batch on one rank with one thread: ours with adapters,
TRL's DPOTrainer with peft's, and ours with the whole model trained. Reference log-probs are
computed before and not timed. Only real tokens count, a second of processor time, which other work
slows less than a clock's; the first step does not. The peak is of a whole process, from its start.
TRL has an environment of its own and peft beside it, both made on the first run.

qlora: the same beside a base in 4 bits, TRL's by bitsandbytes with nested scales; and ours beside
the base itself.

sync: two FSDP ranks to one receiver that only takes the bytes, as in weight_sync.py, in bfloat16;
medians. "plain" is the same model without adapters.

The exit code is 1 where our adapters take more than 0.8 of TRL's peak, are less than 1.5 times as
fast (beside 4 bits there is no goal of speed), or alone are more than 2% of the model's bytes.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.processes import read_numbers
from harness.program import end, parser_of
from harness.training import run_timed_dpo, run_trl
from harness.trl_environment import DEFAULT_VENV, beside, our_version, trl_python
from sync_runs.measure import Sync, measure

from open_instruct.commands.tiny_model import write_tiny_model
from scripts.demo_data.pairs import write_synthetic_preferences

RANK = 16
LORA = ("--use_lora", "--lora_r", str(RANK))
ADAPTERS, TRL, WHOLE = "adapters", "TRL, peft", "whole model"
IN_4_BITS = "in 4 bits"
BITSANDBYTES = "bitsandbytes==0.50.2"
MOST_OF_PEAK, LEAST_SPEED, MOST_BYTES = 0.8, 1.5, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: real tokens a second of processor time, over all steps but the first; the process's
    peak; its losses.
    """

    tokens_per_second: float
    peak_gib: float
    losses: list[float]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--parts", nargs="+", default=["train", "sync"], choices=["train", "qlora", "sync"]
    )
    parser.add_argument(
        "--size",
        default="base",
        choices=["mini", "small", "base"],
        help="4M, 50M or 500M parameters",
    )
    parser.add_argument("--batch", type=int, default=4, help="pairs a microbatch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--num_steps", type=int, default=4)
    parser.add_argument("--num_syncs", type=int, default=7)
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    args = parser.parse_args()
    end(
        [
            problem
            for part in args.parts
            for problem in {"train": train, "qlora": qlora, "sync": sync}[part](args)
        ]
    )


def train(args: Namespace) -> list[str]:
    """Print what the runs took; returns which goals were missed."""
    path = beside(trl_python(args.trl_venv), "trl_peft", [our_version("peft")])
    ours = {ADAPTERS: LORA, WHOLE: ()}
    return compare(args, ours, path=path, least_speed=LEAST_SPEED)


def qlora(args: Namespace) -> list[str]:
    """The same beside a base in 4 bits."""
    path = beside(
        trl_python(args.trl_venv), "trl_bitsandbytes", [our_version("peft"), BITSANDBYTES]
    )
    ours = {IN_4_BITS: (*LORA, "--use_qlora"), ADAPTERS: LORA}
    return compare(args, ours, path=path, least_speed=0.0, more=["--load_in_4bit"])


def compare(
    args: Namespace,
    flags_of_ours: Mapping[str, Sequence[str]],
    *,
    path: Path,
    least_speed: float,
    more: Sequence[str] = (),
) -> list[str]:
    """Runs of ours, the first of which has goals, with TRL's, which finds peft in `path` and has
    `more` flags.
    """
    args.ranks, args.sharded, args.num_warmup_steps = 1, True, 0
    python = trl_python(args.trl_venv)
    first, other = flags_of_ours
    with tempfile.TemporaryDirectory(prefix="lora_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size)
        rows = folder / "rows.jsonl"
        write_synthetic_preferences(
            rows, num_rows=args.num_steps * args.batch * args.accumulation, seed=0
        )
        runs = {
            first: say(first, run_ours(args, model, rows, folder / "first", flags_of_ours[first]))
        }
        os.environ["PYTHONPATH"] = str(path)
        runs[TRL] = say(TRL, run_theirs(args, python, model, rows, folder / "trl", more))
        del os.environ["PYTHONPATH"]
        runs[other] = say(
            other, run_ours(args, model, rows, folder / "other", flags_of_ours[other])
        )
    theirs, ours = runs[TRL], runs[first]
    print(f"\n{'':14}{'peak GiB':>10}{'of TRL':>8}{'tokens/s':>10}{'x TRL':>8}")
    for name, run in runs.items():
        print(
            f"{name:14}{run.peak_gib:>10.2f}{run.peak_gib / theirs.peak_gib:>8.2f}"
            f"{run.tokens_per_second:>10,.0f}{run.tokens_per_second / theirs.tokens_per_second:>8.2f}"
        )
    of_peak, speed = (
        ours.peak_gib / theirs.peak_gib,
        ours.tokens_per_second / theirs.tokens_per_second,
    )
    missed = []
    if of_peak > MOST_OF_PEAK:
        missed.append(f"the peak is {of_peak:.2f} of TRL's, more than {MOST_OF_PEAK}")
    if speed < least_speed:
        missed.append(f"the speed is {speed:.2f} times TRL's, less than {least_speed}")
    return missed


def run_ours(args: Namespace, model: Path, rows: Path, out: Path, flags: Sequence[str]) -> Run:
    metrics, times = run_timed_dpo(args, model, rows, out, flags)
    stamps_s = times["processor_stamps"]
    # Counted from the start of the run.
    num_tokens = metrics[-1]["num_tokens"] - metrics[0]["num_tokens"]
    return Run(
        tokens_per_second=num_tokens / (stamps_s[-1] - stamps_s[0]),
        peak_gib=max(row["peak_memory_gib"] for row in metrics),
        losses=[row["loss"] for row in metrics],
    )


def run_theirs(
    args: Namespace, python: Path, model: Path, rows: Path, out: Path, more: Sequence[str]
) -> Run:
    losses = run_trl(args, python, model, rows, out, more=["--lora_r", RANK, *more]).losses
    (told,) = read_numbers(out, args.ranks)
    stamps_s = told["processor_stamps"]
    return Run(
        tokens_per_second=sum(told["num_tokens"][1:]) / (stamps_s[-1] - stamps_s[0]),
        peak_gib=told["peak_gib"],
        losses=losses,
    )


def say(name: str, run: Run) -> Run:
    losses = " ".join(f"{loss:.4f}" for loss in run.losses)
    print(
        (
            f"{name:14}{run.peak_gib:>8.2f} GiB{run.tokens_per_second:>8,.0f} tokens/s   loss "
            f"{losses}"
        ),
        flush=True,
    )
    return run


def sync(args: Namespace) -> list[str]:
    """Print what a sync takes; returns which goals were missed."""
    print(f"\n{'':6}{'':10}{'MB':>8}{'of plain':>10}{'seconds':>9}")
    missed = []
    for way in ("shm", "gloo"):
        plain = 0.0
        for lora_sync in ("plain", "merged", "adapter"):
            settings = Sync(
                backend=way,
                size=args.size,
                dtype="bfloat16",
                num_syncs=args.num_syncs,
                lora_sync=lora_sync,
            )
            result = measure(settings)
            megabytes = result["num_bytes"] / 1e6
            plain = plain or megabytes
            share = megabytes / plain
            print(
                f"{way:6}{lora_sync:10}{megabytes:>8.1f}{share:>10.1%}{result['ours_s']:>9.3f}",
                flush=True,
            )
            if lora_sync == "adapter" and share > MOST_BYTES:
                missed.append(
                    f"{way}: the adapter is {share:.1%} of the bytes, more than {MOST_BYTES:.0%}"
                )
    return missed


if __name__ == "__main__":
    main()

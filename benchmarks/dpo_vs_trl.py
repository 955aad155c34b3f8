"""Real tokens a second of DPO against TRL's DPOTrainer: same model, rows, precision and global batch.

Both run under torchrun on the same number of gloo ranks, float32, with reference log-probs computed
beforehand and not timed. Only real tokens count; steps of warm-up do not. The two take turns, so that a
busy machine slows both. TRL lives in an environment of its own, made on the first run.

    python benchmarks/dpo_vs_trl.py [--rows FILE] [--num_steps 10] [--num_rounds 2] [--sharded]

Both have a whole copy of the model on each rank, which TRL always has; with --sharded ours has half of it there, as it
has by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trl_environment import DEFAULT_VENV, torchrun, trl_python

from open_instruct.toys.synthetic import write_synthetic_preferences
from open_instruct.toys.tiny import write_tiny_model

REPOSITORY = Path(__file__).resolve().parents[1]
LEARNING_RATE, BETA = 1e-4, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians over the timed steps of one run, and the loss of each step."""

    tokens_per_second: float
    losses: list[float]


def arguments(description: str | None, rows: str, *, batch: int = 4) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help=f"{rows} (.jsonl); default: 512 made-up ones")
    parser.add_argument("--size", default="mini", help="of the tiny model (see open-instruct tiny-model --help)")
    parser.add_argument("--vocab_size", type=int, help="of its tokenizer; default: the size's own")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sharded", action="store_true", help="ours: shards, not a whole copy on each rank")
    parser.add_argument("--batch", type=int, default=batch, help="rows (or pairs) a microbatch")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--num_steps", type=int, default=10)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--num_rounds", type=int, default=2)
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__, "preference pairs")
    python = trl_python(args.trl_venv)
    with tempfile.TemporaryDirectory(prefix="dpo_vs_trl_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size, vocab_size=args.vocab_size)
        rows = args.rows
        if rows is None:
            rows = folder / "rows.jsonl"
            write_synthetic_preferences(rows, num_rows=512, seed=0)
        runs: dict[str, list[Speed]] = {"shared": [], "packed": [], "padded": [], "TRL": []}
        for number in range(args.num_rounds):
            runs["shared"].append(run_ours(args, model, rows, folder / f"shared{number}", ["--packing"]))
            runs["TRL"].append(run_trl(args, python, model, rows, folder / f"trl{number}"))
            unshared = ["--packing", "--prefix_sharing", "off"]
            runs["packed"].append(run_ours(args, model, rows, folder / f"packed{number}", unshared))
            runs["padded"].append(run_ours(args, model, rows, folder / f"padded{number}", ["--no_packing"]))
            for name, speeds in runs.items():
                print(f"round {number + 1}: {name:6}  {speeds[-1].tokens_per_second:8,.0f} tokens/s", flush=True)
    report(runs)


def report(runs: dict[str, list[Speed]], *, ours: str = "shared") -> None:
    """Speeds and ratios, and the first and last loss of each as a check that all train the same thing."""
    speed = {name: statistics.median(each.tokens_per_second for each in speeds) for name, speeds in runs.items()}
    print()
    for name, speeds in runs.items():
        losses = speeds[0].losses
        print(
            f"{name:6}  {speed[name]:8,.0f} tokens/s   {speed[name] / speed['TRL']:5.2f}x TRL   "
            f"loss {losses[0]:.4f} -> {statistics.mean(losses[-3:]):.4f} (mean of the last three)"
        )
    print(f"ratio, {ours} to TRL: {speed[ours] / speed['TRL']:.2f}x")


def run_ours(
    args: argparse.Namespace, model: Path, rows: Path, out: Path, layout: list[str], *, name: str = "dpo"
) -> Speed:
    """One run of dpo.py, or of another objective; the speed of each step is what it writes itself."""
    flags = [*ours_of(args, model, rows, out, name), *layout]
    torchrun(sys.executable, args.ranks, REPOSITORY / "open_instruct" / f"{name}.py", flags)
    rows_out = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = rows_out[args.num_warmup_steps :]
    return Speed(
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in timed),
        losses=[row["loss"] for row in rows_out],
    )


def ours_of(args: argparse.Namespace, model: Path, rows: Path, out: Path, name: str) -> list[object]:
    """The flags of a run of ours."""
    return [
        *("--model_name_or_path", model, "--mixer_list", rows, "1.0", "--output_dir", out),
        *("--cache_dir", out.parent / "cache", "--max_seq_length", args.max_length, "--param_dtype", "float32"),
        *("--loss_type", name, "--beta", BETA, "--learning_rate", LEARNING_RATE),
        *("--lr_scheduler_type", "constant", "--warmup_ratio", "0"),
        *("--per_device_train_batch_size", args.batch, "--gradient_accumulation_steps", args.accumulation),
        *([] if args.sharded else ["--fsdp_num_replicas", args.ranks, "--fsdp_shard_degree", 1]),
        *("--max_train_steps", args.num_steps),
    ]


def run_trl(
    args: argparse.Namespace,
    python: Path,
    model: Path,
    rows: Path,
    out: Path,
    *,
    program: str = "trl_dpo.py",
    more: Sequence[object] = (),
) -> Speed:
    """One run of TRL; tokens of a step are those of all ranks, its time that of the slowest."""
    out.mkdir()
    flags = [
        *("--model", model, "--rows", rows, "--out", out, "--beta", BETA, "--learning_rate", LEARNING_RATE),
        *("--batch", args.batch, "--accumulation", args.accumulation, "--steps", args.num_steps),
        *("--max_length", args.max_length, *more),
    ]
    torchrun(python, args.ranks, REPOSITORY / "benchmarks" / program, flags)
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(args.ranks)]
    speeds = [
        sum(rank["num_tokens"][step] for rank in ranks) / max(rank["seconds"][step] for rank in ranks)
        for step in range(args.num_warmup_steps, args.num_steps)
    ]
    return Speed(tokens_per_second=statistics.median(speeds), losses=ranks[0]["losses"])


if __name__ == "__main__":
    main()

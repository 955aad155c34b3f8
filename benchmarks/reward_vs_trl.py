"""Real tokens a second of reward models against TRL's RewardTrainer: same model, rows, precision and global batch.

Both run under torchrun on the same number of gloo ranks, float32. Only real tokens count; steps of warm-up do not. The
two take turns, so that a busy machine slows both. TRL lives in an environment of its own, made on the first run.

    python benchmarks/reward_vs_trl.py [--rows FILE] [--num_steps 10] [--num_rounds 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from dpo_vs_trl import Speed, report
from trl_environment import DEFAULT_VENV, torchrun, trl_python

from open_instruct.toys.synthetic import write_synthetic_preferences
from open_instruct.toys.tiny import write_tiny_model

REPOSITORY = Path(__file__).resolve().parents[1]
LEARNING_RATE, CENTER = 1e-4, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="preference pairs (.jsonl); default: 512 made-up ones")
    parser.add_argument("--size", default="mini", help="of the tiny model (see open-instruct tiny-model --help)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="pairs a microbatch")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--num_steps", type=int, default=10)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--num_rounds", type=int, default=2)
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    args = parser.parse_args()

    python = trl_python(args.trl_venv)
    with tempfile.TemporaryDirectory(prefix="reward_vs_trl_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size)
        rows = args.rows
        if rows is None:
            rows = folder / "rows.jsonl"
            write_synthetic_preferences(rows, num_rows=512, seed=0)
        runs: dict[str, list[Speed]] = {"shared": [], "packed": [], "TRL": []}
        for number in range(args.num_rounds):
            runs["shared"].append(run_ours(args, model, rows, folder / f"shared{number}", "auto"))
            runs["TRL"].append(run_trl(args, python, model, rows, folder / f"trl{number}"))
            runs["packed"].append(run_ours(args, model, rows, folder / f"packed{number}", "off"))
            for name, speeds in runs.items():
                print(f"round {number + 1}: {name:6}  {speeds[-1].tokens_per_second:8,.0f} tokens/s", flush=True)
    report(runs)


def run_ours(args: argparse.Namespace, model: Path, rows: Path, out: Path, prefix_sharing: str) -> Speed:
    """One run of reward_model.py; the speed of each step is what it writes itself."""
    flags = [
        *("--model_name_or_path", model, "--mixer_list", rows, "1.0", "--output_dir", out),
        *("--cache_dir", out.parent / "cache", "--max_seq_length", args.max_length, "--param_dtype", "float32"),
        *("--center_rewards_coefficient", CENTER, "--learning_rate", LEARNING_RATE),
        *("--lr_scheduler_type", "constant", "--warmup_ratio", "0", "--prefix_sharing", prefix_sharing),
        *("--per_device_train_batch_size", args.batch, "--gradient_accumulation_steps", args.accumulation),
        *("--max_train_steps", args.num_steps),
    ]
    torchrun(sys.executable, args.ranks, REPOSITORY / "open_instruct" / "reward_model.py", flags)
    rows_out = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["tokens_per_second"] for row in rows_out[args.num_warmup_steps :]]
    return Speed(tokens_per_second=statistics.median(speeds), losses=[row["loss"] for row in rows_out])


def run_trl(args: argparse.Namespace, python: Path, model: Path, rows: Path, out: Path) -> Speed:
    """One run of TRL; tokens of a step are those of all ranks, its time that of the slowest."""
    out.mkdir()
    flags = [
        *("--model", model, "--rows", rows, "--out", out, "--center", CENTER, "--learning_rate", LEARNING_RATE),
        *("--batch", args.batch, "--accumulation", args.accumulation, "--steps", args.num_steps),
        *("--max_length", args.max_length),
    ]
    torchrun(python, args.ranks, REPOSITORY / "benchmarks" / "trl_reward.py", flags)
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(args.ranks)]
    speeds = [
        sum(rank["num_tokens"][step] for rank in ranks) / max(rank["seconds"][step] for rank in ranks)
        for step in range(args.num_warmup_steps, args.num_steps)
    ]
    return Speed(tokens_per_second=statistics.median(speeds), losses=ranks[0]["losses"])


if __name__ == "__main__":
    main()

"""Runs of ours and of TRL with the same sizes, and what they took."""

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BENCHMARKS, REPOSITORY
from harness.processes import read_metrics, read_numbers, torchrun

LEARNING_RATE, BETA = 1e-4, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`ours` is a program of open_instruct/, `theirs` one of trl_programs/; each has flags that
    only it knows.
    """

    ours: str
    theirs: str
    our_flags: tuple[object, ...]
    their_flags: tuple[object, ...]


DPO = Objective(
    ours="dpo",
    theirs="dpo",
    our_flags=("--loss_type", "dpo", "--beta", BETA),
    their_flags=("--beta", BETA),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The median over the timed steps of one run, and the loss of each step."""

    tokens_per_second: float
    losses: list[float]


def our_flags(
    args: Namespace, model: Path, rows: Path, out: Path, *, objective: Objective = DPO
) -> list[object]:
    """Those of a run of ours, but for its layout."""
    return [
        *("--model_name_or_path", model, "--mixer_list", rows, "1.0", "--output_dir", out),
        *(
            "--cache_dir",
            out.parent / "cache",
            "--max_seq_length",
            args.max_length,
            "--param_dtype",
            "float32",
        ),
        *(*objective.our_flags, "--learning_rate", LEARNING_RATE),
        *("--lr_scheduler_type", "constant", "--warmup_ratio", "0"),
        *(
            "--per_device_train_batch_size",
            args.batch,
            "--gradient_accumulation_steps",
            args.accumulation,
        ),
        *([] if args.sharded else ["--fsdp_num_replicas", args.ranks, "--fsdp_shard_degree", 1]),
        *("--max_train_steps", args.num_steps),
    ]


def run_ours(
    args: Namespace,
    model: Path,
    rows: Path,
    out: Path,
    layout: Sequence[object],
    *,
    objective: Objective = DPO,
) -> Speed:
    """One run of ours; the speed of each step is what it writes itself."""
    flags = [*our_flags(args, model, rows, out, objective=objective), *layout]
    torchrun(
        sys.executable, args.ranks, REPOSITORY / "open_instruct" / f"{objective.ours}.py", flags
    )
    return our_speed(args, read_metrics(out))


def our_speed(args: Namespace, metrics: Sequence[dict[str, Any]]) -> Speed:
    timed = metrics[args.num_warmup_steps :]
    return Speed(
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in timed),
        losses=[row["loss"] for row in metrics],
    )


def run_timed_dpo(
    args: Namespace, model: Path, rows: Path, out: Path, flags: Sequence[object]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One run of `timed_dpo.py`, packed: its rows of metrics.jsonl, and its times.json."""
    out.mkdir()
    words = [out, *our_flags(args, model, rows, out / "run"), "--packing", *flags]
    torchrun(sys.executable, args.ranks, BENCHMARKS / "timed_dpo.py", words)
    return read_metrics(out / "run"), json.loads((out / "times.json").read_text())


def run_trl(
    args: Namespace,
    python: Path,
    model: Path,
    rows: Path,
    out: Path,
    *,
    objective: Objective = DPO,
    more: Sequence[object] = (),
) -> Speed:
    """One run of TRL; tokens of a step are those of all ranks, its time that of the slowest."""
    out.mkdir()
    flags = [
        *(
            "--model",
            model,
            "--rows",
            rows,
            "--out",
            out,
            *objective.their_flags,
            "--learning_rate",
            LEARNING_RATE,
        ),
        *("--batch", args.batch, "--accumulation", args.accumulation, "--steps", args.num_steps),
        *("--max_length", args.max_length, *more),
    ]
    torchrun(python, args.ranks, BENCHMARKS / "trl_programs" / f"{objective.theirs}.py", flags)
    ranks = read_numbers(out, args.ranks)
    speeds = [
        sum(rank["num_tokens"][step] for rank in ranks)
        / max(rank["seconds"][step] for rank in ranks)
        for step in range(args.num_warmup_steps, args.num_steps)
    ]
    return Speed(tokens_per_second=statistics.median(speeds), losses=ranks[0]["losses"])

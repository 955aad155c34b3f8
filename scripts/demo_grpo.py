"""GRPO on a small scale: a tiny model learns sums from examples, then from its own answers, judged
right or wrong.

The examples show two habits: most blurt out a number near the sum, some work it out. Nothing tells
the model which is better; the reward, which looks at the last number of an answer alone, does. The
held-out sums appear in no other file. Every step is the command that a user would type, and is
shown before it runs. Start it with `make demo-grpo`.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from demo_data.sums import write_arithmetic
from demo_shell import (
    OUTPUT,
    REPOSITORY,
    begin_with_tiny_model,
    console,
    ended,
    panel_of,
    run,
    show_what_happened,
    step,
    torchrun,
)
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

# Where configs/sft/tiny_cpu.yaml and configs/grpo/tiny_cpu.yaml look for them.
MODEL, DATA = OUTPUT / "tiny", OUTPUT / "arithmetic"
SFT, GRPO = OUTPUT / "sft", OUTPUT / "grpo"
NUM_SFT_ROWS, NUM_PROMPTS, NUM_HELD_OUT = 8000, 2000, 200


def main() -> int:
    os.chdir(REPOSITORY)
    began_s = time.monotonic()

    begin_with_tiny_model(MODEL, size="tiny")

    step(2, "made-up sums: examples, prompts, and others held out")
    DATA.mkdir(parents=True, exist_ok=True)
    write_arithmetic(
        DATA, num_sft_rows=NUM_SFT_ROWS, num_prompts=NUM_PROMPTS, num_held_out=NUM_HELD_OUT, seed=0
    )
    console.print(
        f"{DATA}: {NUM_SFT_ROWS} examples, {NUM_PROMPTS} prompts, {NUM_HELD_OUT} held-out sums"
    )

    step(3, "a warm start on the examples")
    torchrun(
        2,
        "open_instruct/sft.py",
        *sft_flags(),
    )

    step(4, "GRPO: learners in two shards, and a vLLM engine")
    run("python", "open_instruct/grpo_olmo_core_actor.py", *grpo_flags())

    show_what_happened(GRPO, samples=samples, summary=summary, began_s=began_s)
    return 0


def sft_flags() -> list[str]:
    """The file's global batch, over two processes."""
    return f"""
        configs/sft/tiny_cpu.yaml --per_device_train_batch_size 32 --output_dir {SFT} --overwrite_output_dir
        --cache_dir {OUTPUT / "cache"}
    """.split()


def grpo_flags() -> list[str]:
    return f"""
        configs/grpo/tiny_cpu.yaml --output_dir {GRPO} --overwrite_output_dir --cache_dir {OUTPUT / "cache"}
    """.split()


def samples(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Table:
    """The same held-out prompts, answered by the model as it was and as it is."""
    table = Table(title="held-out sums", title_justify="left", expand=False)
    for column in ("asked", "before", "after", "right answer"):
        table.add_column(column)
    for first, last in zip(before, after, strict=True):
        question = first["prompt"].split("\n")[1]
        table.add_row(
            Text(question), judged(first), judged(last), Text(", ".join(first["ground_truth"]))
        )
    return table


def judged(sample: dict[str, Any]) -> Text:
    is_right = sample["reward"] > 0
    return Text(
        f"{sample['completion'].strip()} {'✓' if is_right else '✗'}",
        style="green" if is_right else "red",
    )


def summary(
    *,
    metrics: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    elapsed_s: float,
    width: int,
) -> Panel:
    """What a person wants to know of the run, to fit a terminal `width` characters wide."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "held-out reward",
        "[bold]"
        + " -> ".join(f"{row['eval/reward']:.1%}" for row in (evaluations[0], evaluations[-1]))
        + "[/]"
        f" of sums that no file but theirs has, in {len(metrics)} steps",
    )
    facts.add_row(
        "length",
        (
            f"{metrics[0]['sequence_length/mean']:.1f} -> "
            f"{metrics[-1]['sequence_length/mean']:.1f} tokens"
        ),
    )
    facts.add_row(
        "seconds a step",
        ", ".join(
            f"{sum(row[f'time/{name}'] for row in metrics) / len(metrics):.2f} {words}"
            for name, words in (
                ("generate", "waiting for rollouts"),
                ("train", "training"),
                ("sync", "sending weights"),
            )
        ),
    )
    facts.add_row(
        "agreement",
        "in the first step, log-probs of learners and engine differ by "
        f"{metrics[0]['logprob_diff/max']:.1e} at most",
    )
    facts.add_row("the model", f"{GRPO / 'hf_model'}")
    facts.add_row("every step", f"{GRPO / 'metrics.jsonl'}")
    facts.add_row("time", f"{elapsed_s / 60:.1f} minutes")
    return panel_of([row["reward"] for row in metrics], facts, width=width)


if __name__ == "__main__":
    sys.exit(ended(main))

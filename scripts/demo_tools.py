"""GRPO with a tool, on a small scale: a tiny model learns to ask a calculator for products that it
cannot work out.

The examples show two habits: most say a round number near the product, some call the tool and
repeat what it says. Nothing tells the model which is better; the reward, which looks at the last
number of the last reply alone, does. The held-out products appear in no other file. Every step is
the command that a user would type, and is shown before it runs. Start it with `make demo-tools`.
"""

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from demo_data.sums import write_rows
from demo_grpo import judged
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

FOLDER = OUTPUT / "tools"
MODEL, SFT, GRPO = FOLDER / "tiny", FOLDER / "sft", FOLDER / "grpo"
TEMPLATE = FOLDER / "template.jinja"
NUM_SFT_ROWS, NUM_PROMPTS, NUM_HELD_OUT = 8000, 1000, 200
NUM_SFT_STEPS = 600
CALLING_SHARE = 0.4
# As short as can be: of a tool it writes the name alone.
TEMPLATE_TEXT = """\
{{- bos_token -}}
{%- for tool in tools or [] -%}{{- tool.function.name + '\\n' -}}{%- endfor -%}
{%- for message in messages -%}
    {{- '<|' + message.role + '|>\\n' + message.content -}}
    {{- eos_token if message.role == 'assistant' else '' -}}
    {{- '\\n' if message.role != 'assistant' or not loop.last or add_generation_prompt else '' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
TOOL = {
    "type": "function",
    "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}},
}


def main() -> int:
    os.chdir(REPOSITORY)
    began_s = time.monotonic()

    start_warm()

    step(4, "GRPO with the tool: learners in two shards, and a vLLM engine")
    run("python", "open_instruct/grpo_olmo_core_actor.py", *grpo_flags())

    show_what_happened(GRPO, samples=samples, summary=summary, began_s=began_s)
    return 0


def start_warm(num_steps: int = NUM_SFT_STEPS) -> None:
    """Show the steps before GRPO: a tiny model, its rows, and what it learns from examples."""
    begin_with_tiny_model(MODEL, size="tiny")

    step(2, "made-up products: examples, prompts, and others held out")
    write_products(FOLDER, seed=0)
    console.print(
        f"{FOLDER}: {NUM_SFT_ROWS} examples, {NUM_PROMPTS} prompts, {NUM_HELD_OUT} held-out "
        "products"
    )

    step(3, "a warm start on the examples, of which few call the tool")
    torchrun(2, "open_instruct/sft.py", *sft_flags(num_steps))


def write_products(folder: Path, *, seed: int) -> None:
    """Writes rows, prompts, held-out prompts and the chat template; the same seed writes the same
    bytes.
    """
    rng = random.Random(seed)
    pairs = rng.sample([(a, b) for a in range(11, 100) for b in range(11, 100)], 89 * 89)
    held_out, known = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    write_rows(
        folder / "sft.jsonl", (example(rng, *rng.choice(known)) for _ in range(NUM_SFT_ROWS))
    )
    write_rows(folder / "prompts.jsonl", (prompt(*pair) for pair in known[:NUM_PROMPTS]))
    write_rows(folder / "held_out.jsonl", (prompt(*pair) for pair in held_out))
    TEMPLATE.write_text(TEMPLATE_TEXT, encoding="utf-8")


def example(rng: random.Random, a: int, b: int) -> dict[str, Any]:
    if rng.random() >= CALLING_SHARE:
        guess = str(round(a * b, -3))
        return {
            "messages": [question(a, b), {"role": "assistant", "content": guess}],
            "tools": [TOOL],
        }
    call = {"role": "assistant", "content": f'[calculate(expression=" {a} * {b}")]'}
    said = {"role": "tool", "content": str(a * b)}
    answer = {"role": "assistant", "content": str(a * b)}
    return {"messages": [question(a, b), call, said, answer], "tools": [TOOL]}


def prompt(a: int, b: int) -> dict[str, Any]:
    return {"messages": [question(a, b)], "ground_truth": str(a * b), "dataset": "gsm8k"}


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} * {b}?"}


def sft_flags(num_steps: int = NUM_SFT_STEPS) -> list[str]:
    return f"""
        configs/sft/tiny_cpu.yaml --model_name_or_path {MODEL} --mixer_list {FOLDER}/sft.jsonl 1.0
        --chat_template_name {TEMPLATE} --max_seq_length 96 --max_train_steps {num_steps} --per_device_train_batch_size 32
        --output_dir {SFT} --overwrite_output_dir --cache_dir {OUTPUT}/cache
    """.split()


def grpo_flags() -> list[str]:
    return f"""
        configs/grpo/tiny_cpu.yaml --model_name_or_path {SFT}/hf_model --dataset_mixer_list {FOLDER}/prompts.jsonl 1.0
        --dataset_mixer_eval_list {FOLDER}/held_out.jsonl 1.0 --environment calculator --tool_call_form pythonic
        --max_turns 2 --response_length 64 --total_episodes 1920
        --output_dir {GRPO} --overwrite_output_dir --cache_dir {OUTPUT}/cache
    """.split()


def samples(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Table:
    """The last replies to the same held-out prompts, of the model as it was and as it is."""
    table = Table(title="held-out products", title_justify="left", expand=False)
    for column in ("asked", "before", "after", "right answer"):
        table.add_column(column)
    for first, last in zip(before, after, strict=True):
        asked = next(line for line in first["prompt"].split("\n") if line.startswith("What"))
        table.add_row(
            Text(asked), judged(first), judged(last), Text(", ".join(first["ground_truth"]))
        )
    return table


def facts_of(
    metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], run_folder: Path
) -> Iterator[tuple[str, str]]:
    rewards = " -> ".join(f"{row['eval/reward']:.1%}" for row in (evaluations[0], evaluations[-1]))
    yield (
        "held-out reward",
        f"[bold]{rewards}[/] of products that no file but theirs has, in {len(metrics)} steps",
    )
    calls = " -> ".join(f"{row['episodes/turns'] - 1:.0%}" for row in (metrics[0], metrics[-1]))
    yield "calls of the tool", f"{calls} of the completions of a step"
    difference = f"{metrics[0]['logprob_diff/max']:.1e}"
    yield (
        "agreement",
        f"in the first step, log-probs of learners and engine differ by {difference} at most",
    )
    yield "the model", f"{run_folder / 'hf_model'}"
    log = run_folder / "metrics.jsonl"
    yield "every step", f"{log}; a page of it: open-instruct report {run_folder}"


def summary(
    *,
    metrics: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    elapsed_s: float,
    width: int,
    run_folder: Path = GRPO,
) -> Panel:
    """What a person wants to know of the run, to fit a terminal `width` characters wide."""
    facts = Table.grid(padding=(0, 2))
    for name, fact in facts_of(metrics, evaluations, run_folder):
        facts.add_row(name, fact)
    facts.add_row("time", f"{elapsed_s / 60:.1f} minutes")
    return panel_of([row["reward"] for row in metrics], facts, width=width)


if __name__ == "__main__":
    sys.exit(ended(main))

"""DPO on a small scale: a tiny model, made-up preferences, four sharded ranks, export, a reply.

Every step is the command that a user would type, and is shown before it runs. Start it with `make
demo-dpo`.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo_data.pairs import write_synthetic_preferences
from demo_shell import (
    CURVE_HEIGHT,
    OUTPUT,
    REPOSITORY,
    begin_with_tiny_model,
    console,
    ended,
    rows_of,
    step,
    torchrun,
)
from rich.columns import Columns
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from open_instruct.report.terminal_curve import draw_curve

MODEL, TRAIN_ROWS, HELD_OUT_ROWS, RUN = (
    OUTPUT / name for name in ("model", "train.jsonl", "held_out.jsonl", "run")
)

NUM_TRAIN_ROWS, NUM_HELD_OUT_ROWS = 512, 128
NUM_RANKS, NUM_STEPS = 4, 40


def main() -> int:
    os.chdir(REPOSITORY)
    began_s = time.monotonic()

    begin_with_tiny_model(MODEL, size="mini")

    step(2, "made-up preference pairs, and others held out")
    write_synthetic_preferences(
        TRAIN_ROWS,
        num_rows=NUM_TRAIN_ROWS,
        holdout_path=HELD_OUT_ROWS,
        num_holdout_rows=NUM_HELD_OUT_ROWS,
    )
    console.print(
        f"{TRAIN_ROWS}: {NUM_TRAIN_ROWS} pairs; {HELD_OUT_ROWS}: {NUM_HELD_OUT_ROWS} pairs"
    )

    step(3, "DPO on four processes: two copies, each in two shards (HSDP)")
    torchrun(
        NUM_RANKS,
        "open_instruct/dpo.py",
        *dpo_flags(),
    )

    step(4, "the exported model replies, in transformers")
    shortest = min(rows_of(HELD_OUT_ROWS), key=lambda row: len(json.dumps(row)))
    prompt = shortest["chosen"][:-1]
    reply = generate(RUN / "hf_model", prompt)
    console.print(f"user:      {prompt[-1]['content']}\nassistant: {reply}", markup=False)
    console.print(
        "(The model began as noise, and DPO teaches no language: what it learned is which of two "
        "replies to prefer.)",
        style="dim",
    )

    console.print()
    console.print(
        summary(
            metrics=rows_of(RUN / "metrics.jsonl"),
            evaluations=rows_of(RUN / "eval.jsonl"),
            layout=json.loads((RUN / "layout.json").read_text()),
            elapsed_s=time.monotonic() - began_s,
            width=console.width,
        )
    )
    return 0


def dpo_flags() -> list[str]:
    """What `dpo.py` is given: short rows, a learning rate for a model that knows nothing yet, four
    gloo ranks.
    """
    return f"""
        --model_name_or_path {MODEL} --mixer_list {TRAIN_ROWS} 1.0 --eval_mixer_list {HELD_OUT_ROWS} 1.0
        --output_dir {RUN} --overwrite_output_dir --cache_dir {OUTPUT / "cache"}
        --max_seq_length 512 --per_device_train_batch_size 4 --max_train_steps {NUM_STEPS}
        --fsdp_shard_degree 2 --param_dtype float32 --learning_rate 1e-3 --warmup_ratio 0.1
    """.split()


def generate(model_dir: Path, prompt: list[dict[str, str]]) -> str:
    """The likeliest reply to a conversation, at most 24 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    # The template writes the special tokens itself.
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    output_ids = model.generate(
        prompt_ids, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return str(
        tokenizer.decode(output_ids[0, prompt_ids.shape[1] :], skip_special_tokens=True)
    ).strip()


def summary(
    *,
    metrics: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    layout: dict[str, Any],
    elapsed_s: float,
    width: int,
) -> Panel:
    """What a person wants to know of the run, to fit a terminal `width` characters wide."""
    before, after = evaluations[0], evaluations[-1]
    # Two curves beside each other where there is room, each within the panel's frame.
    curve_width = (width - 6) // 2 if width >= 100 else width - 4
    curves = [
        Text(
            draw_curve(
                [row[key] for row in metrics], width=curve_width, height=CURVE_HEIGHT, title=title
            )
        )
        for key, title in (
            ("loss", "loss"),
            ("rewards/margin", "reward margin (chosen - rejected)"),
        )
    ]

    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "held-out preference accuracy",
        f"[bold]{before['eval/preference_accuracy']:.1%} -> "
        f"{after['eval/preference_accuracy']:.1%}[/] of {after['eval/num_pairs']:.0f} pairs",
    )
    facts.add_row(
        "loss", f"{metrics[0]['loss']:.4f} -> {metrics[-1]['loss']:.4f} in {len(metrics)} steps"
    )
    facts.add_row(
        "speed",
        # The first step pays for what the later ones find ready.
        f"{statistics.median(row['tokens_per_second'] for row in metrics[1:] or metrics):,.0f} "
        f"tokens/s, {metrics[-1]['num_tokens']:,} tokens in all",
    )
    groups = ", ".join(str(group) for group in layout["shard_groups"])
    facts.add_row(
        "sharding", f"{layout['num_replicas']} copies of {layout['shard_degree']} shards: {groups}"
    )
    facts.add_row("the model", f"{RUN / 'hf_model'}")
    facts.add_row("every step", f"{RUN / 'metrics.jsonl'}")
    facts.add_row("time", f"{elapsed_s / 60:.1f} minutes")

    body = Table.grid()
    body.add_row(Columns(curves, padding=(0, 2)))
    body.add_row("")
    body.add_row(facts)
    return Panel(body, title="what happened", title_align="left", expand=False)


if __name__ == "__main__":
    sys.exit(ended(main))

"""The task: sums of two numbers, behind some that are worked out, and a model that has learned from
examples of it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import REPOSITORY
from harness.processes import torchrun

from scripts.demo_data.sums import worked_out

NUM_EXAMPLES, EXAMPLES_A_STEP = 8000, 64
# Tokens of a prompt at most: the question, and each solved one before it.
LONGEST_QUESTION, LONGEST_SHOT = 32, 64
SHOTS = ((47, 38), (12, 93), (60, 25), (81, 19), (34, 52), (77, 66), (28, 15), (90, 31))


def warmed_up(model: Path, rows: Path, out: Path, *, num_steps: int) -> Path:
    """The model after so many steps of sft.py, as configs/sft/tiny_cpu.yaml takes them."""
    flags: list[object] = [
        *("--model_name_or_path", model, "--mixer_list", rows, "1.0", "--output_dir", out),
        *(
            "--cache_dir",
            out.parent / "cache",
            "--max_seq_length",
            LONGEST_SHOT,
            "--param_dtype",
            "float32",
        ),
        *("--per_device_train_batch_size", EXAMPLES_A_STEP // 2, "--max_train_steps", num_steps),
        *("--learning_rate", 3e-3, "--lr_scheduler_type", "linear", "--adam_beta2", 0.95),
        *("--checkpointing_steps", num_steps + 1),
    ]
    torchrun(sys.executable, 2, REPOSITORY / "open_instruct" / "sft.py", flags)
    return out / "hf_model"


def put_shots_before(prompts: Path, shots: Sequence[tuple[int, int]]) -> None:
    """Rewrite the prompts with solved sums before each question."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    solved = "".join(f"What is {a} + {b}?\n{worked_out(a, b)}\n\n" for a, b in shots)
    for row in rows:
        row["messages"][0]["content"] = solved + row["messages"][0]["content"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

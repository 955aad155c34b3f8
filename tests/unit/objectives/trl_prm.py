"""The training problem on which process reward models are compared with TRL's, and how ours are
trained on it.
"""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.prm import main

LEARNING_RATE, NUM_STEPS, NUM_ROWS = 1e-4, 5, 12
TOLERANCE = 1e-6


def write_problem(folder: Path) -> tuple[Path, Path]:
    """A tiny model with a head of two classes, whose bias is not 0, and rows of sums step by
    step.
    """
    model = write_tiny_model(folder / "model", family="qwen3")
    tensors = load_file(model / "model.safetensors")
    width = tensors.pop("lm_head.weight").shape[1]
    draw = torch.Generator().manual_seed(5)
    tensors["score.weight"] = torch.randn(2, width, generator=draw) / width**0.5
    tensors["score.bias"] = torch.tensor([0.25, -0.5])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForTokenClassification"],
        "id2label": {"0": "wrong", "1": "right"},
    }
    (model / "config.json").write_text(json.dumps(config))
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    return model, rows


def sums() -> list[dict[str, object]]:
    draw = random.Random(3)
    rows: list[dict[str, object]] = []
    for _ in range(NUM_ROWS):
        numbers = [draw.randint(1, 9) for _ in range(draw.randint(2, 6))]
        labels = [draw.random() < 0.6 for _ in numbers[1:]]
        steps = [
            f"{sum(numbers[:n])} + {numbers[n]} = {sum(numbers[: n + 1]) + (not label)}."
            for n, label in enumerate(labels, start=1)
        ]
        rows.append(
            {"prompt": f"{' + '.join(map(str, numbers))}?", "completions": steps, "labels": labels}
        )
    return rows


def train_ours(model: Path, rows: Path, out: Path) -> None:
    """Take the steps with our trainer, in this process."""
    flags: dict[str, object] = {
        "model_name_or_path": model,
        "mixer_list": f"{rows} 1.0",
        "output_dir": out,
        "cache_dir": out.parent / "cache",
        "param_dtype": "float32",
        "per_device_train_batch_size": NUM_ROWS,
        "max_train_steps": NUM_STEPS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "max_grad_norm": 0,
        "max_seq_length": 256,
        "checkpointing_steps": 100,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
    assert main(words) == 0

"""TRL's PRMTrainer on the given model and rows, all of them in every step; run by `prm_vs_trl.py`
with TRL 1.13.

It leaves the loss of each step as it was computed: what the trainer logs is rounded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer
from trl.experimental.prm import PRMConfig, PRMTrainer


class ExactTrainer(PRMTrainer):
    """Keeps the loss of every forward pass."""

    def compute_loss(self, *args: Any, **more: Any) -> Any:
        found = super().compute_loss(*args, **more)
        losses.append(float(found[0] if isinstance(found, tuple) else found))
        return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model", "rows", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    losses: list[float] = []
    trainer = ExactTrainer(
        model=AutoModelForTokenClassification.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=Dataset.from_list(rows),
        args=PRMConfig(
            output_dir=str(args.out),
            max_length=None,
            per_device_train_batch_size=len(rows),
            num_train_epochs=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    (args.out / "losses.json").write_text(json.dumps(losses))

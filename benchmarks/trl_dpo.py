"""TRL's DPOTrainer on the same model and rows; run by `dpo_vs_trl.py` with an interpreter that has TRL.

Each rank writes OUT/rank{N}.json: seconds, real tokens and loss of every step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer


class StepClock(TrainerCallback):
    """Wall time and loss of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began_s)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("model", "rows", "out"):
        parser.add_argument(f"--{flag}", type=Path, required=True)
    for flag in ("batch", "accumulation", "steps", "max_length"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    return parser.parse_args()


def train_timed(args: argparse.Namespace, trainer_class: Any, config_class: Any, masks: Sequence[str]) -> None:
    """Train and write what each step took. `masks` are those of a batch whose ones are real tokens."""
    torch.manual_seed(0)
    clock = StepClock()
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        args=config_class(
            output_dir=str(args.out),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation,
            max_steps=args.steps,
            max_length=args.max_length,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            beta=args.beta,
            precompute_ref_log_probs=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=load_dataset("json", data_files=str(args.rows), split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[clock],
    )
    collate = trainer.data_collator
    num_tokens: list[int] = []

    def counting(examples: Any) -> Any:
        batch = collate(examples)
        num_tokens.append(sum(int(batch[mask].sum()) for mask in masks))
        return batch

    # Reference log-probs first, so that only training batches are counted.
    trainer.get_train_dataloader()
    trainer.data_collator = counting
    trainer.train()
    per_step = [
        sum(num_tokens[step * args.accumulation : (step + 1) * args.accumulation]) for step in range(args.steps)
    ]
    result = {"seconds": clock.seconds, "num_tokens": per_step, "losses": clock.losses}
    (args.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    train_timed(parsed(), DPOTrainer, DPOConfig, ["attention_mask"])

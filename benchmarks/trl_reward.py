"""TRL's RewardTrainer on the same model and rows; run by `reward_vs_trl.py` with an interpreter that has TRL.

Each rank writes OUT/rank{N}.json: seconds, real tokens and loss of every step.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer
from trl_dpo import StepClock


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("model", "rows", "out"):
        parser.add_argument(f"--{flag}", type=Path, required=True)
    for flag in ("batch", "accumulation", "steps", "max_length"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag in ("center", "learning_rate"):
        parser.add_argument(f"--{flag}", type=float, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    clock = StepClock()
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32),
        args=RewardConfig(
            output_dir=str(args.out),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation,
            max_steps=args.steps,
            max_length=args.max_length,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            center_rewards_coefficient=args.center,
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
        num_tokens.append(int(batch["attention_mask"].sum()))
        return batch

    trainer.data_collator = counting
    trainer.train()
    per_step = [
        sum(num_tokens[step * args.accumulation : (step + 1) * args.accumulation]) for step in range(args.steps)
    ]
    result = {"seconds": clock.seconds, "num_tokens": per_step, "losses": clock.losses}
    (args.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

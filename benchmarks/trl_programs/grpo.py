"""TRL's GRPOTrainer on the same model and prompts; run by `grpo_vs_trl.py` with an interpreter that
has TRL.

Rank 0 writes OUT/steps.json: when each step ended, its mean reward, and the mean length of its
completions.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # open_instruct is not installed here

import torch
from datasets import load_dataset
from timed import PLAIN
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from open_instruct.rewards.answers import GSM8K


class StepClock(TrainerCallback):
    """When each step ended, and what was logged of it."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []
        self.rewards: list[float] = []
        self.lengths: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended_s.append(time.perf_counter())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])
            self.lengths.append(logs["completions/mean_length"])


def last_number_is_right(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    verifier = GSM8K()
    return [
        verifier.score(completion[-1]["content"], truth)
        for completion, truth in zip(completions, ground_truth, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("model", "prompts", "out"):
        parser.add_argument(f"--{flag}", type=Path, required=True)
    for flag in ("ranks", "num_prompts", "group", "steps", "response_length"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--continuous_batching", action="store_true")
    args = parser.parse_args()

    clock = StepClock()
    rows = load_dataset("json", data_files=str(args.prompts), split="train").rename_column(
        "messages", "prompt"
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=last_number_is_right,
        args=GRPOConfig(
            output_dir=str(args.out),
            use_cpu=True,
            per_device_train_batch_size=args.num_prompts * args.group // args.ranks,
            num_generations=args.group,
            max_completion_length=args.response_length,
            max_steps=args.steps,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=args.learning_rate,
            ddp_find_unused_parameters=False,
            use_transformers_continuous_batching=args.continuous_batching,
            **PLAIN,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[clock],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        result = {"ended_s": clock.ended_s, "rewards": clock.rewards, "lengths": clock.lengths}
        (args.out / "steps.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

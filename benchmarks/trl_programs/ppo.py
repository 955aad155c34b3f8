"""TRL's PPOTrainer on the same model; run by `ppo_vs_trl.py` with an interpreter that has TRL 1.12.

Writes OUT/trl.json: the token ids and rewards of each step's completions and the losses of policy
and critic, and the memory of the process, before the models were loaded and at its peak.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the harness
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from harness.memory import memory_bytes
from timed import PLAIN
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from transformers.models import olmo2  # loads what it has when asked; memory is measured after that
from trl.experimental.ppo import PPOConfig, PPOTrainer

assert olmo2.Olmo2ForCausalLM and olmo2.Olmo2ForSequenceClassification


class EvenTokens(torch.nn.Module):
    """The share of a completion's tokens that have an even id, asked as a reward model; it notes
    what it is given.
    """

    base_model_prefix = "rule"

    def __init__(self, prompt_length: int) -> None:
        super().__init__()
        self.prompt_length = prompt_length
        self.token_ids: list[list[int]] = []
        self.rewards: list[float] = []

    def rule(self, *, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        rewards = (input_ids[:, self.prompt_length :] % 2 == 0).float().mean(dim=1)
        self.token_ids += input_ids.tolist()
        self.rewards += rewards.tolist()
        return SimpleNamespace(hidden_states=[rewards[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Losses(TrainerCallback):
    """What was logged of each step."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, float]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs and "loss/value_avg" in logs:
            self.of_steps.append(
                {"policy_loss": logs["loss/policy_avg"], "value_loss": logs["loss/value_avg"]}
            )


def settings(args: argparse.Namespace, num_prompts: int) -> PPOConfig:
    return PPOConfig(
        output_dir=str(args.out),
        use_cpu=True,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        local_rollout_forward_batch_size=args.batch,
        num_ppo_epochs=1,
        total_episodes=num_prompts,
        num_sample_generations=0,
        response_length=args.response_length,
        temperature=1.0,
        kl_coef=args.kl_coef,
        learning_rate=args.learning_rate,
        **PLAIN,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("model", "critic", "out"):
        parser.add_argument(f"--{flag}", type=Path, required=True)
    for flag in ("batch", "accumulation", "steps", "prompt_length", "response_length"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag in ("learning_rate", "kl_coef"):
        parser.add_argument(f"--{flag}", type=float, required=True)
    args = parser.parse_args()

    per_step = args.batch * args.accumulation
    num_prompts = per_step * args.steps
    # In the last step of an epoch of prompts Accelerate accumulates nothing, so there are prompts
    # for one step more.
    num_rows = num_prompts + per_step
    (before,) = memory_bytes("VmRSS")
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    vocab_size = policy.config.vocab_size
    prompts = torch.randint(
        4, vocab_size, (num_rows, args.prompt_length), generator=torch.Generator().manual_seed(0)
    )
    reward, losses = EvenTokens(args.prompt_length), Losses()
    trainer = PPOTrainer(
        model=policy,
        ref_model=None,  # a copy of the policy
        value_model=AutoModelForSequenceClassification.from_pretrained(
            args.critic, num_labels=1, dtype=torch.float32
        ),
        reward_model=reward,
        # Two ids are all that is read of a tokenizer. No model says this pad, so no token of a
        # completion is masked.
        processing_class=SimpleNamespace(
            pad_token_id=vocab_size, eos_token_id=policy.config.eos_token_id
        ),
        train_dataset=Dataset.from_dict({"input_ids": prompts.tolist()}),
        data_collator=lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])},
        args=settings(args, num_prompts),
        callbacks=[losses],
    )
    trainer.train()
    (peak,) = memory_bytes("VmHWM")
    steps = [
        {
            "token_ids": reward.token_ids[first : first + per_step],
            "rewards": reward.rewards[first : first + per_step],
        }
        for first in range(0, num_prompts, per_step)
    ]
    steps = [step | logged for step, logged in zip(steps, losses.of_steps, strict=True)]
    (args.out / "trl.json").write_text(json.dumps({"before": before, "peak": peak, "steps": steps}))


if __name__ == "__main__":
    main()

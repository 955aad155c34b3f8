"""GRPO from Python: a reward in a function, and `fit` starts Ray, a learner and a vLLM engine.

open-instruct tiny-model tiny --family olmo2 && python examples/grpo_from_python.py tiny OUT
"""

import sys
from pathlib import Path

from open_instruct.notebook import GRPO, fit


def count_digits(completions, **columns):
    """The share of each answer that is digits."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def main(model: str, output_dir: str, num_steps: int = 5) -> list[float | None]:
    prompts = [{"prompt": f"Write the number {number}."} for number in range(100)]
    group_size, groups_per_step = 4, 4
    fitted = fit(
        GRPO,
        prompts,
        reward=count_digits,
        model_name_or_path=model,
        output_dir=Path(output_dir),
        num_unique_prompts_rollout=groups_per_step,
        num_samples_per_prompt_rollout=group_size,
        total_episodes=num_steps * groups_per_step * group_size,
        response_length=16,
        max_prompt_token_length=32,
        param_dtype="float32",
        learning_rate=1e-3,
    )
    print(fitted.metrics["reward"], fitted.model)
    return fitted.metrics["reward"]


if __name__ == "__main__":
    main(*sys.argv[1:])

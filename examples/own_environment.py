"""GRPO in an environment of your own: a class whose public methods are tools.

open-instruct tiny-model tiny --family olmo2 && python examples/own_environment.py tiny OUT
"""

import sys
from pathlib import Path

from open_instruct.notebook import GRPO, fit


class Dictionary:
    """German words in English. An object serves one episode."""

    def __init__(self) -> None:
        self.num_calls = 0

    def look_up(self, word: str) -> str:
        """Looks a word up.

        Args:
            word: the word to look up
        """
        self.num_calls += 1
        return {"ruhig": "calm", "rot": "red"}.get(word, "not found")

    def reward(self) -> float:
        """Asked when a reply calls no tool: 1 if the policy has looked something up."""
        return float(self.num_calls > 0)


def main(model: str, output_dir: str, num_steps: int = 2) -> list[float | None]:
    prompts = [{"prompt": f"What is {word} in English?"} for word in ("ruhig", "rot")] * 8
    group_size, groups_per_step = 4, 2
    fitted = fit(
        GRPO,
        prompts,
        environment=f"{Path(__file__).resolve()}:Dictionary",
        model_name_or_path=model,
        output_dir=output_dir,
        num_unique_prompts_rollout=groups_per_step,
        num_samples_per_prompt_rollout=group_size,
        total_episodes=num_steps * groups_per_step * group_size,
        response_length=32,
        max_prompt_token_length=512,
        filter_zero_std_samples=False,
        param_dtype="float32",
    )
    print(fitted.metrics["episodes/turns"], fitted.model)
    return fitted.metrics["episodes/turns"]


if __name__ == "__main__":
    main(*sys.argv[1:])

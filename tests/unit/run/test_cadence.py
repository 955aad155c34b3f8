"""The steps after which a run saves and evaluates."""

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.run.cadence import Cadence, build_cadence


@pytest.mark.parametrize(
    ("every", "steps"),
    [(None, []), (0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])],
)
def test_evaluations(every: int | None, steps: list[int]) -> None:
    cadence = Cadence(num_steps=5, save_every=1, evaluate_every=every)
    assert [step for step in range(1, 6) if cadence.evaluates_after(step)] == steps


@pytest.mark.parametrize(
    ("every", "ephemeral", "steps", "lasting_interval"),
    [
        (3, 2, [2, 3, 4, 6, 8, 9, 10], 3),
        (4, None, [4, 8, 10], 1),
        (99, None, [10], 1),
        (10, 5, [5, 10], 10),
    ],
)
def test_checkpoints(
    every: int, ephemeral: int | None, steps: list[int], lasting_interval: int
) -> None:
    cadence = Cadence(num_steps=10, save_every=every, save_ephemeral_every=ephemeral)
    assert [step for step in range(1, 11) if cadence.saves_after(step)] == steps
    assert cadence.lasting_interval == lasting_interval


def test_cadence_of_grpo() -> None:
    required = "--model_name_or_path m --dataset_mixer_list p.jsonl 1.0 --output_dir o"
    sizes = (
        "--total_episodes 1280 --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 16"
    )
    words = f"{required} {sizes} --checkpointing_steps 7 --ephemeral_save_interval 3".split()
    assert build_cadence(parse_run(GRPOConfig, words)) == Cadence(
        num_steps=10, save_every=7, save_ephemeral_every=3
    )
    config = parse_run(
        GRPOConfig,
        [*words, "--dataset_mixer_eval_list", "e.jsonl", "1.0", "--local_eval_every", "4"],
    )
    assert build_cadence(config).evaluate_every == 4

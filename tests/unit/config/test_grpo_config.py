"""GRPO's flags: what parses, what is refused, and with which remedy."""

import pytest

from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.parser import parse
from open_instruct.errors import InputError

REQUIRED = ["--model_name_or_path", "model", "--dataset_mixer_list", "prompts.jsonl", "1.0", "--output_dir", "out"]
HELD_OUT = ["--dataset_mixer_eval_list", "held_out.jsonl", "1.0"]


def config_of(*words: str) -> GRPOConfig:
    return parse(GRPOConfig, [*REQUIRED, *words])


def refusal(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        validate_grpo(config_of(*words))
    return str(caught.value)


def test_minimal_command_is_good() -> None:
    config = config_of(
        *HELD_OUT,
        *["--num_learners_per_node", "2", "--vllm_num_engines", "1", "--num_unique_prompts_rollout", "8"],
        *["--num_samples_per_prompt_rollout", "8", "--response_length", "64", "--max_prompt_token_length", "128"],
        *["--total_episodes", "640"],
    )
    assert validate_grpo(config) == []
    assert (config.num_completions_per_step, config.num_steps) == (64, 10)
    assert config.data.max_seq_length == 192
    assert config.max_tokens_per_microbatch == 4096


def test_learners_are_a_list_of_numbers() -> None:
    assert config_of("--num_learners_per_node", "2", "4").parallel.num_learners_per_node == [2, 4]
    with pytest.raises(InputError, match="--num_learners_per_node takes a list of whole numbers, not 'two'"):
        config_of("--num_learners_per_node", "two")


def test_advantages_are_a_shorter_name() -> None:
    assert config_of("--advantages", "rloo").rollout.advantage_normalization_type == "rloo"
    with pytest.raises(
        InputError, match=r"one of standard, centered, .*, or a function of your own as FILE.py:function"
    ):
        config_of("--advantages", "rlo")


def test_pass_at_k_needs_k_samples() -> None:
    assert "--eval_pass_at_k 8" in refusal(*HELD_OUT, "--eval_pass_at_k", "1", "8", "--eval_num_samples", "4")

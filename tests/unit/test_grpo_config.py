"""GRPO's flags: what parses, what is refused, and with which remedy."""

from __future__ import annotations

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


def test_a_minimal_command_is_good() -> None:
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--vllm_top_p 0.9", "biases the ratio"),
        ("--lora_sync adapter", "is read only with --use_lora; add that"),
        ("--use_lora --lora_sync adapter --lora_r 513", "--lora_r 513: an engine takes adapters of a rank up to 512"),
        ("--num_samples_per_prompt_rollout 1", "at least 2"),
        ("--total_episodes 10", "less than one step: --num_unique_prompts_rollout 16 x --num_samples_"),
        ("--temperature 0", "--temperature 0.0: must be at least 0.01"),
        ("--dataset_mixer_eval_list a 1.0 --eval_temperature 0.005", "0.005: must be at least 0.01, or 0"),
        ("--async_steps 0 --no_inflight_updates", "--inflight_updates false is read only with --async_steps above 0"),
        ("--vllm_max_num_batched_tokens 128 --vllm_max_num_seqs 256", "128 is less than --vllm_max_num_seqs 256"),
        ("--ray_address auto --ray_dashboard_host 0.0.0.0", "--ray_dashboard_host 0.0.0.0: a cluster at"),
        ("--activation_checkpointing_modules x", "only with --activation_checkpointing selected_modules; add that"),
        ("--response_length 2147483647", "fits no device"),
        ("--clip_lower 1.0", "must be above 0 and below 1"),
        ("--rho_cap 1", "must be above 1"),
        ("--rho_cap 3 --rho_correction none", "is read only with --rho_correction clamp, token_mask"),
        ("--loss_denominator words", "takes 'token' or a whole number"),
        ("--loss_denominator 100 --loss_fn gspo", "leave it out, or use dapo or cispo"),
        ("--loss_denominator 100 --loss_fn luspo", "--loss_fn luspo has a denominator of its own"),
        ("--rho_cap 3 --rho_correction bounds", "is read only with --rho_correction clamp, token_mask"),
        ("--rho_mask_upper 3", "is read only with --rho_correction bounds"),
        ("--rho_correction bounds --rho_clamp_lower 3 --rho_clamp_upper 2", "--rho_clamp_lower 3.0 is above"),
        ("--delta 1.2", "must be above 1 plus --clip_higher"),
        ("--delta 3 --loss_fn sapo", "is read only with --loss_fn dapo, grpo"),
        ("--cispo_clamp_below", "is read only with --loss_fn cispo or FILE.py:FUNCTION"),
        ("--kl_importance_weighted", "is read only with --beta above 0"),
        ("--top_entropy_quantile 0", "must be above 0"),
        ("--advantage_pass_k 2", "is read only with --advantage_normalization_type pass_at_k"),
        ("--advantages pass_at_k --advantage_pass_k 5", "more than the --num_samples_per_prompt_rollout 4"),
        ("--sft_mixer_list rows.jsonl 1.0", "give both, or neither"),
        ("--sft_rows_per_step 3", "give both, or neither"),
        ("--sft_mixer_list rows.jsonl --sft_rows_per_step 3", "--sft_mixer_list: 'rows.jsonl' has no amount"),
        ("--columns prompt=", "--columns prompt=: takes what a row should have"),
        ("--ce_coef 2", "is read only with --sft_mixer_list"),
        ("--teacher_kl_coef 2", "is read only with --teacher_model_name_or_path"),
        ("--rl_coef 0", "without --teacher_model_name_or_path nothing is learned"),
        ("--rl_coef 0 --teacher_model_name_or_path t", "add --no_filter_zero_std_samples"),
        ("--kl_estimator 1", "is read only with --beta above 0"),
        ("--beta 0.1 --alpha 0.5", "is read only with --ref_policy_update_freq"),
        ("--pack_length 100", "--max_prompt_token_length 256 + --response_length 256 = 512"),
        ("--num_mini_batches 17", "more than the 16 prompts"),
        ("--num_learners_per_node 2 0", "at least 1 learner for each node"),
        ("--single_gpu_mode --num_learners_per_node 2", "leave --num_learners_per_node 2 out"),
        ("--single_gpu_mode --vllm_num_engines 2", "leave --vllm_num_engines 2 out"),
        ("--weight_sync_backend ipc", "needs --single_gpu_mode"),
        ("--eval_on_step_0", "is read only with --dataset_mixer_eval_list"),
        ("--verifier reward.py", "takes NAME, FILE.py:NAME or module:NAME"),
        ("--non_stop_penalty_value -1", "only with --non_stop_penalty"),
        ("--additive_format_reward", "only with --apply_r1_style_format_reward"),
        ("--active_sampling --no_filter_zero_std_samples", "leave one out"),
        ("--fsdp_shard_degree 0", "--fsdp_shard_degree 0: must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(words: str, expected: str) -> None:
    assert expected in refusal(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--loss_fn my_loss.py:mine --delta 3 --loss_denominator 100",
        "--loss_fn package.losses:mine --advantages package.losses:advantages",
        "--advantages pass_at_k",
        "--loss_fn clip_cov --cov_fraction 0.01 --delta 3",
        "--rho_correction bounds --rho_mask_upper 3 --rho_clamp_upper 2 --rho_level sequence",
        "--sft_mixer_list rows.jsonl 1.0 --sft_rows_per_step 4 --ce_coef 0.1",
        "--teacher_model_name_or_path t --rl_coef 0 --no_filter_zero_std_samples --num_samples_per_prompt_rollout 1",
    ],
)
def test_what_works_together(words: str) -> None:
    assert validate_grpo(config_of(*words.split(), "--total_episodes", "6400")) == []


def test_advantages_are_a_shorter_name() -> None:
    assert config_of("--advantages", "rloo").rollout.advantage_normalization_type == "rloo"
    with pytest.raises(
        InputError, match=r"one of standard, centered, .*, or a function of your own as FILE.py:function"
    ):
        config_of("--advantages", "rlo")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--loss_fn cispo --clip_lower 0.3", "add --cispo_clamp_below"),
        ("--total_episodes 100", "1 x 64 (a step) and 36 more"),
        ("--teacher_model_name_or_path t", "--no_filter_zero_std_samples lets it teach"),
        ("--sft_mixer_list rows.jsonl 1.0 --sft_rows_per_step 4 --temperature 0.7", "applies to the cross-entropy"),
    ],
)
def test_what_is_seldom_meant_is_warned_about(words: str, expected: str) -> None:
    whole_steps = [] if "total_episodes" in words else ["--total_episodes", "6400"]
    (warning,) = validate_grpo(config_of(*words.split(), *whole_steps))
    assert expected in warning


def test_pass_at_k_needs_k_samples() -> None:
    assert "--eval_pass_at_k 8" in refusal(*HELD_OUT, "--eval_pass_at_k", "1", "8", "--eval_num_samples", "4")

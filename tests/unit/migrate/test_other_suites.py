"""Flags of TRL, axolotl, LLaMA-Factory, verl and OpenRLHF lead to ours."""

import re
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import list_flags
from open_instruct.config.name_hints import names_of_other_suites
from open_instruct.config.suites.upstream_flags import translate_flag
from open_instruct.core.errors import InputError
from open_instruct.objectives.registry import OBJECTIVES, load_objective
from tests.refusals import refused

CONFIGS: dict[str, Any] = {
    name: load_objective(name).config_class for name in (*OBJECTIVES, "grpo")
}
FLAGS: dict[str, set[str]] = {
    name: set(list_flags(config_class)) for name, config_class in CONFIGS.items()
}


def refusal(command: str, name: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_run(CONFIGS[command], [f"--{name}", "1"])
    (line,) = (line for line in str(caught.value).splitlines() if line.startswith(f"--{name} "))
    return line


@pytest.mark.parametrize(("name", "hint"), names_of_other_suites().items())
def test_each_leads_to_a_flag_that_exists(
    name: str, hint: str | list[str] | dict[str, str]
) -> None:
    sentences = (
        list(hint.values()) if isinstance(hint, dict) else [hint] if isinstance(hint, str) else []
    )
    named = {
        *re.findall(r"--(\w+)", " ".join(sentences)),
        *([] if isinstance(hint, str) else hint),
    } - {"else"}
    assert named <= set().union(*FLAGS.values())
    # A command's own flag needs no hint, nor does one of open-instruct's, which is taken.
    without = [
        command
        for command, flags in FLAGS.items()
        if name not in flags and translate_flag(name, ["1"], flags) is None
    ]
    said = {refusal(command, name) for command in without}
    wanted = sentences or [f"is called --{hint[0]} here"]
    assert said >= {f"--{name} {sentence}" for sentence in wanted}


@pytest.mark.parametrize(
    ("command", "name", "ours"),
    [
        ("dpo", "dataset", "mixer_list"),
        ("grpo", "dataset", "dataset_mixer_list"),
        ("dpo", "model", "model_name_or_path"),
        ("grpo", "num_generations", "num_samples_per_prompt_rollout"),
        ("grpo", "reward_funcs", "verifier"),
        ("dpo", "per_device_batch_size", "per_device_train_batch_size"),
        ("grpo", "actor_rollout_ref.rollout.n", "num_samples_per_prompt_rollout"),
        ("grpo", "data.max_response_length", "response_length"),
        ("grpo", "critic_pretrain", "critic_model_name_or_path"),
        ("grpo", "critic.model.path", "critic_model_name_or_path"),
        ("grpo", "critic.optim.lr", "critic_learning_rate"),
        ("grpo", "actor.ppo_epochs", "num_epochs"),
        ("sft", "qlora", "use_qlora"),
        ("grpo", "critic.cliprange_value", "value_clip"),
        ("grpo", "trainer.critic_warmup", "critic_warmup_steps"),
        ("grpo", "algorithm.lam", "gae_lambda"),
        ("grpo", "algorithm.gamma", "gamma"),
    ],
)
def test_flag_of_another_suite_is_answered_with_ours(command: str, name: str, ours: str) -> None:
    assert refusal(command, name) == f"--{name} is called --{ours} here"


def test_flag_that_another_name_fills_is_not_missing() -> None:
    with pytest.raises(InputError) as caught:
        parse_run(CONFIGS["dpo"], ["--pretrain", "M", "--mixer_list", "rows.jsonl", "1.0"])
    missing = [problem for problem in caught.value.problems if problem.kind == "missing_flag"]
    assert (
        len(missing) == 1
        and "--output_dir" in missing[0]
        and "--model_name_or_path" not in missing[0]
    )


def test_sections_of_a_file_are_refused_as_such(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  name: M\ndata:\n  path: rows.jsonl\n")
    with pytest.raises(InputError) as caught:
        parse_run(CONFIGS["dpo"], [str(file)])
    assert [problem.flag for problem in caught.value.problems] == ["model", "data"]
    assert all("flat" in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("command", "name", "meaning"),
    [
        ("dpo", "warmup_steps", "share of all steps"),
        ("dpo", "epsilon", "open-instruct grpo"),
        ("dpo", "max_prompt_length", "prompt and reply together"),
        ("dpo", "apply_chat_template", "not needed"),
        ("grpo", "loss_type", "--loss_denominator"),
        ("grpo", "actor_num_nodes", "8 8"),
        ("grpo", "train_batch_size", "--num_unique_prompts_rollout"),
        ("grpo", "remote_rm_url", "FILE.py:FUNCTION"),
        ("grpo", "vllm_mode", "--placement shared"),
        ("grpo", "hybrid_engine", "--placement shared"),
        ("grpo", "colocate", "slime's --offload is not needed"),
        ("grpo", "rollout_num_gpus", "--vllm_num_engines"),
        ("grpo", "sleep_level", "give up their memory"),
        ("grpo", "free_cache_engine", "give up their memory"),
        ("grpo", "async_train", "--async_steps 1"),
        ("grpo", "offload_rollout", "give up their memory"),
    ],
)
def test_flag_that_means_something_else_is_answered_with_what_it_means_here(
    command: str, name: str, meaning: str
) -> None:
    assert meaning in refusal(command, name)


def test_hint_is_of_this_command_alone() -> None:
    assert refusal("dpo", "num_generations").startswith("--num_generations is not a flag")


def test_file_of_settings_has_hints_too(tmp_path: Any) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("base_model: tiny\n")
    with refused("unknown_flag", "base_model", "theirs.yaml", "1", "model_name_or_path"):
        parse_run(CONFIGS["dpo"], [str(file)])

"""The checks of flags, case by case: flag_cases.yaml has the words, and what becomes of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.resolved import as_flat_dict
from open_instruct.objectives.registry import load_objective
from tests.refusals import refused

CASES: dict[str, Any] = yaml.load(
    Path(__file__).with_name("flag_cases.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader
)


def cases(kind: str) -> Iterator[tuple[Any, ...]]:
    for command, listed in CASES[kind].items():
        for case in listed.items() if isinstance(listed, dict) else listed:
            yield (command, case) if isinstance(case, str) else (command, *case)


def config_of(command: str, words: str) -> Any:
    rows = (
        "--dataset_mixer_list prompts.jsonl 1.0"
        if command == "grpo"
        else "--mixer_list rows.jsonl 1.0"
    )
    line = f"--model_name_or_path model --output_dir out {rows} {words}"
    return parse_run(load_objective(command).config_class, line.split())


def warnings_of(command: str, words: str) -> list[str]:
    return load_objective(command).validate(config_of(command, words))


@pytest.mark.parametrize(("command", "words", "problem"), cases("refused"))
def test_flags_that_cannot_work_are_refused_by_kind_and_name(
    command: str, words: str, problem: str
) -> None:
    kind, flag, *names = problem.split()
    with refused(kind, None if flag == "-" else flag, *names) as caught:
        warnings_of(command, words)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("command", "words", "part"), cases("warned"))
def test_flags_that_are_seldom_meant_give_one_warning(command: str, words: str, part: str) -> None:
    (warning,) = warnings_of(command, words)
    assert part in warning


@pytest.mark.parametrize(("command", "words"), cases("accepted"))
def test_flags_that_go_together_are_accepted(command: str, words: str) -> None:
    assert warnings_of(command, words) == []


@pytest.mark.parametrize(("command", "words", "expected"), cases("means"))
def test_words_of_flags_become_values(command: str, words: str, expected: dict[str, Any]) -> None:
    values = as_flat_dict(config_of(command, words))
    for name, value in expected.items():
        assert (values[name], type(values[name])) == (value, type(value))


def test_sizes_of_a_grpo_step_follow_from_its_flags() -> None:
    words = (
        "--num_learners_per_node 2 --num_unique_prompts_rollout 8 "
        "--num_samples_per_prompt_rollout 8 "
    )
    words += "--response_length 64 --max_prompt_token_length 128 --total_episodes 640"
    config = config_of("grpo", words)
    assert (config.num_completions_per_step, config.num_steps) == (64, 10)
    assert (config.data.max_seq_length, config.max_tokens_per_microbatch) == (192, 4096)

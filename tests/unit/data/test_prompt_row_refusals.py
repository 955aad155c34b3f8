"""Prompt rows that others made: what names no environment, what names no tools, and how short a
refusal is.
"""

from typing import Any

import pytest

from open_instruct.config.policy_sections import RewardSection
from open_instruct.data.files.rows import MAX_REASON, MalformedRow
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.rewards.registry import known_verifiers

VERIFIERS = known_verifiers(RewardSection())
ROW = {"prompt": "What is 2 + 3?", "dataset": "gsm8k", "ground_truth": "5"}


def parse(row: dict[str, Any], **arguments: Any) -> Any:
    return parse_prompt_row(
        ROW | row, VERIFIERS, known_environments=("counter", "calculator"), **arguments
    )


@pytest.mark.parametrize("tools", [5, True, 1.5, {"a": 1}, "add", [5], [["add"]]])
@pytest.mark.parametrize("environment", [None, "calculator"])
def test_tools_that_are_no_names_are_refused(tools: Any, environment: str | None) -> None:
    with pytest.raises(MalformedRow) as refusal:
        parse({"tools": tools}, environment=environment)
    assert refusal.value.kind == "environment"


@pytest.mark.parametrize(
    "config", [{"target": 5}, [{"target": 5}], {"env_configs": [{"target": 5}]}]
)
def test_env_config_without_a_name_is_of_the_environment_of_the_flag(config: Any) -> None:
    _, _, answered_by = parse({"env_config": config}, environment="counter")
    assert answered_by.name == "counter" and answered_by.columns["target"] == 5
    with pytest.raises(MalformedRow):
        parse({"env_config": config})


@pytest.mark.parametrize(
    "row",
    [
        {"dataset": "x" * 300_000},
        {"dataset": ["x" * 300_000]},
        {"dataset": "ifeval", "ground_truth": {"func_name": "x" * 300_000}},
        {"dataset": "gsm8k", "ground_truth": "x" * 300_000},
        {"weight": "x" * 300_000},
        {"env_config": {"env_name": "x" * 300_000}},
        {"messages": [{"role": "x" * 300_000, "content": "?"}]},
        {"messages": [{"role": "user", "content": "?", "train": "x" * 300_000}]},
    ],
)
def test_refusals_do_not_repeat_long_rows(row: dict[str, Any]) -> None:
    with pytest.raises(MalformedRow) as refusal:
        parse(row)
    assert len(str(refusal.value)) <= MAX_REASON + 1

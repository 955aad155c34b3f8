"""A run with --placement auto is placed as its plan finds it faster."""

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.core.errors import InputError
from open_instruct.parallel.engines import count_engines
from open_instruct.rl import decide_placement as module
from open_instruct.rl.decide_placement import decide_placement
from tests.unit.fake_rollouts import grpo_config


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny_model(tmp_path / "model", family="olmo2"))


def config_of(model: str, words: str) -> GRPOConfig:
    config = grpo_config(*words.split())
    return replace(config, model=replace(config.model, model_name_or_path=model))


def test_auto_becomes_flags_that_a_run_takes(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model, "--placement auto --num_learners_per_node 4")
    decided = decide_placement(config)
    assert decided.fleet.placement in ("split", "shared")
    learners = sum(decided.parallel.num_learners_per_node)
    engine_gpus = count_engines(decided.fleet, learners) * decided.fleet.vllm_tensor_parallel_size
    if decided.fleet.takes_turns:
        assert learners == engine_gpus == 4
    else:
        assert learners + engine_gpus == 4
    validate_grpo(decided)
    assert decided.memory == config.memory  # what else is auto stays so
    assert capsys.readouterr().out.startswith("--placement auto: ")


@pytest.mark.parametrize(
    "words",
    [
        "--placement split",
        "--placement shared --async_steps 0",
        "--placement shared --prompts_ahead 3",
    ],
)
def test_flags_that_are_given_stay(model: str, words: str) -> None:
    config = config_of(model, words)
    assert decide_placement(config) is config


def test_turns_of_asynchronous_steps_are_sized(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model, "--placement shared --async_steps 2")
    number = decide_placement(config).rollout.prompts_ahead
    assert number is not None and 0 < number <= 2 * config.rollout.num_unique_prompts_rollout
    assert f"--prompts_ahead {number}" in capsys.readouterr().out


def test_turns_that_cannot_be_planned_begin_all_that_may_be(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> NoReturn:
        raise ValueError("no such shape")

    monkeypatch.setattr(module, "build_shape", fail)
    config = config_of(model, "--placement shared --async_steps 1")
    assert decide_placement(config) is config
    assert "no such shape" in capsys.readouterr().out


def test_model_that_fits_nowhere_is_refused_with_what_it_needs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU", "memory_gib=0.01")
    config = config_of(model, "--placement auto --num_learners_per_node 2")
    with pytest.raises(InputError, match="No placement fits"):
        decide_placement(config)

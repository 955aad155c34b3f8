"""A run with --placement auto is placed as its plan finds it faster."""

from dataclasses import replace
from pathlib import Path

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


def test_placement_that_is_given_stays(model: str) -> None:
    config = config_of(model, "--placement shared")
    assert decide_placement(config) is config


def test_model_that_fits_nowhere_is_refused_with_what_it_needs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU", "memory_gib=0.01")
    config = config_of(model, "--placement auto --num_learners_per_node 2")
    with pytest.raises(InputError, match="No placement fits"):
        decide_placement(config)

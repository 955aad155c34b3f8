"""The one way to start ranks in a test: see `launch.run_ranks`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.demo_data.pairs import write_synthetic_preferences
from tests.ranks.grpo_case import GRPOCase
from tests.ranks.launch import run_ranks as start
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, TrainCase


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(num_ranks, "package.module:function", **arguments) -> list of results`."""
    return start


@pytest.fixture(scope="session")
def dpo_case(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """A tiny OLMo 2 and a few preference pairs of unequal length."""
    folder = tmp_path_factory.mktemp("dpo")
    model = write_shallow_model(folder / "model", family="olmo2")
    rows = folder / "rows.jsonl"
    write_synthetic_preferences(rows, num_rows=NUM_ROWS, seed=1)
    return TrainCase(model=model, rows=rows, folder=folder, own_flags={"loss_type": "dpo"})


@pytest.fixture(scope="module")
def grpo_case(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    """A tiny OLMo 2 and the learner steps of made-up completions."""
    return GRPOCase(tmp_path_factory.mktemp("grpo"))

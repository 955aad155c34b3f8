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
def start_model_and_pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny OLMo 2 and a few preference pairs of unequal length."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = folder / "rows.jsonl"
    write_synthetic_preferences(rows, num_rows=NUM_ROWS, seed=1)
    return write_shallow_model(folder / "model", family="olmo2"), rows


# Of one file: two files may well call a run by the same name.
@pytest.fixture(scope="module")
def dpo_case(
    tmp_path_factory: pytest.TempPathFactory, start_model_and_pairs: tuple[Path, Path]
) -> TrainCase:
    """Runs of DPO on a tiny OLMo 2 and a few pairs, in a folder of their own."""
    model, rows = start_model_and_pairs
    return TrainCase(
        model=model,
        rows=rows,
        folder=tmp_path_factory.mktemp("dpo"),
        own_flags={"loss_type": "dpo"},
    )


@pytest.fixture(scope="module")
def grpo_case(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    """A tiny OLMo 2 and the learner steps of made-up completions."""
    return GRPOCase(tmp_path_factory.mktemp("grpo"))

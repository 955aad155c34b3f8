"""Matrices that multiply in float8, emulated on the CPU: losses near bfloat16's, and nothing else
changed by a bit.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.ranks.launch import run_ranks
from tests.ranks.objective_rows import write_conversations
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_sft import JOB
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

pytestmark = pytest.mark.extended

pytest.importorskip("torchao", reason="needs torchao: pip install 'open-instruct[float8]'")

RECIPES = ("tensorwise", "rowwise")
NUM_STEPS = 50
LONG = {
    "max_train_steps": NUM_STEPS,
    "max_seq_length": 48,
    "batch": 4,
    "lr_scheduler_type": "constant",
}


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """On float32 shards, and on one device, whose copy computes: rowwise there, for both."""
    folder = tmp_path_factory.mktemp("float8")
    write_conversations(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    model = write_shallow_model(folder / "model", family="olmo2")
    case = TrainCase(
        model=model,
        rows=folder / "rows.jsonl",
        folder=folder,
        own_flags={"param_dtype": "bfloat16"},
    )
    commands = [
        case.command("off", **LONG),
        case.command("tensorwise", float8_linears="tensorwise", **LONG),
        case.command("rowwise", float8_linears="rowwise", single_gpu_mode=True, **LONG),
    ]
    run_ranks(1, JOB, commands=commands, ports=free_ports(len(commands)), entry="sft")
    return case


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_near_those_of_bfloat16(sft: TrainCase, recipe: str) -> None:
    ours, theirs = (np.array(sft.trajectory(name)) for name in (recipe, "off"))
    assert len(ours) == NUM_STEPS and theirs[-1, 0] < 0.9 * theirs[0, 0], "it learns"
    assert ours[:, 0] == pytest.approx(theirs[:, 0], rel=0.02)
    assert not np.array_equal(ours, theirs), "it computes otherwise"


def test_reference_and_export_are_the_same_to_the_bit(dpo_case: TrainCase) -> None:
    """At a rate that is 0 in float32, so that no weight moves."""
    still = {"param_dtype": "bfloat16", "learning_rate": 1e-46, "max_train_steps": 1}

    def cache_of(name: str) -> Path:
        return dpo_case.folder / f"cache_{name}"

    names = ("float8", "bf16")
    commands = [
        dpo_case.command(name, **still, cache_dir=cache_of(name), float8_linears=recipe)
        for name, recipe in zip(names, ("rowwise", "off"), strict=True)
    ]
    run_ranks(1, JOB, commands=commands, ports=free_ports(len(commands)))
    caches = [
        [path.read_bytes() for path in (cache_of(name) / "reference_logprobs").iterdir()]
        for name in names
    ]
    assert caches[0] and caches[0] == caches[1]
    assert dpo_case.weights_digest("float8") == dpo_case.weights_digest("bf16")
    assert dpo_case.trajectory("float8") != dpo_case.trajectory("bf16")
    assert dpo_case.is_exported_again("float8")

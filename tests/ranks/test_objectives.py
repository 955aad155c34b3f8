"""Every objective learns the same on four ranks as on one: as HSDP, split by matrices or rows, and
on ZeRO 2 and 3.

The files of the objectives have the rest of the layouts, and what is special to each.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from open_instruct.objectives.registry import OBJECTIVES
from tests.ranks.grpo_case import GRPOCase, Rows
from tests.ranks.launch import run_ranks
from tests.ranks.objective_case import assert_opens_whole, assert_same
from tests.ranks.objective_rows import write_objective_case
from tests.ranks.test_deepspeed import a_run, of_stage
from tests.ranks.test_grpo_step import assert_same_trajectory
from tests.ranks.train_case import STEPS_OF_AN_EPOCH, TrainCase, free_ports

JOB = "tests.ranks.jobs.objectives:run"
NUM_RANKS = 4
FAMILIES = {
    "dpo": "olmo2",
    "distill": "olmo2",
    "kto": "olmo3",
    "prm": "qwen2",
    "reward_model": "llama",
    "sft": "qwen3",
}
HSDP_2X2: dict[str, Any] = {"fsdp_shard_degree": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2}
CONTEXT: dict[str, Any] = {"context_parallel_degree": 2}
# Of each run: its objective, its layout's name and flags, and how many ranks have rows of their
# own.
LAYOUTS: list[tuple[str, str, dict[str, Any], int]] = [
    *((entry, "hsdp_2x2", HSDP_2X2, 4) for entry in FAMILIES),
    ("dpo", "tensor", TENSOR, 2),
    ("dpo", "context", CONTEXT, 2),
    ("dpo", "zero_2", of_stage(2), 4),
    ("dpo", "zero_3", of_stage(3), 4),
]
GRPO: dict[str, Any] = {
    "beta": 0.05,
    "num_mini_batches": 2,
    "loss_fn": "grpo",
    "clip_higher": 0.001,
}
GRPO_LAYOUTS: dict[str, dict[str, Any]] = {
    "hsdp_2x2": HSDP_2X2,
    "context": CONTEXT | HSDP_2X2,
    "zero_3": of_stage(3),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainCase]:
    folder = tmp_path_factory.mktemp("objectives")
    return {
        entry: write_objective_case(folder / entry, entry, family=family)
        for entry, family in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def grpo_steps(cases: dict[str, TrainCase], grpo_case: GRPOCase) -> dict[str, Rows]:
    """By layout, and `base` in one process; the offline runs are taken in the same ranks."""
    runs = [a_run(case, "base", {}, readers=1, entry=entry) for entry, case in cases.items()]
    base = grpo_case.case("base", flags=GRPO | {"prefix_sharing": "off"})
    said, (rows,) = start(1, runs, [base])
    assert said == [None] * len(runs)
    runs = [
        a_run(cases[entry], name, flags, readers=readers, entry=entry)
        for entry, name, flags, readers in LAYOUTS
    ]
    layouts = {
        name: grpo_case.case(name, flags=GRPO | flags | {"num_learners_per_node": NUM_RANKS})
        for name, flags in GRPO_LAYOUTS.items()
    }
    said, sharded = start(NUM_RANKS, runs, [*layouts.values()])
    assert said == [None] * len(runs)
    return {"base": rows, **dict(zip(layouts, sharded, strict=True))}


def start(
    num_ranks: int, runs: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> tuple[list[Any], list[Rows]]:
    """What rank 0 returns."""
    ports = free_ports(len(runs) + len(steps))
    (said, rows), *_ = run_ranks(num_ranks, JOB, runs=runs, steps=steps, ports=ports)
    return said, rows


@pytest.mark.parametrize("entry", OBJECTIVES)
def test_objective_is_trained_sharded_by_make_test(entry: str) -> None:
    """Here, or in a file of its own that no tier leaves out."""
    own = Path(__file__).with_name(f"test_{entry}.py")
    assert entry in FAMILIES or "pytest.mark.extended" not in own.read_text()


@pytest.mark.usefixtures("grpo_steps")
@pytest.mark.parametrize(("entry", "layout"), [(entry, name) for entry, name, *_ in LAYOUTS])
def test_offline_objective_takes_the_steps_of_one_process(
    cases: dict[str, TrainCase], entry: str, layout: str
) -> None:
    """Of an epoch, whose last batch is short: with KTO, some ranks have no row of it."""
    assert_same(cases[entry], layout, "base", ("loss",), num_steps=STEPS_OF_AN_EPOCH)


@pytest.mark.usefixtures("grpo_steps")
def test_offline_objectives_learn_and_leave_models_that_open(cases: dict[str, TrainCase]) -> None:
    """Otherwise equal trajectories would prove nothing."""
    for entry, case in cases.items():
        rows = case.metrics("base")
        assert all(row["grad_norm"] > 0 for row in rows) and rows[0]["loss"] != rows[-1]["loss"], (
            entry
        )
    assert cases["dpo"].metrics("base")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    for layout in ("hsdp_2x2", "tensor", "zero_3"):
        assert_opens_whole(cases["dpo"].folder / layout)


@pytest.mark.parametrize("layout", GRPO_LAYOUTS)
def test_grpo_takes_the_steps_of_one_process(grpo_steps: dict[str, Rows], layout: str) -> None:
    assert all(row["has_moved"] and row["kl"] > 0 for row in grpo_steps["base"][1:])
    assert_same_trajectory(grpo_steps[layout], grpo_steps["base"])

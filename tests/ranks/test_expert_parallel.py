"""Experts split over ranks learn what experts that are gathered learn, and what one process
does.
"""

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from open_instruct.models.hf.hf_config import SINGLE_NAME
from scripts.demo_data.pairs import write_synthetic_preferences
from tests.ranks.launch import run_ranks as start
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

pytestmark = pytest.mark.extended

RunRanks = Callable[..., list[Any]]

JOB = "tests.ranks.jobs.train_runs:run_each"
SPLIT = {"expert_parallel_degree": 2}
# Below every gradient's norm, so that each step is clipped.
CLIPPED = {"max_grad_norm": 0.05, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """A tiny Qwen 3 MoE, trained by one process: the trajectory that every other must follow."""
    folder = tmp_path_factory.mktemp("experts")
    model = write_shallow_model(folder / "model", family="qwen3_moe")
    # Large experts have a large part in every gradient.
    stored = load_file(model / SINGLE_NAME)
    save_file(
        {name: each * (5 if "experts" in name else 1) for name, each in stored.items()},
        model / SINGLE_NAME,
    )
    rows = folder / "rows.jsonl"
    write_synthetic_preferences(rows, num_rows=NUM_ROWS, seed=1)
    case = TrainCase(
        model=model, rows=rows, folder=folder, own_flags={"loss_type": "dpo"} | CLIPPED
    )
    run(start, case, 1, {"base": {"max_train_steps": 4}})
    return case


def run(
    run_ranks: RunRanks, case: TrainCase, num_ranks: int, runs: dict[str, dict[str, Any]]
) -> None:
    commands = [
        case.command(name, ranks=num_ranks, **{"max_train_steps": 3} | flags)
        for name, flags in runs.items()
    ]
    run_ranks(num_ranks, JOB, commands=commands, ports=free_ports(len(commands)))


def assert_same(case: TrainCase, names: dict[str, Any]) -> None:
    base = case.trajectory("base")
    assert (
        base[-1][0] < base[0][0] - 0.005
        and min(norm for _, norm in base) > CLIPPED["max_grad_norm"]
    )
    for name in names:
        ours = case.trajectory(name)
        for step, (a, b) in enumerate(zip(ours, base, strict=False), start=1):
            assert a == pytest.approx(b, rel=1e-5), f"{name} differs at step {step}"


def test_two_ranks(one_process: TrainCase, run_ranks: RunRanks) -> None:
    runs: dict[str, dict[str, Any]] = {
        "gathered": {},
        "split": SPLIT,
        "split, recomputed": SPLIT | {"activation_checkpointing": "full", "batch": 2},
        "split, reduced last": SPLIT | {"gradient_reduction": "last", "batch": 2},
    }
    run(run_ranks, one_process, 2, runs)
    assert_same(one_process, runs)


def test_replicas_of_two_ranks(one_process: TrainCase, run_ranks: RunRanks) -> None:
    runs = {"2x2": SPLIT | {"fsdp_num_replicas": 2}, "4": {"expert_parallel_degree": 4}}
    run(run_ranks, one_process, 4, runs)
    assert_same(one_process, runs)


def test_run_goes_on_with_experts_split_or_not(one_process: TrainCase, run_ranks: RunRanks) -> None:
    gathered: dict[str, Any] = {}
    first = {"split": SPLIT, "to be gathered": SPLIT, "to be split": gathered}
    then = {"split": SPLIT, "to be gathered": gathered, "to be split": SPLIT, "undisturbed": SPLIT}
    both = [(first, {"max_train_steps": 2}), (then, {"max_train_steps": 4})]
    for runs, steps in both:
        run(
            run_ranks,
            one_process,
            2,
            {f"{name}, saved": flags | steps for name, flags in runs.items()},
        )
    assert_same(one_process, {f"{name}, saved": flags for name, flags in then.items()})
    resumed, undisturbed = "split, saved", "undisturbed, saved"
    assert one_process.trajectory(resumed) == one_process.trajectory(undisturbed)
    assert one_process.weights_digest(resumed) == one_process.weights_digest(undisturbed)


@pytest.mark.parametrize(
    ("ends", "replicas"),
    [
        ([[3, 3, 5, 9], [0, 7, 7, 8]], 1),
        ([[4, 6, 6, 6], [2, 5, 5, 5]], 1),  # nothing arrives at the second rank
        ([[0, 0, 0, 0], [1, 2, 2, 4]], 1),  # nothing is sent by the first
        ([[1, 2, 3, 3], [2, 2, 2, 2], [0, 0, 3, 4], [1, 1, 2, 6]], 2),
    ],
)
def test_rows_come_back_from_their_experts(
    run_ranks: RunRanks, ends: list[list[int]], replicas: int
) -> None:
    job = "tests.ranks.jobs.experts:differences"
    for of_rank in run_ranks(len(ends), job, ends=ends, replicas=replicas):
        assert set(of_rank) == {"output", "input", "w1", "w2", "w3"}
        assert max(of_rank.values()) < 1e-5, of_rank

"""GRPO on DeepSpeed: the steps of one process, the weights that engines get, and what a stopped run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase, Rows
from tests.ranks.launch import run_ranks
from tests.ranks.test_grpo_step import WAYS, assert_same_trajectory
from tests.ranks.train_case import free_ports

JOBS = "tests.ranks.jobs.deepspeed_grpo"
OWN_WAYS = {**WAYS, "moving": WAYS["minibatches"] | {"ref_policy_update_freq": 2, "alpha": 0.5}}
COMPLETIONS = [13, 9, 3, 6, 8]


def of_stage(stage: int, **flags: Any) -> dict[str, Any]:
    return {"backend": "deepspeed", "deepspeed_stage": stage} | flags


def run(case: GRPOCase, ranks: int, runs: dict[str, dict[str, Any]]) -> dict[str, Rows]:
    flags = {name: {"num_learners_per_node": ranks} | each for name, each in runs.items()}
    cases = {name: case.case(name, flags=each, completions=COMPLETIONS) for name, each in flags.items()}
    return case.run(run_ranks, ranks, cases, job=f"{JOBS}:run_each")


@pytest.fixture(scope="module")
def one_process(grpo_case: GRPOCase) -> dict[str, Rows]:
    """On the other backend, without anything shared."""
    return run(grpo_case, 1, {way: flags | {"prefix_sharing": "off"} for way, flags in OWN_WAYS.items()})


def test_every_stage_takes_the_steps_of_one_process(grpo_case: GRPOCase, one_process: dict[str, Rows]) -> None:
    """With a reference policy, with several updates a step, and with a reference that follows."""
    runs = {f"minibatches_{stage}": of_stage(stage, **WAYS["minibatches"]) for stage in range(4)}
    runs |= {
        f"{way}_{stage}": of_stage(stage, **OWN_WAYS[way])
        for way, stage in (("plain", 0), ("moving", 2), ("moving", 3))
    }
    for name, rows in run(grpo_case, 2, runs).items():
        assert_same_trajectory(rows, one_process[name.partition("_")[0]])


def test_split_rows_second_copies_and_host_memory_change_nothing(
    grpo_case: GRPOCase, one_process: dict[str, Rows]
) -> None:
    """Second copies are those of before an update, until they are made again: also where it is only looked at."""
    in_host_memory = {"deepspeed_zpg": 2, "adam_offload": True, "offload": True}
    runs = {
        "plain_split": of_stage(2, sequence_parallel_size=2, **WAYS["plain"]),
        "minibatches_split": of_stage(3, sequence_parallel_size=2, **WAYS["minibatches"]),
        "minibatches_copied": of_stage(3, **in_host_memory, **WAYS["minibatches"]),
    }
    for name, rows in run(grpo_case, 4, runs).items():
        assert_same_trajectory(rows, one_process[name.partition("_")[0]])


def test_engines_get_the_masters_part_by_part(grpo_case: GRPOCase, tmp_path: Path) -> None:
    """In the engines' dtype, be it finer than what learners compute in; each value once."""
    ways = [(0, "float32", "gloo", "bfloat16"), (1, "bfloat16", "shm", "bfloat16")]
    ways += [(2, "float32", "shm", "float32"), (3, "bfloat16", "gloo", "float32")]
    cases = []
    for stage, param_dtype, way, dtype in ways:
        flags = of_stage(stage, param_dtype=param_dtype, num_learners_per_node=2, learning_rate=0.05)
        case = grpo_case.case(f"sync_{stage}", flags=flags)
        cases.append({"flags": case["flags"], "way": way, "dtype": dtype})
    *_, differing = run_ranks(
        3,
        f"{JOBS}:sync",
        timeout_s=180,
        cases=cases,
        ports=free_ports(len(cases)),
        num_learners=2,
        folder=str(tmp_path),
    )
    assert differing == [[]] * len(cases)


def test_a_stopped_run_goes_on_bitwise(grpo_case: GRPOCase) -> None:
    flags = of_stage(2, num_learners_per_node=2, lr_scheduler_type="linear", **WAYS["minibatches"])
    case = grpo_case.case("stopped", flags=flags)
    num_steps = 4
    for of_rank in run_ranks(
        2, f"{JOBS}:stop_and_go_on", timeout_s=120, flags=case["flags"], ports=free_ports(2), num_steps=num_steps
    ):
        rows = of_rank["rows"]
        assert rows[: num_steps // 2] == rows[num_steps // 2 :]
        assert rows[0] != rows[1]
        assert of_rank["same_weights"]

"""GRPO on DeepSpeed: the steps of one process, the weights that engines get, and what a stopped run
goes on from.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase, Rows
from tests.ranks.launch import run_ranks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_grpo_step import WAYS, assert_same_trajectory
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

JOBS = "tests.ranks.jobs.deepspeed_grpo"
LORA: dict[str, Any] = {"use_lora": True, "lora_r": 8}
SPLIT: dict[str, Any] = {"tensor_parallel_degree": 2}
OWN_WAYS = {
    **WAYS,
    "moving": WAYS["minibatches"] | {"ref_policy_update_freq": 2, "alpha": 0.5},
    "adapters": WAYS["minibatches"] | {"learning_rate": 2e-3, **LORA},
}


def of_stage(stage: int, **flags: Any) -> dict[str, Any]:
    """Blocks are recomputed where that is asked for, as in `test_deepspeed.of_stage`."""
    return {
        "backend": "deepspeed",
        "deepspeed_stage": stage,
        "activation_checkpointing": "none",
    } | flags


def run(case: GRPOCase, ranks: int, runs: dict[str, dict[str, Any]]) -> dict[str, Rows]:
    flags = {name: {"num_learners_per_node": ranks} | each for name, each in runs.items()}
    cases = {name: case.case(name, flags=each) for name, each in flags.items()}
    return case.run(run_ranks, ranks, cases, job=f"{JOBS}:run_each")


@pytest.fixture(scope="module")
def taught(grpo_case: GRPOCase) -> dict[str, Any]:
    """With a teacher beside the reference."""
    teacher = write_shallow_model(grpo_case.folder / "teacher", family="olmo2", seed=1)
    return WAYS["plain"] | {"teacher_model_name_or_path": teacher, "teacher_kl_coef": 0.5}


@pytest.fixture(scope="module")
def one_process(grpo_case: GRPOCase, taught: dict[str, Any]) -> dict[str, Rows]:
    """On the other backend, without anything shared."""
    ways = OWN_WAYS | {"taught": taught}
    return run(
        grpo_case, 1, {way: flags | {"prefix_sharing": "off"} for way, flags in ways.items()}
    )


def test_every_stage_takes_the_steps_of_one_process(
    grpo_case: GRPOCase, one_process: dict[str, Rows], taught: dict[str, Any]
) -> None:
    """With a reference policy, with several updates a step, then also with a reference that
    follows, or adapters.

    Or with matrices that ranks split, beside a reference, and a teacher, that FSDP2 shards, and
    splits over the same.
    """
    runs = {
        f"{way}_{stage}": of_stage(stage, **OWN_WAYS[way])
        for way, stages in {
            "minibatches": (0, 1),
            "plain": (1,),
            "moving": (2, 3),
            "adapters": (2, 3),
        }.items()
        for stage in stages
    }
    runs |= {
        "taught_parts": of_stage(1, **SPLIT, **taught),
        "minibatches_parts": of_stage(3, **SPLIT, **WAYS["minibatches"]),
        "moving_parts": of_stage(2, **SPLIT, **OWN_WAYS["moving"]),
    }
    for name, rows in run(grpo_case, 2, runs).items():
        assert_same_trajectory(rows, one_process[name.partition("_")[0]])


def test_single_device_takes_the_steps_of_one_process(
    grpo_case: GRPOCase, one_process: dict[str, Rows]
) -> None:
    flags = of_stage(2, single_gpu_mode=True, **WAYS["minibatches"])
    assert_same_trajectory(
        run(grpo_case, 1, {"one_device": flags})["one_device"], one_process["minibatches"]
    )


def test_split_rows_second_copies_and_host_memory_change_nothing(
    grpo_case: GRPOCase, one_process: dict[str, Rows]
) -> None:
    """Second copies are those of before an update, until they are made again: also where it is only
    looked at.
    """
    in_host_memory = {
        "deepspeed_zpg": 2,
        "adam_offload": True,
        "offload": True,
        "activation_checkpointing": "auto",
    }
    runs = {
        "minibatches_split": of_stage(2, sequence_parallel_size=2, **WAYS["minibatches"]),
        "minibatches_copied": of_stage(3, **in_host_memory, **WAYS["minibatches"]),
    }
    for name, rows in run(grpo_case, 4, runs).items():
        assert_same_trajectory(rows, one_process[name.partition("_")[0]])


def test_engines_get_the_masters_part_by_part(grpo_case: GRPOCase, tmp_path: Path) -> None:
    """In the engines' dtype, be it finer than what learners compute in; each value once; with
    adapters added.
    """
    ways: list[tuple[int, str, str, str, dict[str, Any]]] = [
        (0, "float32", "gloo", "bfloat16", {}),
        (1, "bfloat16", "shm", "bfloat16", {}),
        (2, "float32", "shm", "float32", {}),
        (3, "bfloat16", "gloo", "float32", {}),
        (2, "float32", "gloo", "bfloat16", LORA),
        (3, "bfloat16", "shm", "float32", LORA),
    ]
    assert differing(grpo_case, tmp_path, 2, ways) == [[]] * len(ways)


def test_engines_beside_learners_get_every_value_of_uneven_parts(
    grpo_case: GRPOCase, tmp_path: Path
) -> None:
    """As learners and engines take turns: three learners, which share no parameter evenly, rest and
    come back before they gather for the engine beside each.
    """
    ways: list[tuple[int, str, str, str, dict[str, Any]]] = [
        (1, "bfloat16", "gathered", "float32", {}),
        (1, "float32", "gathered", "bfloat16", {}),
        (2, "float32", "gathered", "float32", {}),
        (2, "bfloat16", "gathered", "float32", LORA),
        (3, "float32", "gathered", "float32", {}),
        (3, "bfloat16", "gathered", "bfloat16", {}),
    ]
    assert differing(grpo_case, tmp_path, 3, ways) == [[]] * len(ways)


def test_matrices_that_ranks_split_come_together_in_engines(
    grpo_case: GRPOCase, tmp_path: Path
) -> None:
    """Also where a rank has a run of the values of a matrix that is cut along its columns."""
    ways: list[tuple[int, str, str, str, dict[str, Any]]] = [
        (1, "bfloat16", "shm", "float32", SPLIT),
        (3, "float32", "gloo", "float32", SPLIT),
    ]
    assert differing(grpo_case, tmp_path, 4, ways) == [[]] * len(ways)


def differing(
    grpo_case: GRPOCase,
    folder: Path,
    num_learners: int,
    ways: list[tuple[int, str, str, str, dict[str, Any]]],
) -> list[list[str]]:
    """Of each way the tensors that engines get other than an export of the masters."""
    cases = []
    for number, (stage, param_dtype, way, dtype, more) in enumerate(ways):
        flags = of_stage(
            stage,
            param_dtype=param_dtype,
            num_learners_per_node=num_learners,
            learning_rate=0.05,
            **more,
        )
        case = grpo_case.case(f"sync_{num_learners}_{number}", flags=flags)
        cases.append({"flags": case["flags"], "way": way, "dtype": dtype})
    arguments = {
        "cases": cases,
        "ports": free_ports(len(cases)),
        "num_learners": num_learners,
        "folder": str(folder),
    }
    *_, of_receiver = run_ranks(num_learners + 1, f"{JOBS}:sync", **arguments)
    return of_receiver


def test_stopped_run_goes_on_bitwise(grpo_case: GRPOCase) -> None:
    flags = of_stage(2, num_learners_per_node=2, lr_scheduler_type="linear", **WAYS["minibatches"])
    case = grpo_case.case("stopped", flags=flags)
    num_steps = 4
    for of_rank in run_ranks(
        2, f"{JOBS}:stop_and_go_on", flags=case["flags"], ports=free_ports(2), num_steps=num_steps
    ):
        rows = of_rank["rows"]
        assert rows[: num_steps // 2] == rows[num_steps // 2 :]
        assert rows[0] != rows[1]
        assert of_rank["same_weights"]

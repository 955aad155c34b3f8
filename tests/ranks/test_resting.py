"""A learner whose state goes to host memory after each step, and comes back, is bitwise the one
whose state stays: for every way of sharding, and with every model that may stand beside.
"""

from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase
from tests.ranks.launch import run_ranks
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.resting:run_each"
BFLOAT16 = {"param_dtype": "bfloat16"}
MOVES = {"beta": 0.05, "ref_policy_update_freq": 2, "alpha": 0.5}
CRITIC = {"advantages": "gae", "critic_learning_rate": 1e-4}
QLORA = {"use_lora": True, "use_qlora": True, "beta": 0.05}


def of_zero(stage: int, **flags: Any) -> dict[str, Any]:
    return {"backend": "deepspeed", "deepspeed_stage": stage} | flags


ON_TWO: dict[str, dict[str, Any]] = {
    "fsdp2": BFLOAT16 | CRITIC,
    "reference": {"beta": 0.05},
    "reference_moves": MOVES,
    "eight_bit": {"optimizer": "adamw_8bit"},
    "muon": {"optimizer": "muon"},
    "lora": {"use_lora": True},
    "qlora": BFLOAT16 | QLORA,
    "zero_0": of_zero(0),
    "zero_1": of_zero(1, **CRITIC),
    "zero_1_bfloat16": of_zero(1, **BFLOAT16),
    "zero_2": of_zero(2, **BFLOAT16, **MOVES),
    "zero_3": of_zero(3, **BFLOAT16, **MOVES),
    "zero_3_critic": of_zero(3, **CRITIC),
    "zero_3_lora": of_zero(3, use_lora=True),
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "hsdp": {"fsdp_shard_degree": 2, "fsdp_num_replicas": 2},
    "tensor": {"tensor_parallel_degree": 2},
    "zero_3_copies": of_zero(3, deepspeed_zpg=2),
}
ON_ONE: dict[str, dict[str, Any]] = {
    "masters_and_copy": {"single_gpu_mode": True} | BFLOAT16 | MOVES,
}


@pytest.fixture(scope="module")
def results(grpo_case: GRPOCase) -> dict[str, list[dict[str, Any]]]:
    """Of each case, the results of all ranks."""
    found: dict[str, list[dict[str, Any]]] = {}
    for num_ranks, cases in ((1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)):
        commands = [
            grpo_case.case(f"resting_{name}", flags={"num_learners_per_node": num_ranks} | flags)
            for name, flags in cases.items()
        ]
        of_ranks = run_ranks(
            num_ranks,
            JOB,
            cases=[command["flags"] for command in commands],
            ports=free_ports(2 * len(commands)),
        )
        for number, name in enumerate(cases):
            found[name] = [of_rank[number] for of_rank in of_ranks]
    return found


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO, *ON_FOUR])
def test_resting_learner_is_bitwise_the_one_that_stays_awake(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    for of_rank in results[name]:
        assert of_rank["rested"] == of_rank["awake"]
        assert len({digest for _, digest in of_rank["rested"]}) > 1  # it did learn


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO, *ON_FOUR])
def test_nothing_of_a_learner_is_left_where_it_was(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    for of_rank in results[name]:
        assert of_rank["moved_tensors"] > 0  # the bytes came back to other places
        # Sines and cosines of positions, seeds, and a batch that a metric refers to.
        assert of_rank["left"] < 0.05 * of_rank["held"], of_rank

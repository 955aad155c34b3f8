"""A run whose shards FSDP2's policy has on the host learns, to the bit, what one without that
policy does.

The device is the CPU here, so that nothing moves; the order of copies is looked at in
tests/fake_cuda.
"""

from typing import Any

import pytest

from tests.ranks.grpo_case import RunRanks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.train_runs:run_each"
# The rate is constant: a shorter run is the start of a longer one.
STEPS: dict[str, Any] = {
    "max_train_steps": 2,
    "batch": 2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.01,
}


def test_shards_on_the_host_learn_the_same_to_the_bit(
    dpo_case: TrainCase, run_ranks: RunRanks
) -> None:
    experts = write_shallow_model(dpo_case.folder / "experts", family="qwen3_moe")
    tied = write_shallow_model(dpo_case.folder / "tied", family="qwen3")
    ways: dict[str, dict[str, Any]] = {
        "sharded": {
            "ref_policy_update_freq": 1,
            "gradient_reduction": "last",
            "fsdp_prefetch_factor": 1,
        },
        "replicas, adapters": {"fsdp_shard_degree": 1, "use_lora": True, "param_dtype": "bfloat16"},
        "tensor 2, 8 bits": {"tensor_parallel_degree": 2, "optimizer": "adamw_8bit"},
        "tied": {"model_name_or_path": tied},
        "experts": {
            "expert_parallel_degree": 2,
            "optimizer": "skip_step_adamw",
            "model_name_or_path": experts,
        },
    }
    commands = [
        dpo_case.command(f"{way}{where}", ranks=2, **STEPS | flags, offload=bool(where))
        for way, flags in ways.items()
        for where in ("", ", on the host")
    ]
    # Begun there and ended without: on the checkpoint of a shorter run.
    commands += [
        dpo_case.command(
            "moved", ranks=2, **STEPS | ways["sharded"] | {"max_train_steps": 1}, offload=True
        ),
        dpo_case.command("moved", ranks=2, **STEPS | ways["sharded"]),
    ]
    run_ranks(2, JOB, commands=commands, ports=free_ports(len(commands)))
    for way in ways:
        assert dpo_case.trajectory(way) == dpo_case.trajectory(f"{way}, on the host"), way
        assert dpo_case.weights_digest(way) == dpo_case.weights_digest(f"{way}, on the host"), way
        assert "--offload" in (dpo_case.folder / f"{way}, on the host" / "run.log").read_text()
    assert dpo_case.weights_digest("moved") == dpo_case.weights_digest("sharded")

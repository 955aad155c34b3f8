"""One device without sharding: a copy in bfloat16 computes, and float32 masters are what is updated
and saved.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.grpo_case import GRPOCase
from tests.ranks.launch import run_ranks
from tests.ranks.test_grpo_step import assert_same_trajectory
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.train_runs:run_each"
# A rate of which bfloat16 would keep next to nothing, and two microbatches a step, whose gradients
# add up.
FLAGS: dict[str, Any] = {
    "param_dtype": "bfloat16",
    "learning_rate": 5e-7,
    "lr_scheduler_type": "constant",
    "export_dtype": "float32",
    "prefix_sharing": "off",
    "batch": 4,
}


@pytest.fixture(scope="module")
def trained(dpo_case: TrainCase) -> TrainCase:
    single = FLAGS | {"single_gpu_mode": True}
    commands = [
        dpo_case.command("bf16_sharded", **FLAGS),
        dpo_case.command("bf16_single", **single, profile_steps=[2, 3]),
        dpo_case.command("bf16_resumed", **single | {"max_train_steps": 2}),
        dpo_case.command("bf16_resumed", **single),
        dpo_case.command("bf16_single_full", **single, activation_checkpointing="full"),
    ]
    run_ranks(1, JOB, commands=commands, ports=free_ports(len(commands)))
    return dpo_case


def exported(folder: Path) -> torch.Tensor:
    tensors = [
        tensors for file in sorted(folder.glob("*.safetensors")) for tensors in [load_file(file)]
    ]
    return torch.cat([part[name].float().flatten() for part in tensors for name in sorted(part)])


def test_small_updates_are_not_lost(trained: TrainCase) -> None:
    before, after = exported(trained.model), exported(trained.folder / "bf16_single" / "hf_model")
    moved = (before != after).float().mean().item()
    in_bfloat16 = (before.bfloat16() != after.bfloat16()).float().mean().item()
    # Embeddings of tokens that the rows do not have never move.
    assert moved > 0.8 and in_bfloat16 < 0.2, (moved, in_bfloat16)


@pytest.mark.parametrize("name", ["bf16_single", "bf16_single_full"])
def test_run_on_one_device_is_that_of_float32_shards(trained: TrainCase, name: str) -> None:
    for ours, theirs in zip(
        trained.trajectory(name), trained.trajectory("bf16_sharded"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-6)
    ours, theirs = (exported(trained.folder / run / "hf_model") for run in (name, "bf16_sharded"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def test_resumed_run_is_bitwise_the_run_that_was_not_stopped(trained: TrainCase) -> None:
    assert trained.trajectory("bf16_resumed") == trained.trajectory("bf16_single")
    assert trained.weights_digest("bf16_resumed") == trained.weights_digest("bf16_single")


def test_profiled_steps_leave_a_trace(trained: TrainCase) -> None:
    (trace,) = (trained.folder / "bf16_single" / "profiler").glob("rank-0-step-*.json.gz")
    names = {
        event.get("name", "")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert {"ProfilerStep#1", "ProfilerStep#2"} <= names and "ProfilerStep#3" not in names, (
        "counted from 0"
    )
    assert any("AdamW" in name for name in names)
    assert "aten::embedding" in names


def test_grpo_is_the_run_of_float32_shards(grpo_case: GRPOCase) -> None:
    flags = {"beta": 0.05, "num_mini_batches": 2, "param_dtype": "bfloat16", "learning_rate": 5e-7}
    cases = {
        "sharded": grpo_case.case("bf16_sharded", flags=flags),
        "single": grpo_case.case("bf16_single", flags=flags | {"single_gpu_mode": True}),
    }
    rows = grpo_case.run(run_ranks, 1, cases)
    assert all(row["has_moved"] for row in rows["single"])
    assert_same_trajectory(rows["single"], rows["sharded"])

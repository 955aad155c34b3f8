"""Gradients that are reduced once an update are those that are reduced after every microbatch."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase, RunRanks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

TENSOR, CONTEXT = {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}
FULL = {"activation_checkpointing": "full"}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp 2, clipped": {"max_grad_norm": 0.01},
        "fsdp 2, bfloat16": {"param_dtype": "bfloat16"},
        "tensor 2": TENSOR,
        "context 2, checkpointing": CONTEXT | FULL,
    },
    4: {
        "hsdp 2x2, checkpointing": {"fsdp_shard_degree": 2} | FULL,
        "replicas 4": {"fsdp_shard_degree": 1},
        "fsdp 2 x tensor 2, bfloat16": TENSOR | {"param_dtype": "bfloat16"},
        "tied, fsdp 4": {"model_name_or_path": "tied"},
    },
}


@pytest.mark.parametrize("num_ranks", CASES)
def test_point_of_reduction_changes_no_step(
    dpo_case: TrainCase, run_ranks: RunRanks, tmp_path: Path, num_ranks: int
) -> None:
    commands = []
    for name, flags in CASES[num_ranks].items():
        if "model_name_or_path" in flags:
            flags = flags | {
                "model_name_or_path": write_shallow_model(tmp_path / "tied", family="qwen3")
            }
        out = tmp_path / name
        out.mkdir()
        commands.append(dpo_case.command(name, output_dir=out, gradient_reduction="last", **flags))
    job = "tests.ranks.jobs.gradient_reduction:compare_each"
    of_ranks = run_ranks(num_ranks, job, cases=commands, ports=free_ports(len(commands)))
    for name, *of_case in zip(CASES[num_ranks], *of_ranks, strict=True):
        # Tensor ranks add up their gradients of norms in the dtype that they have: bfloat16, or
        # float32 if last.
        within = 1e-2 if "tensor 2, bfloat16" in name else 1e-6
        for result in of_case:
            assert result["difference"] < within, name
            last, every = result["norm"]
            assert last == pytest.approx(every, rel=within) and last > 1e-3, name
            assert result["leaves_nothing"], name
            last, every = result["reduce_scatters"]
            assert last < every or "replicas" in name or name.startswith("tensor"), name


def test_grpo_over_several_updates(grpo_case: GRPOCase, run_ranks: RunRanks) -> None:
    """Mini-batches, a reference, ranks without completions in the last step, and steps that are
    left out.
    """
    flags = {
        "beta": 0.05,
        "num_mini_batches": 2,
        "num_epochs": 2,
        "pack_length": 48,
        "optimizer": "skip_step_adamw",
    }
    cases = {
        when: grpo_case.case(when, flags=flags | {"gradient_reduction": when})
        for when in ("every", "last")
    }
    rows = grpo_case.run(run_ranks, 2, cases)
    for every, last in zip(rows["every"], rows["last"], strict=True):
        assert every["has_moved"] and every["grad_norm"] > 1e-3
        for name in ("loss", "grad_norm", "kl"):
            assert last[name] == pytest.approx(every[name], rel=1e-5, abs=1e-7), name

"""The loss and its gradient do not depend on how a global batch is cut, on what documents share, or
on the sharding.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.tiny_model import SIZES
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import OF_EVERY_RUN, STEPS_OF_AN_EPOCH, TrainCase, free_ports

pytestmark = pytest.mark.extended

RunRanks = Callable[..., list[Any]]

# What the plan of a run on GPUs may choose.
NORMS_AND_MLP: dict[str, Any] = {
    "activation_checkpointing": "selected_modules",
    "activation_checkpointing_modules": [
        "blocks.*.*_norm",
        "blocks.*.attention.*_norm",
        "blocks.*.feed_forward",
    ],
}
JOB = "tests.ranks.jobs.train_runs:run_each"
# Under a constant rate the start of a longer run.
EPOCH: dict[str, Any] = {"max_train_steps": STEPS_OF_AN_EPOCH}


@pytest.fixture(scope="module")
def one_process(dpo_case: TrainCase) -> TrainCase:
    """Runs of one process: the trajectory that every other must follow, and other ways to cut its
    batches.
    """
    from tests.ranks.launch import run_ranks

    dpo_case = replace(dpo_case, own_flags=dpo_case.own_flags | {"lr_scheduler_type": "constant"})
    commands = [
        # Nothing shared here; by default all others share what pays.
        dpo_case.command("base", prefix_sharing="off"),
        dpo_case.command("shared", **EPOCH, prefix_sharing="on"),
        dpo_case.command("accumulated", **EPOCH, batch=2),
        dpo_case.command("one_pair_at_a_time", **EPOCH, batch=1),
        dpo_case.command("padded", **EPOCH, packing=False),
        dpo_case.command("padded_accumulated", **EPOCH, packing=False, batch=1),
        dpo_case.command("single_gpu_mode", **EPOCH, single_gpu_mode=True),
        dpo_case.command("init_on_cpu", **EPOCH, init_device="cpu"),
        dpo_case.command("checkpointed_full", **EPOCH, activation_checkpointing="full"),
        dpo_case.command(
            "checkpointed_modules", **EPOCH, activation_checkpointing="selected_modules"
        ),
        dpo_case.command("checkpointed_norms_and_mlp", **EPOCH, **NORMS_AND_MLP),
        *(
            dpo_case.command(f"start_{loss}", loss_type=loss, max_train_steps=1)
            for loss in ("dpo_norm", "ipo", "hinge", "wpo", "simpo")
        ),
        dpo_case.command("start_bf16", param_dtype="bfloat16", max_train_steps=1),
        *(
            dpo_case.command(f"optimizer_{name}", optimizer=name, weight_decay=0.1)
            for name in ("skip_step_adamw", "muon", "adamw")
        ),
    ]
    run_ranks(1, JOB, commands=commands, ports=free_ports(len(commands)))
    return dpo_case


def assert_same_trajectory(
    case: TrainCase, name: str, other: str = "base", rel: float = 1e-5
) -> None:
    ours, theirs = case.trajectory(name), case.trajectory(other)
    assert len(ours) in (STEPS_OF_AN_EPOCH, 5) and len(theirs) == 5
    for step, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        assert a == pytest.approx(b, rel=rel), f"{name} differs from {other} at step {step}"


def test_training_moves_the_loss(one_process: TrainCase) -> None:
    # Otherwise equal trajectories would prove nothing.
    losses = [loss for loss, _ in one_process.trajectory("base")]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    "name",
    [
        "shared",
        "accumulated",
        "one_pair_at_a_time",
        "padded",
        "padded_accumulated",
        "single_gpu_mode",
        "init_on_cpu",
        "checkpointed_full",
        "checkpointed_modules",
        "checkpointed_norms_and_mlp",
    ],
)
def test_cutting_does_not_matter(one_process: TrainCase, name: str) -> None:
    assert_same_trajectory(one_process, name)


def test_prompts_are_shared(one_process: TrainCase) -> None:
    """Otherwise it would prove nothing that it makes no difference."""
    shares = {
        name: [row["shared_fraction"] for row in one_process.metrics(name)]
        for name in ("base", "shared", "accumulated", "checkpointed_full", "padded")
    }
    assert all(share == 0 for share in shares["base"] + shares["padded"])
    assert all(
        share > 0.1
        for name in ("shared", "accumulated", "checkpointed_full")
        for share in shares[name]
    ), shares


def test_first_loss_is_that_of_the_reference(one_process: TrainCase) -> None:
    first = {
        name: one_process.metrics(f"start_{name}")[0]
        for name in ("dpo_norm", "ipo", "hinge", "wpo")
    }
    base = one_process.metrics("base")[0]
    assert base["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["dpo_norm"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["hinge"]["loss"] == pytest.approx(1.0, abs=5e-6)
    assert first["ipo"]["loss"] == pytest.approx(1 / (2 * 1.0) ** 2, rel=1e-5)
    # wpo weighs ln 2 by how likely the replies are: above nothing, below ln 2.
    assert 0 < first["wpo"]["loss"] < math.log(2)
    assert one_process.metrics("start_bf16")[0]["loss"] == pytest.approx(math.log(2), abs=1e-2)
    assert one_process.metrics("padded")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_every_optimizer_learns(one_process: TrainCase) -> None:
    for optimizer in ("skip_step_adamw", "muon", "adamw"):
        losses = [loss for loss, _ in one_process.trajectory(f"optimizer_{optimizer}")]
        assert losses[-1] < losses[0] - 0.005, optimizer


def test_metrics_have_the_names_scripts_read(one_process: TrainCase) -> None:
    names = OF_EVERY_RUN | {
        *(f"rewards/{name}" for name in ("chosen", "rejected", "margin", "accuracy")),
        *(f"logps/{name}" for name in ("chosen", "rejected")),
    }
    rows = one_process.metrics("base")
    assert all(set(row) == names for row in rows)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    num_tokens = [row["num_tokens"] for row in rows]
    assert num_tokens == sorted(num_tokens)
    assert all(row["padding_fraction"] == 0 for row in rows)
    assert all(row["padding_fraction"] > 0 for row in one_process.metrics("padded"))


def test_two_ranks(one_process: TrainCase, run_ranks: RunRanks) -> None:
    commands = [
        one_process.command("fsdp_2", ranks=2),
        one_process.command("replicas_2", ranks=2, **EPOCH, fsdp_shard_degree=1, batch=2),
        one_process.command(
            "gathered_ahead", ranks=2, **EPOCH, fsdp_prefetch_factor=1, **NORMS_AND_MLP
        ),
        one_process.command("tensor_2", ranks=1, **EPOCH, tensor_parallel_degree=2),
        one_process.command("context_2", ranks=1, **EPOCH, context_parallel_degree=2),
        one_process.command(
            "context_2_unshared",
            ranks=1,
            **EPOCH,
            batch=2,
            sequence_parallel_size=2,
            prefix_sharing="off",
        ),
        one_process.command(
            "context_2_full",
            ranks=1,
            **EPOCH,
            context_parallel_degree=2,
            activation_checkpointing="full",
        ),
    ]
    run_ranks(2, JOB, commands=commands, ports=free_ports(len(commands)))
    sharded = ("fsdp_2", "replicas_2", "gathered_ahead")
    for name in (*sharded, "tensor_2", "context_2", "context_2_unshared", "context_2_full"):
        assert_same_trajectory(one_process, name)
        # A policy that is its reference tells no pair apart, however its rows are computed.
        assert one_process.metrics(name)[0]["rewards/accuracy"] == 0


def test_four_ranks(one_process: TrainCase, run_ranks: RunRanks) -> None:
    commands = [
        one_process.command("fsdp_4", ranks=4, **EPOCH, packing=False),
        one_process.command(
            "context_2_replicas_2", ranks=2, **EPOCH, context_parallel_degree=2, fsdp_num_replicas=2
        ),
        one_process.command(
            "muon_hsdp_2x2",
            ranks=4,
            **EPOCH,
            fsdp_shard_degree=2,
            optimizer="muon",
            weight_decay=0.1,
        ),
    ]
    run_ranks(4, JOB, commands=commands, ports=free_ports(len(commands)))
    for name in ("fsdp_4", "context_2_replicas_2"):
        assert_same_trajectory(one_process, name)
    # What differs in the last bits of a gradient is, here and there, another bit of a bfloat16.
    assert_same_trajectory(one_process, "muon_hsdp_2x2", "optimizer_muon", rel=3e-5)


def test_rows_and_matrices_both_split(
    one_process: TrainCase, run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks need as many key-value heads."""
    monkeypatch.setitem(SIZES, "tiny", {**SIZES["tiny"], "num_key_value_heads": 4})
    model = write_shallow_model(tmp_path / "model", family="olmo2")
    case = replace(one_process, model=model, folder=tmp_path)
    degrees = {"tensor_parallel_degree": 2, "context_parallel_degree": 2}
    run_ranks(1, JOB, commands=[case.command("alone", prefix_sharing="off")], ports=free_ports(1))
    run_ranks(4, JOB, commands=[case.command("split", **EPOCH, **degrees)], ports=free_ports(1))
    assert_same_trajectory(case, "split", "alone")


def test_heads_that_cannot_be_shared_out(one_process: TrainCase, run_ranks: RunRanks) -> None:
    from tests.ranks.launch import RanksFailed

    degrees = {"tensor_parallel_degree": 2, "context_parallel_degree": 2}
    with pytest.raises(
        RanksFailed, match="= 4 does not divide the 4 query heads and 2 key-value heads"
    ):
        run_ranks(4, JOB, commands=[one_process.command("too_few", **degrees)], ports=free_ports(1))

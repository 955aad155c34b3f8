"""Models with layers of the gated delta rule train alike on every layout, and on DeepSpeed, and go
on bitwise.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from open_instruct.core.families import FAMILIES
from tests.ranks.launch import RanksFailed
from tests.ranks.launch import run_ranks as start
from tests.ranks.objective_rows import write_conversations
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_sft import sums_of_transformers
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.train_runs:run_each"
DELTA_FAMILIES = [name for name, family in FAMILIES.items() if family.delta is not None]
SAVES: dict[str, Any] = {"activation_checkpointing": "full", "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module", params=DELTA_FAMILIES)
def case(
    request: pytest.FixtureRequest, dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory
) -> TrainCase:
    folder: Path = tmp_path_factory.mktemp("delta")
    model = write_shallow_model(folder / "model", family=request.param)
    return replace(
        dpo_case, model=model, folder=folder, own_flags=dpo_case.own_flags | {"max_train_steps": 3}
    )


def test_every_layout_takes_the_same_steps(
    case: TrainCase, run_ranks: Callable[..., list[Any]]
) -> None:
    alone = [case.command("alone", batch=4, prefix_sharing="off")]
    two = [
        case.command("fsdp", ranks=2),
        *(
            case.command(f"zero_{s}", ranks=2, backend="deepspeed", deepspeed_stage=s)
            for s in (2, 3)
        ),
        case.command("whole", ranks=2, **SAVES),
        case.command("resumed", ranks=2, max_train_steps=2, **SAVES),
        case.command("resumed", ranks=2, **SAVES),
    ]
    four = [case.command("hsdp", ranks=4, fsdp_shard_degree=2)]
    for num_ranks, commands in ((1, alone), (2, two), (4, four)):
        codes = run_ranks(num_ranks, JOB, commands=commands, ports=free_ports(len(commands)))
        assert set(codes[0]) == {0}
    expected = case.trajectory("alone")
    assert expected[0][0] == pytest.approx(0.6931472, abs=1e-6) and expected[-1][0] < expected[0][0]
    for name in ("fsdp", "hsdp", "zero_2", "zero_3"):
        assert all(row["shared_fraction"] > 0.1 for row in case.metrics(name))
        for ours, theirs in zip(case.trajectory(name), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name
    assert case.trajectory("resumed")[-1] == case.trajectory("whole")[-1]
    assert case.weights_digest("resumed") == case.weights_digest("whole")
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        case.folder / "fsdp" / "hf_model", dtype=torch.float32
    )
    started = transformers.AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    moved = [
        not torch.equal(*pair)
        for pair in zip(exported.parameters(), started.parameters(), strict=True)
    ]
    assert all(moved)


def test_first_loss_of_real_conversations_is_that_of_transformers(case: TrainCase) -> None:
    write_conversations(case.folder / "conversations.jsonl", num_rows=NUM_ROWS, seed=1)
    sft = replace(case, rows=case.folder / "conversations.jsonl", own_flags={"max_train_steps": 1})
    command = sft.command("sft", per_device_train_batch_size=NUM_ROWS)
    start(1, JOB, commands=[command], ports=free_ports(1), entry="sft")
    sums = sums_of_transformers(sft, max_seq_length=192)
    (first,) = sft.metrics("sft")
    assert first["padding_fraction"] == 0
    assert first["loss"] == pytest.approx(
        sum(loss for _, loss, _ in sums) / sum(n for *_, n in sums), rel=1e-5
    )


def test_rows_and_matrices_are_split(case: TrainCase, run_ranks: Callable[..., list[Any]]) -> None:
    """Each rank walks whole rows for its heads, also where preferences share a prompt."""
    context, tensor = {"context_parallel_degree": 2}, {"tensor_parallel_degree": 2}
    flags: dict[str, dict[str, Any]] = {
        "context": context,
        "context_unshared": {
            "prefix_sharing": "off",
            "activation_checkpointing": "full",
            "batch": 4,
            **context,
        },
        "context_zero_3": {"backend": "deepspeed", "deepspeed_stage": 3, **context},
    }
    if "olmo_hybrid" in (case.model / "config.json").read_text():
        flags |= {
            "tensor": tensor,
            "tensor_full": {"activation_checkpointing": "full", "batch": 4, **tensor},
            "tensor_zero_1": {"backend": "deepspeed", "deepspeed_stage": 1, **tensor},
            "tensor_zero_3": {"backend": "deepspeed", "deepspeed_stage": 3, **tensor},
        }
    run_ranks(1, JOB, commands=[case.command("one", prefix_sharing="off")], ports=free_ports(1))
    commands = [case.command(name, **of_run) for name, of_run in flags.items()]
    run_ranks(2, JOB, commands=commands, ports=free_ports(len(commands)))
    assert all(row["shared_fraction"] > 0.1 for row in case.metrics("context"))
    for name in flags:
        for ours, theirs in zip(case.trajectory(name), case.trajectory("one"), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6), name


def test_adapters_where_matrices_are_split(
    case: TrainCase, run_ranks: Callable[..., list[Any]]
) -> None:
    degree = "tensor" if "olmo_hybrid" in (case.model / "config.json").read_text() else "context"
    lora = {"use_lora": "true", "lora_r": 4, "lora_target_modules": "all-linear"}
    run_ranks(1, JOB, commands=[case.command("lora", **lora)], ports=free_ports(1))
    split = case.command("lora_split", **lora, **{f"{degree}_parallel_degree": 2})
    run_ranks(2, JOB, commands=[split], ports=free_ports(1))
    assert case.trajectory("lora_split")[-1] == pytest.approx(case.trajectory("lora")[-1], rel=1e-5)


def test_heads_that_cannot_be_shared_out(case: TrainCase) -> None:
    with pytest.raises(
        RanksFailed,
        match=r"not divide .*key heads of its layers of the gated delta rule; .* 1 or 2",
    ):
        start(
            4, JOB, commands=[case.command("split", context_parallel_degree=4)], ports=free_ports(1)
        )


@pytest.mark.parametrize("case", ["qwen3_5_text"], indirect=True)
def test_matrices_that_are_one_are_not_split(case: TrainCase) -> None:
    with pytest.raises(RanksFailed, match="each head is in three places of in_proj_qkv"):
        start(
            2, JOB, commands=[case.command("split", tensor_parallel_degree=2)], ports=free_ports(1)
        )

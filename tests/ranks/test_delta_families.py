"""Models with layers of the gated delta rule train alike on every layout, and on DeepSpeed, and go on bitwise."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from open_instruct.families import FAMILIES
from tests.ranks.launch import RanksFailed
from tests.ranks.launch import run_ranks as start
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_sft import sums_of_transformers, write_conversations
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

JOB = "tests.ranks.jobs.train_runs:run_each"
DELTA_FAMILIES = [name for name, family in FAMILIES.items() if family.delta is not None]
SAVES: dict[str, Any] = {"activation_checkpointing": "full", "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module", params=DELTA_FAMILIES)
def case(request: pytest.FixtureRequest, dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    folder: Path = tmp_path_factory.mktemp("delta")
    model = write_shallow_model(folder / "model", family=request.param)
    return replace(dpo_case, model=model, folder=folder, own_flags=dpo_case.own_flags | {"max_train_steps": 3})


def test_every_layout_takes_the_same_steps(case: TrainCase, run_ranks: Callable[..., list[Any]]) -> None:
    alone = [case.command("alone", batch=4, prefix_sharing="off")]
    two = [
        case.command("fsdp", ranks=2),
        *(case.command(f"zero_{s}", ranks=2, backend="deepspeed", deepspeed_stage=s) for s in (2, 3)),
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
    exported = transformers.AutoModelForCausalLM.from_pretrained(case.folder / "fsdp" / "hf_model", dtype=torch.float32)
    started = transformers.AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    moved = [not torch.equal(*pair) for pair in zip(exported.parameters(), started.parameters(), strict=True)]
    assert all(moved)


def test_a_first_loss_of_real_conversations_is_that_of_transformers(case: TrainCase) -> None:
    write_conversations(case.folder / "conversations.jsonl", num_rows=NUM_ROWS, seed=1)
    sft = replace(case, rows=case.folder / "conversations.jsonl", own_flags={"max_train_steps": 1})
    command = sft.command("sft", per_device_train_batch_size=NUM_ROWS)
    start(1, JOB, commands=[command], ports=free_ports(1), entry="sft")
    sums = sums_of_transformers(sft, max_seq_length=192)
    (first,) = sft.metrics("sft")
    assert first["padding_fraction"] == 0
    assert first["loss"] == pytest.approx(sum(loss for _, loss, _ in sums) / sum(n for *_, n in sums), rel=1e-5)


def test_rows_are_split_between_ranks(case: TrainCase, run_ranks: Callable[..., list[Any]]) -> None:
    """Each walks the whole row for its heads, also where preferences share a prompt."""
    run_ranks(1, JOB, commands=[case.command("one", prefix_sharing="off")], ports=free_ports(1))
    context = {"context_parallel_degree": 2}
    commands = [
        case.command("context", **context),
        case.command("context_unshared", batch=4, prefix_sharing="off", activation_checkpointing="full", **context),
        case.command("context_zero_3", backend="deepspeed", deepspeed_stage=3, **context),
    ]
    run_ranks(2, JOB, commands=commands, ports=free_ports(len(commands)))
    assert all(row["shared_fraction"] > 0.1 for row in case.metrics("context"))
    for name in ("context", "context_unshared", "context_zero_3"):
        for ours, theirs in zip(case.trajectory(name), case.trajectory("one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"tensor_parallel_degree": 2}, "matrices of the gated delta rule.*are not split over ranks; use 1"),
        ({"context_parallel_degree": 4}, "does not divide .*key heads of its layers of the gated delta rule; .* 1 or 2"),
    ],
)
def test_layers_that_cannot_be_split(case: TrainCase, flags: dict[str, int], why: str) -> None:
    with pytest.raises(RanksFailed, match=why):
        start(max(flags.values()), JOB, commands=[case.command("split", **flags)], ports=free_ports(1))

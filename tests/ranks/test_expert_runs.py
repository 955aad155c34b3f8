"""A model with experts trains the same on every layout, resumed, recomputed, on DeepSpeed, and
beside adapters.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from open_instruct.core.errors import InputError
from tests.ranks.objective_rows import write_conversations
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_deepspeed import JOB as EITHER_JOB
from tests.ranks.test_deepspeed import a_run, of_stage
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.train_runs:run_each"
CONSTANT: dict[str, Any] = {"lr_scheduler_type": "constant", "max_train_steps": 3}
LORA: dict[str, Any] = {
    "use_lora": True,
    "lora_r": 8,
    "lora_alpha": 16,
    "learning_rate": 2e-4,
    **CONSTANT,
}


@pytest.fixture(scope="module")
def case(dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    folder: Path = tmp_path_factory.mktemp("experts")
    return replace(
        dpo_case, model=write_shallow_model(folder / "model", family="qwen3_moe"), folder=folder
    )


def balance_microbatches(case: TrainCase) -> TrainCase:
    """Of a model whose config.json asks for the balance loss."""
    file = case.model / "config.json"
    fields = json.loads(file.read_text()) | {
        "output_router_logits": True,
        "router_aux_loss_coef": 10.0,
    }
    file.write_text(json.dumps(fields))
    return case


@pytest.fixture(scope="module")
def runs(case: TrainCase) -> TrainCase:
    from tests.ranks.launch import run_ranks

    alone = [
        case.command("base", prefix_sharing="off", **CONSTANT),
        case.command("accumulated", batch=2, activation_checkpointing="full", **CONSTANT),
        case.command("single", single_gpu_mode=True, **CONSTANT),
        case.command("lora_base", **LORA),
    ]
    two = [
        case.command("fsdp", ranks=2, **CONSTANT),
        case.command("context", context_parallel_degree=2, **CONSTANT),
        case.command("stopped", ranks=2, **CONSTANT | {"max_train_steps": 2}),
        case.command("stopped", ranks=2, **CONSTANT),
        case.command("lora", ranks=2, **LORA),
    ]
    four = [
        case.command(
            "hsdp", ranks=4, fsdp_shard_degree=2, activation_checkpointing="full", **CONSTANT
        )
    ]
    for ranks, commands in ((1, alone), (2, two), (4, four)):
        run_ranks(ranks, JOB, commands=commands, ports=free_ports(len(commands)))
    zero = [
        a_run(case, f"zero_{stage}", of_stage(stage, **CONSTANT), readers=2) for stage in (1, 3)
    ]
    run_ranks(2, EITHER_JOB, runs=zero, ports=free_ports(len(zero)))
    return case


@pytest.mark.parametrize(
    "name", ["accumulated", "single", "fsdp", "context", "hsdp", "zero_1", "zero_3"]
)
def test_layout_changes_nothing(runs: TrainCase, name: str) -> None:
    expected = runs.trajectory("base")
    assert expected[-1][0] < expected[0][0] - 1e-3
    for ours, theirs in zip(runs.trajectory(name), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert all(
        1 < row["router/max_load"] < 4 and 1 < row["router/entropy"] < 2.08
        for row in runs.metrics(name)
    )


def test_resumed_run_is_bitwise_the_one_that_was_not_stopped(runs: TrainCase) -> None:
    assert runs.trajectory("stopped") == runs.trajectory("fsdp")
    assert runs.weights_digest("stopped") == runs.weights_digest("fsdp")


@pytest.mark.parametrize("name", ["base", "fsdp", "zero_3", "lora"])
def test_checkpoint_is_exported_as_the_run_exports(runs: TrainCase, name: str) -> None:
    assert runs.is_exported_again(name)


def test_adapters_stand_beside_attention_alone(runs: TrainCase) -> None:
    for ours, theirs in zip(runs.trajectory("lora"), runs.trajectory("lora_base"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    names = json.loads((runs.folder / "lora" / "adapter" / "adapter_config.json").read_text())[
        "target_modules"
    ]
    assert "q_proj" in names


def test_balance_loss_is_learned_beside_the_objective(
    case: TrainCase, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    """SFT on one process and on two.

    A step's is the mean over its microbatches; here all rows are alike.
    """
    rows = tmp_path / "rows.jsonl"
    write_conversations(rows, num_rows=NUM_ROWS, seed=1)
    rows.write_text(rows.read_text().splitlines(keepends=True)[0] * NUM_ROWS)
    model = write_shallow_model(tmp_path / "model", family="qwen3_moe")
    sft = replace(case, model=model, rows=rows, folder=tmp_path, own_flags={})
    rates = {**CONSTANT, "learning_rate": 1e-3, "per_device_train_batch_size": 1}
    run_ranks(
        1,
        JOB,
        commands=[sft.command("without", batch=1, **rates)],
        ports=free_ports(1),
        entry="sft",
    )
    balance_microbatches(sft)
    run_ranks(
        1, JOB, commands=[sft.command("alone", batch=1, **rates)], ports=free_ports(1), entry="sft"
    )
    run_ranks(
        2,
        JOB,
        commands=[sft.command("two", ranks=2, batch=1, **rates)],
        ports=free_ports(1),
        entry="sft",
    )
    for ours, theirs in zip(sft.metrics("two"), sft.metrics("alone"), strict=True):
        for name in ("loss", "grad_norm", "router/balance_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    loads = {name: sft.metrics(name)[-1]["router/max_load"] for name in ("without", "alone")}
    assert loads["alone"] < loads["without"]
    assert "router/balance_loss" not in sft.metrics("without")[0]


def test_balance_loss_of_a_step_does_not_depend_on_its_cut(
    case: TrainCase, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    """SFT on rows of unequal length, on 1, 2 and 4 ranks, in one microbatch a step or several."""
    write_conversations(tmp_path / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    model = write_shallow_model(tmp_path / "model", family="qwen3_moe")
    sft = balance_microbatches(
        replace(case, model=model, rows=tmp_path / "rows.jsonl", folder=tmp_path, own_flags={})
    )
    flags = CONSTANT | {"router_balance": "step"}
    cuts = {1: {"whole": 8, "cut": 2}, 2: {"two": 4, "two_cut": 2}, 4: {"four": 2, "four_cut": 1}}
    for ranks, batches in cuts.items():
        commands = [
            sft.command(name, ranks=ranks, batch=batch, **flags) for name, batch in batches.items()
        ]
        run_ranks(ranks, JOB, commands=commands, ports=free_ports(len(commands)), entry="sft")
    for name in (name for batches in cuts.values() for name in batches):
        for ours, expected in zip(sft.metrics(name), sft.metrics("whole"), strict=True):
            assert ours["router/balance_loss"] == pytest.approx(
                expected["router/balance_loss"], rel=1e-6
            ), name
            assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-6), name
            assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tensor_parallel_degree": 2}, "experts are not split over tensor parallel ranks"),
        ({"optimizer": "muon"}, "experts lie in stacks"),
        (
            {"use_lora": True, "lora_target_modules": ["q_proj", "up_proj"]},
            "experts have no adapters",
        ),
        ({"packing": False}, None),
    ],
)
def test_flags_that_experts_cannot_follow_are_refused(
    case: TrainCase, run_ranks: Callable[..., list[Any]], flags: dict[str, Any], words: str | None
) -> None:
    ranks = flags.get("tensor_parallel_degree", 1)
    command = case.command("refused", max_train_steps=1, **flags)
    if words is None:
        run_ranks(ranks, JOB, commands=[command], ports=free_ports(1))
        return
    with pytest.raises(Exception, match=words) as refused:
        run_ranks(ranks, JOB, commands=[command], ports=free_ports(1))
    assert InputError.__name__ in str(refused.value)

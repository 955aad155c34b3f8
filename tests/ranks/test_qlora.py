"""Adapters beside a base in 4 bits train alike on every layout, and a run leaves the policy that it
trained.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.lora.files import PREFIX, WEIGHTS_NAME
from open_instruct.models.nf4 import dequantize, quantize
from tests.ranks.launch import run_ranks as start
from tests.ranks.objective_rows import write_conversations
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_lora import LORA
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.train_runs:run_each"
QLORA: dict[str, Any] = LORA | {
    "use_qlora": "true",
    "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
}
FLAT = {"lr_scheduler_type": "constant", "activation_checkpointing": "full"}
LAYOUTS = ("single", "fsdp", "hsdp")


@pytest.fixture(scope="module")
def runs(dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    case = replace(
        dpo_case, folder=tmp_path_factory.mktemp("qlora"), own_flags=dpo_case.own_flags | QLORA
    )
    stored = write_shallow_model(case.folder / "model", family="olmo2", dtype="bfloat16")
    alone = [
        case.command("alone", **FLAT),
        case.command("single", single_gpu_mode="true", **FLAT),
        case.command("resumed", max_train_steps=3, **FLAT),
        case.command("resumed", **FLAT),
        replace(case, model=stored).command("rounded", param_dtype="bfloat16", max_train_steps=1),
    ]
    for num_ranks, commands in (
        (1, alone),
        (2, [case.command("fsdp", ranks=2, **FLAT)]),
        (4, [case.command("hsdp", ranks=4, fsdp_shard_degree=2, **FLAT)]),
    ):
        assert set(
            start(num_ranks, JOB, commands=commands, ports=free_ports(len(commands)))[0]
        ) == {0}
    return case


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(runs: TrainCase, layout: str) -> None:
    expected = runs.trajectory("alone")
    # The reference is the same base without adapters.
    assert expected[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert expected[-1][0] < 0.68
    for ours, theirs in zip(runs.trajectory(layout), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_resumed_run_is_bitwise_the_one_that_was_not_stopped(runs: TrainCase) -> None:
    assert runs.trajectory("resumed")[-2:] == runs.trajectory("alone")[-2:]
    assert runs.weights_digest("resumed") == runs.weights_digest("alone")


@pytest.mark.parametrize("name", ["alone", "fsdp", "hsdp", "rounded"])
def test_shards_are_in_4_bits_what_the_whole_is(runs: TrainCase, name: str) -> None:
    """The command reads each matrix whole, and rounds it once more."""
    assert runs.is_exported_again(name)


@torch.no_grad()
def test_export_is_the_base_of_4_bits_with_the_adapter(runs: TrainCase) -> None:
    from transformers import AutoModelForCausalLM

    base = CheckpointFiles.open(runs.model)
    adapter = load_file(runs.folder / "fsdp" / "adapter" / WEIGHTS_NAME)
    exported = AutoModelForCausalLM.from_pretrained(
        runs.folder / "fsdp" / "hf_model", dtype=torch.float32
    )
    rounded = set()
    for name, merged in exported.named_parameters():
        expected = base.read(name)
        if "_proj" in name:
            values = dequantize(*quantize(expected, torch.float32))
            rounded.add(name)
            assert 0.05 < (values - expected).norm() / expected.norm() < 0.12
            a_RI, b_OR = (
                adapter.get(PREFIX + name.replace("weight", f"lora_{half}.weight")) for half in "AB"
            )
            expected = values if a_RI is None else values + 2 * b_OR @ a_RI
        torch.testing.assert_close(merged, expected, atol=1e-6, rtol=0)
    assert len(rounded) == 2 * 7 and len(adapter) == 2 * 3 * 2


@torch.no_grad()
def test_exports_say_how_far_rounding_moved_the_base(
    runs: TrainCase, capsys: pytest.CaptureFixture[str]
) -> None:
    base = CheckpointFiles.open(runs.model)
    changes = {}
    for name in filter(lambda name: "_proj" in name, base):
        matrix = base.read(name)
        rounded = dequantize(*quantize(matrix, torch.float32))
        changes[name] = float((rounded - matrix).norm() / matrix.norm())
    largest = max(changes, key=lambda name: changes[name])
    mean = sum(changes.values()) / len(changes)
    assert runs.is_exported_again("fsdp")
    for said in (
        *((runs.folder / name / "run.log").read_text() for name in ("alone", "fsdp", "hsdp")),
        capsys.readouterr().out,
    ):
        words = " ".join(said.split())
        assert f"{len(changes)} matrices" in words and f"{mean:.2%} on average" in words
        assert f"{changes[largest]:.2%} at most ({largest})" in words


def test_adapter_learns_the_same_beside_the_rounded_base_in_full_precision(
    runs: TrainCase, tmp_path: Path
) -> None:
    """SFT of a model that has learned something, on two ranks: the losses of the 41st to 50th
    step.
    """
    rows = tmp_path / "rows.jsonl"
    write_conversations(rows, num_rows=4 * NUM_ROWS, seed=1)
    case = replace(runs, rows=rows, folder=tmp_path, own_flags={"num_epochs": 100})
    steps = {"ranks": 2, "max_train_steps": 50, "lr_scheduler_type": "constant"}
    commands = [case.command("trained", learning_rate=3e-3, **steps)]
    start(2, JOB, commands=commands, ports=free_ports(1), entry="sft")
    case = replace(case, model=tmp_path / "trained" / "hf_model")
    lora = LORA | {"lora_target_modules": "all-linear"}
    commands = [
        case.command("base", **lora, **steps),
        case.command("rounded", use_qlora="true", **lora, **steps),
    ]
    start(2, JOB, commands=commands, ports=free_ports(2), entry="sft")
    first, last = {}, {}
    for name in ("base", "rounded"):
        losses = [loss for loss, _ in case.trajectory(name)]
        first[name], last[name] = losses[0], sum(losses[-10:]) / 10
        assert last[name] < 0.95 * first[name]
    assert first["rounded"] > first["base"], "rounding costs something"
    assert last["rounded"] == pytest.approx(last["base"], rel=0.02)

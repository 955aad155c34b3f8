"""Adapters train alike on every layout; peft and transformers compute with what a run leaves what
the run computed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.nn.transformer import Transformer
from safetensors import safe_open
from safetensors.torch import load_file

from open_instruct.config.lora import LoRASection
from open_instruct.models.build import build_model
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import stream_load
from open_instruct.models.lora.adapters import disable_adapters, fill_adapter
from open_instruct.models.lora.files import BASE_FINGERPRINT, WEIGHTS_NAME, open_adapter
from open_instruct.models.lora.peft_config import CONFIG_NAME
from tests.ranks.grpo_case import GRPOCase, RunRanks
from tests.ranks.launch import RanksFailed
from tests.ranks.launch import run_ranks as start
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_distill import stored_otherwise
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.train_runs:run_each"
LORA: dict[str, Any] = {"use_lora": "true", "lora_r": 8, "lora_alpha": 16, "learning_rate": 2e-3}
FAMILIES = ("olmo2", "olmo3", "qwen2", "qwen3", "llama")
LAYOUTS = ("single", "fsdp", "tensor", "context", "hsdp", "fsdp_tensor")
IDS = torch.arange(6, 70).unsqueeze(0)


@pytest.fixture(scope="module")
def cases(dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainCase]:
    folder: Path = tmp_path_factory.mktemp("adapters")
    return {
        family: replace(
            dpo_case,
            model=write_shallow_model(folder / family, family=family, tie=family == "llama"),
            folder=folder / f"runs_{family}",
            own_flags=dpo_case.own_flags | LORA,
        )
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def runs(cases: dict[str, TrainCase]) -> dict[str, TrainCase]:
    case = cases["olmo2"]
    flat = {
        "lr_scheduler_type": "constant",
        "lora_dropout": 0.1,
        "activation_checkpointing": "full",
    }
    alone = [
        each.command("alone", max_train_steps=5 if each is case else 2) for each in cases.values()
    ]
    alone += [
        case.command("single", single_gpu_mode="true"),
        case.command("whole", **flat),
        case.command("resumed", max_train_steps=3, **flat),
        case.command("resumed", **flat),
        case.command(
            "again", adapter_name_or_path=case.folder / "alone" / "adapter", max_train_steps=1
        ),
    ]
    two = [
        case.command("fsdp", ranks=2),
        case.command("tensor", tensor_parallel_degree=2),
        case.command("context", context_parallel_degree=2),
        case.command("elastic", ranks=2, max_train_steps=3, lr_scheduler_type="constant"),
    ]
    four = [
        case.command("hsdp", ranks=4, fsdp_shard_degree=2),
        case.command("fsdp_tensor", ranks=2, tensor_parallel_degree=2),
        case.command("elastic", ranks=4, lr_scheduler_type="constant"),
    ]
    for num_ranks, commands in ((1, alone), (2, two), (4, four)):
        codes = start(num_ranks, JOB, commands=commands, ports=free_ports(len(commands)))
        assert set(codes[0]) == {0}
    commands = [
        replace(case, own_flags=LORA).command(
            "reward", ranks=2, max_train_steps=3, chat_template_name="tulu"
        )
    ]
    start(2, JOB, commands=commands, ports=free_ports(1), entry="reward_model")
    return cases


def adapter_of(case: TrainCase, name: str) -> dict[str, torch.Tensor]:
    return load_file(case.folder / name / "adapter" / WEIGHTS_NAME)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(runs: dict[str, TrainCase], layout: str) -> None:
    case = runs["olmo2"]
    expected = case.trajectory("alone")
    # The reference is the policy without adapters.
    assert expected[0][0] == pytest.approx(0.6931472, abs=1e-6)
    assert expected[-1][0] < 0.65
    with safe_open(case.folder / layout / "adapter" / WEIGHTS_NAME, framework="pt") as file:
        assert file.metadata()[BASE_FINGERPRINT] == CheckpointFiles.open(case.model).fingerprint, (
            "for who goes on from it"
        )
    for ours, theirs in zip(case.trajectory(layout), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    theirs = adapter_of(case, "alone")
    for name, ours in adapter_of(case, layout).items():
        # A first step of Adam has one length for all, also where a gradient is next to nothing.
        assert (ours - theirs[name]).norm() <= 1e-2 * theirs[name].norm()


def test_resumed_run_is_bitwise_the_one_that_was_not_stopped(runs: dict[str, TrainCase]) -> None:
    """What is left out of an adapter's inputs is drawn alike, also where blocks are computed
    again.
    """
    case = runs["olmo2"]
    assert case.trajectory("resumed")[-2:] == case.trajectory("whole")[-2:]
    assert abs(case.trajectory("whole")[1][1] - case.trajectory("alone")[1][1]) > 2e-4
    for name, values in adapter_of(case, "whole").items():
        assert torch.equal(adapter_of(case, "resumed")[name], values)


def test_run_goes_on_with_other_ranks_or_from_its_adapter(runs: dict[str, TrainCase]) -> None:
    case = runs["olmo2"]
    # Its first loss is not that of a model that is its own reference: that one has no adapter.
    assert case.trajectory("again")[0][0] < 0.65
    assert len(case.trajectory("elastic")) == 5
    config = json.loads((case.folder / "elastic" / "layout.json").read_text())
    assert config["shard_degree"] == 4


def test_checkpoint_holds_no_frozen_weight(runs: dict[str, TrainCase]) -> None:
    folder = runs["olmo2"].folder / "alone"
    index = json.loads((folder / "step5" / "index.json").read_text())["tensors"]
    assert index
    assert all("lora_" in name for name in index)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_and_transformers_compute_what_we_do(runs: dict[str, TrainCase], family: str) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    case = runs[family]
    adapter, merged = case.folder / "alone" / "adapter", case.folder / "alone" / "hf_model"
    base = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    plain = base(IDS).logits.log_softmax(-1)
    with_adapter = peft.PeftModel.from_pretrained(base, adapter)(IDS).logits.log_softmax(-1)
    ours = model_with_adapter(case.model, adapter)
    assert (with_adapter - plain).abs().max() > 1e-2
    torch.testing.assert_close(ours(IDS).log_softmax(-1), with_adapter, atol=1e-5, rtol=0)
    exported = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(
        exported(IDS).logits.log_softmax(-1), with_adapter, atol=1e-5, rtol=0
    )
    with disable_adapters(ours):
        torch.testing.assert_close(ours(IDS).log_softmax(-1), plain, atol=1e-5, rtol=0)


def model_with_adapter(folder: Path, adapter: Path) -> Transformer:
    hf_config = load_hf_config(str(folder))
    model, names = build_model(hf_config), TensorNames(hf_config)
    settings = json.loads((adapter / CONFIG_NAME).read_text())
    lora = LoRASection(use_lora=True, lora_r=settings["r"], lora_alpha=settings["lora_alpha"])
    start = open_adapter(adapter, model, names, lora)
    model.init_weights(device=torch.device("cpu"), max_seq_len=IDS.shape[1])
    files = CheckpointFiles.open(folder)
    stream_load(model, files, names)
    fill_adapter(model, lora, seed=0, start=start)
    return model


@torch.no_grad()
def test_reward_models_head_is_saved_with_its_adapter(runs: dict[str, TrainCase]) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    case = runs["olmo2"]
    folder = case.folder / "reward"
    base = AutoModelForSequenceClassification.from_pretrained(
        case.model, num_labels=1, dtype=torch.float32
    )
    merged = AutoModelForSequenceClassification.from_pretrained(
        folder / "hf_model", dtype=torch.float32
    )
    for model in (base, merged):
        model.config.pad_token_id = 0
    scored = peft.PeftModel.from_pretrained(base, folder / "adapter")(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, scored, atol=1e-5, rtol=0)
    assert case.is_exported_again("reward")
    # --chat_template_name's: an adapter by itself is talked to as it was trained.
    template = "chat_template.jinja"
    assert (folder / "adapter" / template).read_text() == (
        folder / "hf_model" / template
    ).read_text()


def test_run_goes_on_from_no_adapter_of_other_weights(
    runs: dict[str, TrainCase], tmp_path: Path
) -> None:
    case = runs["olmo2"]
    other = replace(
        case, model=write_shallow_model(tmp_path / "other", family="olmo2", seed=1), folder=tmp_path
    )
    folder = case.folder / "alone" / "adapter"
    commands = [other.command("refused", adapter_name_or_path=folder, max_train_steps=1)]
    with pytest.raises(RanksFailed, match="has other weights; give that model"):
        start(1, JOB, commands=commands, ports=free_ports(1))


def test_grpo_learns_the_same_on_every_layout(tmp_path: Path, run_ranks: RunRanks) -> None:
    """The reference is the policy without its adapters, and so is the teacher."""
    case = GRPOCase(tmp_path)
    flags = {
        "beta": 0.05,
        "num_mini_batches": 2,
        **{name: LORA[name] for name in ("use_lora", "lora_r")},
    }
    flags |= {"learning_rate": 2e-3, "teacher_kl_coef": 0.1}
    shared, apart = (
        {"teacher_model_name_or_path": each} for each in (case.model, stored_otherwise(case.model))
    )
    both = {"alone": flags | shared, "apart": flags | apart}
    alone, of_two_models = case.run(
        run_ranks, 1, {name: case.case(name, flags=own) for name, own in both.items()}
    ).values()
    assert alone[-1]["kl"] > 1e-3
    layouts = {
        "fsdp": {},
        "tensor": {"tensor_parallel_degree": 2},
        "context": {"context_parallel_degree": 2},
    }
    cases = {name: case.case(name, flags=flags | shared | own) for name, own in layouts.items()}
    of_two = case.run(run_ranks, 2, cases)
    for rows in (of_two_models, *of_two.values()):
        for ours, theirs in zip(rows, alone, strict=True):
            for name in ("loss", "grad_norm", "kl"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name
            # A sum of differences of either sign.
            assert ours["teacher_kl"] == pytest.approx(theirs["teacher_kl"], abs=5e-6)

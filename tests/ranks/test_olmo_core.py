"""A checkpoint that OLMo-core's own Trainer wrote, read into every kind of sharding here."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.transformer import TransformerConfig
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.token_dataset import load_token_dataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.model_folder import load_model_config
from open_instruct.models.open_files import open_files
from scripts.demo_data.pairs import write_synthetic_preferences
from tests.olmo_core_checkpoints import make_config
from tests.ranks.launch import run_ranks as start_ranks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_weights import (
    FSDP_2,
    FSDP_2_TP_2,
    FSDP_4,
    HSDP_2X2,
    JOB,
    RANGES,
    TP_2,
    UNSHARDED,
)
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports
from tests.unit.token_data import load_rows, turns, write_rows
from tests.unit.token_folders import label, write_token_folder

pytestmark = pytest.mark.extended


KIND: dict[str, Any] = {"kind": "olmo3", "vocab_size": 512}
RUNS = "tests.ranks.jobs.train_runs:run_each"
TRAINER = "tests.ranks.jobs.olmo_core_trainer:train_and_save"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of OLMo-core's Trainer on two ranks, with the tokenizer beside them."""
    folder = tmp_path_factory.mktemp("olmo_core")
    write_shallow_model(folder / "tokenizer", family="olmo2")
    num_tokens = len(load_tokenizer(str(folder / "tokenizer")))
    tokenizer = {"vocab_size": num_tokens, "eos_token_id": 1, "pad_token_id": 0}
    fields = {"dataset": {"tokenizer": tokenizer, "sequence_length": 256}}
    start_ranks(2, TRAINER, folder=str(folder), fields=fields, **KIND)
    return folder / "step10"


def test_weights_are_those_that_olmo_core_loads(saved: Path) -> None:
    stock = make_config("olmo3", vocab_size=512).build(init_device="cpu")
    load_model_and_optim_state(saved / "model_and_optim", stock)
    hf_config = load_model_config(saved)
    files = open_files(saved, hf_config)
    tensors = stock.state_dict()
    for name, hf_name in TensorNames(hf_config):
        assert torch.equal(files.read(hf_name), tensors[name]), name


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (1, [UNSHARDED]),
        (2, [FSDP_2, TP_2, RANGES]),
        (4, [FSDP_4, HSDP_2X2, FSDP_2_TP_2]),
    ],
)
def test_every_layout_reads_its_own_shards_alone(
    run_ranks: Any, saved: Path, tmp_path: Path, num_ranks: int, layouts: list[Any]
) -> None:
    cases = [
        {"folder": str(saved), "out": str(tmp_path / str(number)), "layout": layout}
        for number, layout in enumerate(layouts)
    ]
    for case in cases:
        case["export_dtype"] = "float32"
    of_ranks = run_ranks(num_ranks, f"{JOB}:import_and_export", cases=cases)
    for results in zip(*of_ranks, strict=True):
        assert [result["differing"] for result in results] == [[]] * num_ranks
        for result in results:
            assert result["num_bytes_read"] == result["num_local_params"] * 4


@torch.no_grad()
def logits_of_stock(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of OLMo-core's own model, as it opens a folder."""
    fields = json.loads((folder / "config.json").read_text())
    model = TransformerConfig.from_dict(fields["model"]).build(init_device="cpu")
    load_model_and_optim_state(folder / "model_and_optim", model)
    return model(ids)


def test_model_of_its_trainer_is_tuned_here_and_trained_on_there(
    run_ranks: Any, saved: Path, tmp_path: Path
) -> None:
    """DPO on two ranks, the last checkpoint in OLMo-core's form too, and OLMo-core's Trainer from
    there: logits are equal at every border.
    """
    rows = tmp_path / "rows.jsonl"
    write_synthetic_preferences(rows, num_rows=NUM_ROWS, seed=1)
    case = TrainCase(model=saved, rows=rows, folder=tmp_path, own_flags={"loss_type": "dpo"})
    command = case.command("run", ranks=2, export_olmo_core="true", max_train_steps=3)
    codes = run_ranks(2, RUNS, commands=[command], ports=free_ports(1))
    assert codes == [[0], [0]]
    assert case.metrics("run")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    ours, theirs = tmp_path / "run" / "hf_model", tmp_path / "run" / "olmo_core_model"
    ids = (torch.arange(60) * 7 % 250).unsqueeze(0)
    tuned = logits_of_stock(theirs, ids)
    with torch.no_grad():
        exported = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(tuned, exported, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(tuned, logits_of_stock(saved, ids), atol=1e-4)
    fields = {"dataset": json.loads((theirs / "config.json").read_text())["dataset"]}
    on = tmp_path / "on"
    start = str(theirs / "model_and_optim")
    losses = run_ranks(2, TRAINER, folder=str(on), fields=fields, start=start, **KIND)
    # The first step's tokens, on both ranks, by the tuned model.
    rows_BT = torch.stack([torch.arange(16), torch.arange(7, 23)])
    logits = logits_of_stock(theirs, rows_BT)[:, :-1]
    expected = cross_entropy(logits.flatten(0, 1), rows_BT[:, 1:].flatten())
    assert losses[0] == pytest.approx(float(expected), rel=1e-4)
    load_model_config(on / "step10")


def test_rows_in_parts_and_zero_take_the_same_steps_from_it(
    run_ranks: Any, saved: Path, tmp_path: Path
) -> None:
    """Context parallelism and ZeRO-3 read it as FSDP2 does."""
    rows = tmp_path / "rows.jsonl"
    write_synthetic_preferences(rows, num_rows=NUM_ROWS, seed=1)
    case = TrainCase(model=saved, rows=rows, folder=tmp_path, own_flags={"loss_type": "dpo"})
    commands = [
        case.command("fsdp_2", ranks=2, batch=2, max_train_steps=3),
        case.command("context_2", batch=4, max_train_steps=3, context_parallel_degree=2),
        case.command(
            "zero_3",
            ranks=2,
            batch=2,
            max_train_steps=3,
            backend="deepspeed",
            deepspeed_stage=3,
            activation_checkpointing="none",
        ),
    ]
    codes = run_ranks(2, RUNS, commands=commands, ports=free_ports(len(commands)))
    assert codes == [[0] * len(commands)] * 2
    expected = case.trajectory("fsdp_2")
    assert len(expected) == 3
    for name in ("context_2", "zero_3"):
        for ours, theirs in zip(case.trajectory(name), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name


def test_its_token_files_are_learned_as_the_rows_that_they_were_made_of(
    run_ranks: Any, saved: Path, tmp_path: Path
) -> None:
    """From its checkpoint, on two ranks, by whole conversations and by filled rows."""
    tokenizer = load_tokenizer(str(saved.parent / "tokenizer"))
    rows = write_rows(
        tmp_path / "rows.jsonl",
        *({"messages": turns(f"What is {n}?", "n" * (n % 5 + 1))} for n in range(NUM_ROWS)),
    )
    dataset, _ = load_rows(
        partial(load_token_dataset, SFTBuilder),
        rows,
        "1.0",
        tokenizer=tokenizer,
        template="simple_chat",
        max_seq_length=192,
        cache_dir=tmp_path / "cache",
    )
    documents = [label(document) for (document,) in dataset]
    tokens = write_token_folder(tmp_path / "tokens", documents, tokenizer=tokenizer)
    flags = {"chat_template_name": "simple_chat", "max_train_steps": 2}
    case = TrainCase(model=saved, rows=rows, folder=tmp_path, own_flags=flags)
    filled = {"packing_strategy": "bfd", "batch": 1, "max_train_steps": 1}
    commands = [
        case.command("rows", ranks=2),
        case.command("tokens", ranks=2, mixer_list=[tokens, "1.0"]),
        case.command("filled", ranks=2, **filled),
        case.command("filled_tokens", ranks=2, mixer_list=[tokens, "1.0"], **filled),
    ]
    codes = run_ranks(2, RUNS, commands=commands, ports=free_ports(len(commands)), entry="sft")
    assert codes == [[0] * len(commands)] * 2
    assert case.trajectory("tokens") == case.trajectory("rows")
    assert case.trajectory("filled_tokens") == case.trajectory("filled")

"""A model in both forms of checkpoints: there and back it stays what it was, and OLMo-core opens
it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.hf.convert_checkpoint import convert_checkpoint_to_hf
from olmo_core.nn.transformer import Transformer, TransformerConfig
from transformers import AutoModelForCausalLM

from open_instruct.commands.convert import main
from open_instruct.core.families import FAMILIES
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import build_hf_config, load_hf_config
from open_instruct.models.olmo_core.model_config import read_olmo_core_config
from open_instruct.models.stock_config import build_stock_config
from tests.olmo_core_checkpoints import make_config, write_checkpoint
from tests.ranks.shallow import write_shallow_model
from tests.refusals import refused
from tests.unit.small_models import hf_config

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
NO_FORM = {"qwen2", "qwen3_moe", "olmoe", "olmo_hybrid", "qwen3_5_text"}
CONFIG = Path("config.json")
BOTH_FORMS = sorted(FAMILIES.keys() - NO_FORM)


def open_stock(folder: Path) -> Transformer:
    """The model as OLMo-core itself opens the folder."""
    fields = json.loads((folder / "config.json").read_text())
    model = TransformerConfig.from_dict(fields["model"]).build(init_device="cpu")
    load_model_and_optim_state(folder / "model_and_optim", model)
    return model


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = CheckpointFiles.open(folder)
    return {name: files.read(name) for name in files}


@pytest.mark.parametrize(
    "family",
    ["olmo3", *(pytest.param(name, marks=pytest.mark.extended) for name in BOTH_FORMS)],
)
@torch.no_grad()
def test_model_stays_what_it_was_there_and_back(tmp_path: Path, family: str) -> None:
    start = write_shallow_model(tmp_path / "start", family=family, dtype="bfloat16")
    there, back = tmp_path / "olmo_core", tmp_path / "back"
    assert main([str(start), str(there)]) == 0
    assert main([str(there), str(back)]) == 0
    before, after = stored_tensors(start), stored_tensors(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], tensor), name
    read = load_hf_config(str(back)).to_dict()
    differing = {
        name: (value, read.get(name))
        for name, value in load_hf_config(str(start)).to_dict().items()
        if read.get(name) != value
    }
    assert differing.keys() <= {"bos_token_id", "initializer_range", "use_cache"}, differing
    assert (back / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    ids = (torch.arange(30) * 7 % 250).unsqueeze(0)
    theirs = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(open_stock(there)(ids), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.extended
def test_olmo_cores_own_converter_writes_the_same(tmp_path: Path) -> None:
    start = write_shallow_model(tmp_path / "start", family="olmo3", dtype="float32")
    main([str(start), str(tmp_path / "olmo_core")])
    fields = json.loads((tmp_path / "olmo_core" / "config.json").read_text())
    convert_checkpoint_to_hf(
        tmp_path / "olmo_core",
        tmp_path / "theirs",
        fields["model"],
        fields["dataset"]["tokenizer"],
        max_sequence_length=128,
        validate=False,
    )
    ours, theirs = stored_tensors(start), stored_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name][: len(tensor)]), name  # it cuts what no token has


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        *((family, PLAIN) for family in BOTH_FORMS),
        ("llama", LLAMA_3),
        ("olmo2", YARN),
        ("llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ("olmo3", {"full_attention": YARN, "sliding_attention": PLAIN}),
    ],
)
def test_config_stays_what_it_was_there_and_back(family: str, rope: dict[str, Any]) -> None:
    other = {"rope_parameters": rope, "max_position_embeddings": 512}
    config = build_hf_config(hf_config(family).to_dict() | other, CONFIG)
    fields = {
        "model": build_stock_config(config).as_config_dict(),
        "dataset": {"sequence_length": 512},
    }
    read = read_olmo_core_config(json.loads(json.dumps(fields)), "config.json")
    again = build_hf_config(dict(read.fields), CONFIG)
    assert build_stock_config(again) == build_stock_config(config)
    assert read.notes == ()
    assert again.max_position_embeddings == 512


@pytest.mark.parametrize("family", sorted(NO_FORM))
def test_family_that_olmo_core_lacks_is_refused(family: str) -> None:
    with refused("unsupported_model", None, FAMILIES[family].name):
        build_stock_config(hf_config(family))


def test_attention_factor_that_olmo_core_does_not_compute_is_refused() -> None:
    with refused("unsupported_model", None, "attention_factor"):
        build_stock_config(hf_config("olmo2", rope_parameters=YARN | {"attention_factor": 2.0}))


def test_checkpoint_of_olmo_core_needs_its_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step1", make_config("olmo2", n_layers=1))
    with refused("missing_flag", "tokenizer_name_or_path"):
        main([str(tmp_path / "step1"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_folders_are_the_first_words() -> None:
    with refused("stray_word", None, "FROM"):
        main(["--export_dtype", "float32"])

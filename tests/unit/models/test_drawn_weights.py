"""Weights that a seed draws in place of a checkpoint's: the same under every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.drawn_weights import BLOCK_ROWS, DrawnTensor
from open_instruct.models.load import stream_load
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.planning.subject.read_shape import model_shape
from open_instruct.run.first_look import check_models
from open_instruct.run.pretrained import open_pretrained
from tests.olmo_core_checkpoints import make_config, write_config
from tests.refusals import refused

SHAPE = (2 * BLOCK_ROWS + 40, 6)


def make_tensor(**fields: Any) -> DrawnTensor:
    usual = {"name": "w", "path": Path("config.json"), "shape": SHAPE, "seed": 1, "std": 0.02}
    return DrawnTensor(**(usual | fields))


@given(
    rows=st.tuples(st.integers(0, SHAPE[0]), st.integers(0, SHAPE[0])).map(sorted),
    columns=st.tuples(st.integers(0, SHAPE[1]), st.integers(0, SHAPE[1])).map(sorted),
)
def test_box_is_a_part_of_the_whole(rows: list[int], columns: list[int]) -> None:
    read = make_tensor().open()
    box = (slice(*rows), slice(*columns))
    assert torch.equal(read(box), read(())[box])


def test_values_follow_from_seed_and_name_and_are_cut_off() -> None:
    whole = make_tensor().open()(())
    assert torch.equal(whole, make_tensor().open()(()))
    for other in (make_tensor(seed=2), make_tensor(name="v")):
        assert not torch.equal(whole, other.open()(()))
    assert whole.abs().max() <= 0.06
    assert float(whole.std()) == pytest.approx(0.02, rel=0.05)
    assert len(whole.unique()) > 0.9 * whole.numel()
    assert torch.equal(make_tensor(shape=(5,), std=None).open()(()), torch.ones(5))
    assert torch.equal(make_tensor(shape=(5,)).open()(()), torch.zeros(5))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokenizer files and nothing else."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tokenizer") / "model", family="olmo2")
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def config_file(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """The config.json of an experiment, under another name."""
    num_tokens = len(load_tokenizer(str(tokenizer_folder)))
    write_config(tmp_path, make_config("olmo3", vocab_size=512), num_tokens=num_tokens)
    return (tmp_path / "config.json").rename(tmp_path / "olmo3_tiny.json")


def parse(tokenizer_folder: Path, config_file: Path, *words: str) -> DPOConfig:
    return parse_run(
        DPOConfig,
        [
            *("--model_name_or_path", str(tokenizer_folder), "--from_scratch"),
            *("--config_name", str(config_file), "--mixer_list", __file__, "1.0"),
            *("--output_dir", str(config_file.parent / "out"), "--max_seq_length", "128"),
            *words,
        ],
    )


def test_model_is_made_of_a_config_alone(tokenizer_folder: Path, config_file: Path) -> None:
    def load(*words: str) -> tuple[Any, str]:
        config = parse(tokenizer_folder, config_file, *words)
        check_models(config)
        pretrained = open_pretrained(config, config_file.parent / "out" / "hf_model")
        model = pretrained.build(init_device="cpu")
        model.init_weights(device=torch.device("cpu"), max_seq_len=64)
        stream_load(model, pretrained.files, pretrained.names)
        return model, pretrained.fingerprint

    model, fingerprint = load()
    again, same = load()
    other, different = load("--seed", "7")
    assert fingerprint == same != different
    assert (
        sum(each.numel() for each in model.parameters()) == model_shape(str(config_file)).num_params
    )
    for ours, repeated in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, repeated)
    assert not torch.equal(model.embeddings.weight, other.embeddings.weight)
    with torch.no_grad():
        assert model(torch.arange(6).unsqueeze(0)).isfinite().all()


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        ({}, ["--use_lora"], ("conflict", "from_scratch")),
        ({"init_method": "llama"}, [], ("unsupported_model", "from_scratch", "llama")),
        ({"embedding_init_std": 1.0}, [], ("unsupported_model", "from_scratch", "1.0")),
        ({"init_std": -1.0}, [], ("bad_model", None, "initializer_range")),
    ],
)
def test_what_is_not_drawn_is_refused(
    tokenizer_folder: Path,
    config_file: Path,
    change: dict[str, Any],
    words: list[str],
    expected: tuple[Any, ...],
) -> None:
    fields = json.loads(config_file.read_text())
    fields["model"].update(change)
    config_file.write_text(json.dumps(fields))
    config = parse(tokenizer_folder, config_file, *words)
    with refused(*expected):
        open_pretrained(config, config_file.parent / "out" / "hf_model")


def test_config_that_is_not_there_is_named(tokenizer_folder: Path, config_file: Path) -> None:
    config = parse(tokenizer_folder, config_file.with_name("none.json"))
    with refused("missing_file", "config_name", "none.json"):
        check_models(config)


def test_config_by_itself_is_read_from_scratch_alone(
    tokenizer_folder: Path, config_file: Path
) -> None:
    words = ["--model_name_or_path", str(tokenizer_folder), "--config_name", str(config_file)]
    words += ["--mixer_list", __file__, "1.0", "--output_dir", str(config_file.parent / "out")]
    with refused("unread_flag", "config_name", "--from_scratch"):
        validate_dpo(parse_run(DPOConfig, words))

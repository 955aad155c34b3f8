"""`open-instruct tiny-model`: checkpoints that everything else can be tried on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.cli import main
from open_instruct.commands.tiny_model import (
    SIZES,
    built_in_corpus,
    tiny_config,
    train_tokenizer,
    write_tiny_model,
)
from open_instruct.commands.tiny_model import (
    main as write_model,
)
from open_instruct.core.errors import EXIT_INPUT
from open_instruct.core.families import FAMILIES
from open_instruct.models.family import build_transformer_config
from open_instruct.models.hf.hf_config import load_hf_config
from tests.refusals import refused
from tests.tiers import num_examples

REPOSITORY = Path(__file__).resolve().parents[3]
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return train_tokenizer(built_in_corpus(), vocab_size=512)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_transformers_loads_and_generates(tmp_path: Path, family: str, tie: bool) -> None:
    folder = write_tiny_model(tmp_path / "new" / "model", family=family, tie=tie)
    assert {file.name for file in folder.iterdir()} == FILES
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family
    assert model.config.tie_word_embeddings is tie
    assert model.config.vocab_size >= len(tokenizer)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer("What is 2 + 2?", return_tensors="pt")
    assert (
        model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1]
        > prompt["input_ids"].shape[1]
    )
    build_transformer_config(load_hf_config(str(folder)))


@pytest.mark.extended
def test_all_that_a_newcomer_reads_is_what_was_written(tmp_path: Path) -> None:
    """In a process of its own, which imports transformers, and what transformers imports, for the
    first time.
    """
    command = [
        sys.executable,
        "-m",
        "open_instruct.cli",
        "tiny-model",
        str(tmp_path / "new"),
        "--family",
        "olmo2",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert (
        done.stderr == ""
        and done.stdout.startswith("wrote a random olmo2 model")
        and done.stdout.count("\n") == 1
    )


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    random_state = torch.get_rng_state()
    first, again, other = (
        (
            write_tiny_model(tmp_path / name, family="llama", seed=seed) / "model.safetensors"
        ).read_bytes()
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", 0.7), ("mini", 4), ("small", 50), ("base", 520)]
)
def test_sizes_are_what_they_say(size: str, millions: float) -> None:
    shape = SIZES[size]
    for family in ("olmo2", "olmo3", "llama"):
        config = tiny_config(family, shape, vocab_size=shape["vocab_size"], tie=False)
        assert build_transformer_config(config).num_params / 1e6 == pytest.approx(
            millions, rel=0.05
        )


@given(text=st.text())
@settings(max_examples=num_examples(80))
def test_any_text_round_trips(tokenizer: transformers.PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_text_makes_words(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode(" the answer")) < len(" the answer") / 2
    other = train_tokenizer(["xyzzy " * 50], vocab_size=300)
    assert len(other.encode(" xyzzy")) == 1


def test_chat_template(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    reply = {"role": "assistant", "content": "Hello!"}
    rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|><|system|>\nBe kind.\n<|user|>\nHi\n<|assistant|>\n"
    whole = tokenizer.apply_chat_template([*prompt, reply], tokenize=False)
    assert whole == rendered + "Hello!<|eos|>"
    longer = tokenizer.apply_chat_template(
        [*prompt, reply, prompt[1]], tokenize=False, add_generation_prompt=True
    )
    assert longer == whole + "\n<|user|>\nHi\n<|assistant|>\n"
    ids = tokenizer.encode(whole, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("is_first", [True, False])
def test_command(is_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "words.txt"
    text.write_text("plugh plugh plugh\n" * 20, encoding="utf-8")
    folder = tmp_path / "model"
    arguments = (
        f"--family olmo3 --size tiny --vocab_size 290 --seed 5 --text {text} "
        "--tie_word_embeddings true"
    )
    words = [*arguments.split(), "--dtype", "float16"]
    assert write_model([str(folder), *words] if is_first else [*words, str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["dtype"]) == (
        "olmo3",
        290,
        "float16",
    )
    assert config["tie_word_embeddings"] is True
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float16
    assert model.get_input_embeddings().weight.shape == (290, SIZES["tiny"]["hidden_size"])
    assert len(transformers.AutoTokenizer.from_pretrained(folder).encode(" plugh")) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "the first word is the folder to write"),
        ("--family llama", "the first word is the folder to write"),
        ("NEW", "missing: --family"),
        (
            "NEW --family gpt2",
            "--family takes one of olmo2, olmo3, qwen2, qwen3, qwen3_moe, olmoe, llama, "
            "olmo_hybrid, qwen3_5_text, not 'gpt2'",
        ),
        ("NEW --family llama --vocab_size 12", "--vocab_size 12: too small"),
        ("NEW --family llama --text /nowhere/at/all", "--text /nowhere/at/all: no such file"),
        ("FULL --family llama", "is not an empty folder"),
        ("FULL/file --family llama", "is not an empty folder"),
        ("FULL/file/below --family llama", "cannot be made a folder"),
    ],
)
def test_bad_arguments_end_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, problem: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    words = (
        arguments.replace("NEW", str(tmp_path / "new"))
        .replace("FULL", str(tmp_path / "full"))
        .split()
    )
    assert main(["tiny-model", *words]) == EXIT_INPUT
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_bad_arguments_of_the_function(tmp_path: Path) -> None:
    with refused("bad_value", "size", "huge"):
        write_tiny_model(tmp_path / "model", family="llama", size="huge")
    assert not (tmp_path / "model").exists()

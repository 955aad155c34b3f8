"""Damaged, odd and hostile model folders: a sentence that names the file, or a model; nothing in
them runs.
"""

import contextlib
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.templates.chat_templates import choose_chat_template
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.build import build_model
from open_instruct.models.export import export_hf
from open_instruct.models.export_checks import check_exportable
from open_instruct.models.family import build_transformer_config
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import INDEX_NAME, SINGLE_NAME, load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import find_parameter_shapes, stream_load
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.planning.subject.read_shape import model_shape
from open_instruct.run.first_look import check_paths
from open_instruct.run.pretrained import open_pretrained
from tests.refusals import refused
from tests.unit.models.test_checkpoint_files import write_indexed
from tests.unit.mutations import mutated, mutated_bytes
from tests.unit.token_data import encoded

FLAGS = ("--mixer_list", __file__, "1.0", "--output_dir", "out")

pytestmark = pytest.mark.usefixtures("one_thread")

CONVERSATION: Any = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_tiny_model(folder / "llama", family="llama")
    write_tiny_model(folder / "olmo3", family="olmo3")
    write_tiny_model(folder / "qwen3_moe", family="qwen3_moe")
    shutil.copytree(
        folder / "llama", folder / "indexed", ignore=shutil.ignore_patterns(SINGLE_NAME)
    )
    write_indexed(folder / "indexed", load_file(folder / "llama" / SINGLE_NAME))
    return folder


def copy_of(model: Path, tmp_path: Path) -> Path:
    """The small files are copied, the large ones linked, as the hub's cache does it: links are
    followed.
    """
    folder = Path(tmp_path, "model")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copyfile(file, folder / file.name)
    return folder


def refusal(read: Callable[[Path], None], folder: Path) -> str | None:
    try:
        read(folder)
    except InputError as error:
        return str(error)
    return None


def opened(folder: Path, *words: str) -> Any:
    config = parse_run(DPOConfig, [*FLAGS, "--model_name_or_path", str(folder), *words])
    return open_pretrained(config, folder / "x")


def test_chat_template_is_the_one_that_was_there_at_the_start(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }}")
    pretrained = opened(good / "llama", "--chat_template_name", str(file))
    file.unlink()
    assert pretrained.chat_template == "{{ messages[0]['content'] }}"
    assert opened(good / "llama").chat_template is None, "the tokenizer's own is exported as it is"


def read_config(folder: Path) -> None:
    config = load_hf_config(str(folder))
    if config.vocab_size <= 512 and config.hidden_size <= 128 and config.intermediate_size <= 256:
        model = build_model(config)
        check_exportable(TensorNames(config), find_parameter_shapes(model))
        for block in list(model.blocks.values())[:1]:
            block.attention.rope.warmup_cache(16, torch.device("cpu"))
    else:
        build_transformer_config(config)


def plan(folder: Path) -> None:
    assert model_shape(str(folder)).num_params > 0


def speak(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    chat = ChatFormat.choose(tokenizer, None)
    assert chat.fingerprint
    with contextlib.suppress(MalformedRow):
        encoded(chat, CONVERSATION)


def read_weights(folder: Path) -> None:
    files = CheckpointFiles.open(folder)
    for name in files:
        assert files.read(name).shape == files.shapes[name]


# Every value of a file is one that a person, a program or an enemy could have written.
CASES: list[tuple[str, str, Callable[[Path], None], int]] = [
    ("llama", "config.json", read_config, 100),
    ("olmo3", "config.json", read_config, 75),
    ("olmo3", "config.json", plan, 100),
    ("qwen3_moe", "config.json", read_config, 75),
    ("qwen3_moe", "config.json", plan, 100),
    ("llama", "generation_config.json", lambda folder: load_hf_config(str(folder)), 50),
    ("indexed", INDEX_NAME, read_weights, 100),
    ("llama", "tokenizer_config.json", speak, 50),
    ("llama", "tokenizer.json", speak, 30),
]


@pytest.mark.parametrize(("model", "file_name", "read", "num_cases"), CASES)
def test_any_json_value_is_read_or_refused_by_name(
    good: Path,
    tmp_path: Path,
    model: str,
    file_name: str,
    read: Callable[[Path], None],
    num_cases: int,
) -> None:
    folder = copy_of(good / model, tmp_path)
    value = json.loads((folder / file_name).read_text())
    refused = 0
    for seed in range(num_cases):
        (folder / file_name).write_text(json.dumps(mutated(value, random.Random(seed))))
        told = refusal(read, folder)
        refused += told is not None
        assert told is None or (re.search("model|config|template", told) and "\x1b" not in told), (
            seed,
            told,
        )
    assert 0 < refused < num_cases


@pytest.mark.parametrize(
    ("model", "file_name", "read"),
    [
        ("llama", "config.json", read_config),
        ("llama", SINGLE_NAME, read_weights),
        ("indexed", INDEX_NAME, read_weights),
    ],
)
def test_any_bytes_are_read_or_refused(
    good: Path, tmp_path: Path, model: str, file_name: str, read: Callable[[Path], None]
) -> None:
    folder = copy_of(good / model, tmp_path)
    whole = (folder / file_name).read_bytes()
    head, rest = whole[:4096], whole[4096:]  # the header, of weights
    refused = 0
    for seed in range(75):
        (folder / file_name).unlink()
        (folder / file_name).write_bytes(mutated_bytes(head, random.Random(seed)) + rest)
        told = refusal(read, folder)
        refused += told is not None
        assert told is None or "model" in told or "config.json" in told, (seed, told)
    assert refused > 0


ENTRY = b'"dtype": "F32", "shape": [2], "data_offsets": [0, 8]'


@pytest.mark.parametrize(
    ("in_place_of", "header", "told"),
    [
        (b"[0, 8]", b"[0.0, 8.0]", ("bad_model", None, "floating point")),
        (b"[2]", b"[-1, -2]", ("bad_model", None, "1")),
        (b"[2]", b"[1e400]", ("bad_model", None, "range")),
        (b"[2]", b"[true, 2]", ("bad_model", None, "damaged")),
        (b'"F32"', b'["F32"]', ("bad_model", None, "damaged")),
        (b"[2]", b"[" + b"9" * 5000 + b"]", ("bad_model", None, "range")),
        (ENTRY, b"[" * 100_000, ("bad_model", None, "damaged")),
        (b"[2]", b'[2], "shape": [1, 2]', ("bad_model", None, "duplicate field")),
        (b'"w"', b'"\\u001b[31m"', ("bad_model", None)),
    ],
)
def test_headers_that_json_allows_and_sense_does_not(
    tmp_path: Path, in_place_of: bytes, header: bytes, told: tuple[Any, ...]
) -> None:
    good = b'{"w": {' + ENTRY + b"}}"
    text = good.replace(in_place_of, header, 1)
    (tmp_path / SINGLE_NAME).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with refused(*told) as caught:
        CheckpointFiles.open(tmp_path)
    assert SINGLE_NAME in str(caught.value)


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "{folder}/outside.safetensors", "sub/in.safetensors", ".."]
)
def test_index_names_files_beside_it_alone(good: Path, tmp_path: Path, place: str) -> None:
    folder = copy_of(good / "indexed", tmp_path)
    first = "model-00001-of-00002.safetensors"
    shutil.copyfile(good / "indexed" / first, tmp_path / "outside.safetensors")
    index = json.loads((folder / INDEX_NAME).read_text())
    for name, file_name in index["weight_map"].items():
        if file_name == first:
            index["weight_map"][name] = place.format(folder=tmp_path)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with refused("bad_model", None, "safetensors files"):
        CheckpointFiles.open(folder)


def loaded(pretrained: Any) -> Any:
    model = pretrained.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=64)
    stream_load(model, pretrained.files, pretrained.names)
    return model


@pytest.mark.parametrize(
    ("value", "told"), [(math.inf, "inf"), (-math.inf, "inf"), (math.nan, "NaN")]
)
def test_weights_that_are_no_numbers_are_named(
    good: Path, tmp_path: Path, value: float, told: str
) -> None:
    folder = copy_of(good / "llama", tmp_path)
    tensors = load_file(folder / SINGLE_NAME)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    (folder / SINGLE_NAME).unlink()
    save_file(tensors, folder / SINGLE_NAME)
    with refused("input", None, "layers.1.mlp.up_proj.weight", told):
        loaded(opened(folder))


def test_fields_that_name_code_are_left_out(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loader of kernels or modules is reached, and an export does not hand the fields on."""

    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("a loader of foreign code was reached")

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", reached)
    monkeypatch.setattr(transformers.dynamic_module_utils, "get_class_in_module", reached)
    folder = copy_of(good / "llama", tmp_path)
    kernels = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal")
    named = {
        **dict.fromkeys((*kernels, "_experts_implementation"), "evil/kernel"),
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil/repo--evil.Model"},
        "_name_or_path": "evil/repo",
    }
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | named))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    evil = {"auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}}
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | evil | {"tokenizer_class": "Evil"})
    )
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    pretrained = opened(folder)
    pretrained.hf_config._attn_implementation = "evil/kernel"
    check_exportable(pretrained.names, find_parameter_shapes(build_model(pretrained.hf_config)))
    assert len(pretrained.tokenizer) == 512
    out = tmp_path / "out"
    export_hf(
        loaded(pretrained),
        pretrained.names,
        source_folder=folder,
        out_folder=out,
        dtype=torch.float32,
    )
    theta = {"rope_theta": fields["rope_parameters"]["rope_theta"]}  # as older readers look for it
    assert json.loads((out / "config.json").read_text()) == fields | theta
    assert not (out / "pytorch_model.bin").exists() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file_name", "old", "new", "told"),
    [
        (
            "config.json",
            '"vocab_size": 512',
            '"vocab_size": 512, "vocab_size": 513',
            ("unreadable_file", None, "'vocab_size'"),
        ),
        (
            "config.json",
            '"vocab_size": 512',
            f'"vocab_size": {"9" * 5000}',
            ("unreadable_file", None, "not JSON"),
        ),
        (
            "config.json",
            '"num_hidden_layers": 4',
            '"num_hidden_layers": 1000000000',
            ("bad_model", None, "num_hidden_layers", "1000000000"),
        ),
        (
            "config.json",
            '"num_attention_heads": 4',
            '"num_attention_heads": 0',
            ("bad_model", None, "num_attention_heads", "0"),
        ),
        (
            "config.json",
            '"dtype": "float32"',
            '"dtype": "load"',
            ("bad_model", None, "dtype = 'load'"),
        ),
        (
            "config.json",
            "{",
            '{"configuration_files": ["config.4.0.0.json"],',
            ("bad_model", None, "configuration_files"),
        ),
        (
            "config.json",
            "{",
            '{"per_layer_config": {"0": {"head_dim": 8}},',
            ("bad_model", None, "per_layer_config"),
        ),
        (
            "generation_config.json",
            "{",
            "[",
            ("unreadable_file", None, "generation_config.json", "2"),
        ),
        ("tokenizer.json", '"id": 2,', '"id": 2000000000,', ("bad_model", None, "2000000000")),
        (
            "tokenizer_config.json",
            '"chat_template": "',
            '"chat_template": 7, "x": "',
            ("bad_model", "chat_template_name", "not text"),
        ),
    ],
)
def test_refused_field_is_named_with_its_file(
    good: Path, tmp_path: Path, file_name: str, old: str, new: str, told: tuple[Any, ...]
) -> None:
    folder = copy_of(good / "llama", tmp_path)
    text = (folder / file_name).read_text()
    assert old in text
    (folder / file_name).write_text(text.replace(old, new, 1))
    with refused(*told):
        choose_chat_template(opened(folder).tokenizer, None)


@pytest.mark.parametrize(
    ("place", "kind"), [("/dev/zero", "a device"), ("gone", "a link to nothing"), (None, "a FIFO")]
)
@pytest.mark.parametrize(
    "file_name",
    ["tokenizer_config.json", "chat_template.jinja", "added_tokens.json", "generation_config.json"],
)
def test_device_link_or_fifo_in_a_files_place_is_not_read(
    good: Path, tmp_path: Path, file_name: str, place: str | None, kind: str
) -> None:
    folder = copy_of(good / "llama", tmp_path)
    (folder / file_name).unlink(missing_ok=True)
    if place is None:
        os.mkfifo(folder / file_name)
    else:
        (folder / file_name).symlink_to(place)
    reads: list[Callable[[], Any]] = [
        lambda: load_tokenizer(str(folder)),
        lambda: load_hf_config(str(folder)),
        lambda: check_paths(parse_run(DPOConfig, [*FLAGS, "--model_name_or_path", str(folder)])),
    ]
    for read in reads:
        with refused("unreadable_file", None, file_name, kind):
            read()


def test_file_of_a_size_that_none_has_is_not_read(good: Path, tmp_path: Path) -> None:
    folder = copy_of(good / "llama", tmp_path)
    with (folder / "special_tokens_map.json").open("wb") as file:
        file.truncate(2**40)  # of which the disk has nothing
    with refused("unreadable_file", None, "special_tokens_map.json", "256"):
        load_tokenizer(str(folder))


def test_pattern_that_makes_the_library_panic_is_told_of(good: Path, tmp_path: Path) -> None:
    folder = copy_of(good / "llama", tmp_path)
    fields = json.loads((folder / "tokenizer.json").read_text())
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "((a+)+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    fields["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [pattern, fields["pre_tokenizer"]],
    }
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(str(folder))
    chat = ChatFormat.choose(tokenizer, None)
    with refused("bad_model", None, "tokenizer.json"):
        chat.tokenize([f"{'a' * 40}b"])


def test_token_that_the_model_has_no_row_for_is_refused(good: Path, tmp_path: Path) -> None:
    """Ids may have holes: as many tokens as the model has rows, and one of them far above."""
    folder = copy_of(good / "llama", tmp_path)
    fields = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    vocabulary[max(vocabulary, key=lambda token: vocabulary[token])] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    with refused("conflict", None, "5001"):
        opened(folder)

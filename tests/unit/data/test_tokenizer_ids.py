"""Token ids are those of the tokenizer.json, whatever class, settings or family stand beside it, or
it is refused.

The folders are small tokenizers of the kinds that people publish, each with another class in its
tokenizer_config.json.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from open_instruct.commands.tiny_model import built_in_corpus, train_tokenizer
from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES
from open_instruct.data.chat import ChatFormat
from open_instruct.data.templates.chat_templates import ChatTemplate
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.data.tokenizer_class import build_tokenizer_config, copy_tokenizer
from open_instruct.data.tokenizer_ids import WHITE_SPACE, find_other_ids
from open_instruct.generation.vllm_options import engine_environment
from tests.refusals import refused

BOS, EOS, CALL = "<|begin|>", "<|end|>", "<|call|>"
TEXT = f"{BOS}It's 1234567 o'clock,\n\n\tdef f(x):\n    return  x[10:]  # été, 漢字 👍🏽\n{EOS}"
DIGITS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)
METASPACE = normalizers.Replace(" ", "▁")


def train(pre_tokenizer: Any, *, normalizer: Any = None, byte_fallback: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=byte_fallback, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = (
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        if byte_fallback
        else decoders.ByteLevel()
    )
    alphabet = [] if byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    hex_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[BOS, EOS, *hex_bytes],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*built_in_corpus(), "1234567 123 456"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level, as GPT-2's": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte-level, three digits": lambda: train(DIGITS),
    "byte-level, with NFC": lambda: train(DIGITS, normalizer=normalizers.NFC()),
    "pieces with byte fallback": lambda: train(
        pre_tokenizers.Split(" ", "merged_with_previous"), normalizer=METASPACE, byte_fallback=True
    ),
}
CLASSES = (
    *(
        "LlamaTokenizerFast",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "Qwen2TokenizerFast",
        "GPTNeoXTokenizerFast",
    ),
    *("GemmaTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "Unheard", None),
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp("kind") for kind in KINDS}
    for kind, folder in folders.items():
        KINDS[kind]().save(str(folder / "tokenizer.json"))
    return folders


def write(
    folder: Path, settings: dict[str, Any], *, source: Path, family: str | None = "llama"
) -> Path:
    """A folder with the tokenizer.json of another, these settings, and the config.json of a
    family.
    """
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": BOS, "eos_token": EOS} | settings)
    )
    if family is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_file_whatever_class_is_named(
    kinds: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    right = (
        Tokenizer.from_file(str(kinds[kind] / "tokenizer.json"))
        .encode(TEXT, add_special_tokens=False)
        .ids
    )
    for number, name in enumerate(CLASSES):
        settings = {"tokenizer_class": name} if name else {}
        family = ("llama", "qwen2", "qwen3", "olmoe", None)[number % 5]
        folder = write(tmp_path / str(number), settings, source=kinds[kind], family=family)
        loaded = load_tokenizer(str(folder))
        assert loaded(TEXT, add_special_tokens=False)["input_ids"] == right, name
        assert loaded.backend_tokenizer.decode(right, skip_special_tokens=False) == TEXT
        assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 1)


def test_setting_that_changes_ids_is_refused_with_both_ids(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    """Of a large vocabulary beside a config.json without a version: transformers then splits
    otherwise.
    """
    folder = write(
        tmp_path,
        {"fix_mistral_regex": True},
        source=kinds["byte-level, as GPT-2's"],
        family="mistral",
    )
    assert load_tokenizer(str(folder))
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"unused{number}": len(vocabulary) + number for number in range(100_001)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with refused("bad_model", None, "tokenizer_config.json") as caught:
        load_tokenizer(str(folder))
    other, right = re.findall(r"\[([\d, ]+)\]", str(caught.value))
    of_engine = AutoTokenizer.from_pretrained(engine_folder(folder, tmp_path))
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = str(reference.encode(WHITE_SPACE, add_special_tokens=False).ids)
    assert right in ids and other not in ids
    assert str(of_engine(WHITE_SPACE, add_special_tokens=False)["input_ids"]) == ids
    change(folder, "tokenizer_config.json", fix_mistral_regex=False)
    assert load_tokenizer(str(folder))


def replaced(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


CHANGES: dict[str, Callable[[Tokenizer], Any]] = {
    "normalizer": lambda tokenizer: replaced(tokenizer, normalizer=normalizers.NFKC()),
    "pre-tokenizer": lambda tokenizer: replaced(
        tokenizer, pre_tokenizer=pre_tokenizers.ByteLevel()
    ),
    "decoder": lambda tokenizer: replaced(tokenizer, decoder=decoders.Metaspace()),
    "digits": lambda tokenizer: replaced(
        tokenizer,
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
        ),
    ),
    "added token": lambda tokenizer: tokenizer.add_tokens([AddedToken("\t", normalized=False)]),
    "model's setting": lambda tokenizer: setattr(tokenizer.model, "ignore_merges", False),
}


@pytest.mark.parametrize("change_made", CHANGES)
def test_every_part_that_is_otherwise_is_found(kinds: dict[str, Path], change_made: str) -> None:
    path = kinds["byte-level, as GPT-2's"] / "tokenizer.json"
    fields, loaded = json.loads(path.read_text()), Tokenizer.from_file(str(path))
    assert find_other_ids(loaded, fields) is None
    CHANGES[change_made](loaded)
    assert find_other_ids(loaded, fields)


FAMILY_NAMES = ("llama", "qwen3", "olmoe", "olmo2", "qwen3_5_text")


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_exports_and_engines_have_the_ids_of_the_file(
    kinds: dict[str, Path], kind: str, family: str, tmp_path: Path
) -> None:
    """Three classes each, so that every class meets every kind and every family."""
    raw = Tokenizer.from_file(str(kinds[kind] / "tokenizer.json"))
    first = 3 * list(KINDS).index(kind) + 2 * FAMILY_NAMES.index(family)
    for name in (CLASSES[(first + offset) % len(CLASSES)] for offset in range(3)):
        folder = write(
            tmp_path / "source", {"tokenizer_class": name}, source=kinds[kind], family=family
        )
        exported = build_tokenizer_config(folder, {"model_type": family})
        assert exported.get("tokenizer_class") != "TokenizersBackend", "transformers 4 has none"
        out = write(tmp_path / "out", exported, source=kinds[kind], family=family)
        for each in (out, engine_folder(folder, tmp_path)):
            reader = AutoTokenizer.from_pretrained(each)
            assert (
                reader(TEXT, add_special_tokens=False)["input_ids"]
                == raw.encode(TEXT, add_special_tokens=False).ids
            )
            assert reader("a b")["input_ids"] == raw.encode("a b").ids
            assert reader.decode(raw.encode("a , b").ids[1:]) == "a , b"


READ_BY_VLLM = """
import json, sys, time
from vllm.tokenizers import get_tokenizer
time.sleep = lambda seconds: sys.exit(f"it waits {seconds} s")
folders, text = json.load(sys.stdin)
ids = [get_tokenizer(folder).encode(text, add_special_tokens=False) for folder in folders]
print("\\n" + json.dumps(ids))
"""


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_reads_exports_with_the_ids_of_the_file(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    """In a process of its own: vLLM sets its process up when it is imported. An engine's folder
    gives them too, and vLLM does not wait for a file that is not there.
    """
    folders, expected = [], []
    for number, (kind, family) in enumerate(product(KINDS, FAMILY_NAMES)):
        name = CLASSES[number % len(CLASSES)]
        source = write(
            tmp_path / f"source{number}",
            {"tokenizer_class": name},
            source=kinds[kind],
            family=family,
        )
        exported = build_tokenizer_config(source, {"model_type": family})
        folders.append(
            str(write(tmp_path / f"out{number}", exported, source=kinds[kind], family=family))
        )
        raw = Tokenizer.from_file(str(kinds[kind] / "tokenizer.json"))
        expected.append(raw.encode(TEXT, add_special_tokens=False).ids)
    folders.append(str(engine_folder(source, tmp_path)))
    expected.append(expected[-1])
    done = subprocess.run(
        [sys.executable, "-c", READ_BY_VLLM],
        input=json.dumps([folders, TEXT]),
        env=os.environ | engine_environment(on_cuda=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def engine_folder(folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "engine"
    out.mkdir(exist_ok=True)
    copy_tokenizer(folder, out)
    return out


def test_class_of_the_source_stays_where_it_gives_the_same_ids(tmp_path: Path) -> None:
    train_tokenizer(built_in_corpus(), vocab_size=512, splits_as_qwen=True).save_pretrained(
        tmp_path
    )
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "Qwen2Tokenizer"
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    exported = build_tokenizer_config(tmp_path, {"model_type": "qwen3"})
    assert exported["tokenizer_class"] == "Qwen2Tokenizer"
    assert exported.keys() - {"additional_special_tokens"} == settings.keys() - {
        "extra_special_tokens"
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tokenizer_class": "TokenizersBackend"}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ({"extra_special_tokens": [CALL]}, {"additional_special_tokens": [CALL]}),
        (
            {"extra_special_tokens": [CALL, EOS], "additional_special_tokens": [EOS]},
            {"additional_special_tokens": [EOS, CALL]},
        ),
        ({"extra_special_tokens": {"call": CALL}}, {"extra_special_tokens": {"call": CALL}}),
    ],
)
def test_export_is_spelt_as_transformers_4_reads_it(
    kinds: dict[str, Path], tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    source = kinds["byte-level, three digits"]
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder = write(tmp_path / "own", plain | given, source=source, family="llama")
    exported = build_tokenizer_config(folder, {"model_type": "llama"})
    assert exported == {"bos_token": BOS, "eos_token": EOS} | plain | expected


def test_tokenizer_that_readers_replace_is_refused(kinds: dict[str, Path], tmp_path: Path) -> None:
    (family,) = (name for name, each in FAMILIES.items() if each.forces_tokenizer)
    folder = write(tmp_path / "own", {}, source=kinds["byte-level, three digits"], family=family)
    assert load_tokenizer(str(folder))
    with refused("bad_model", None, family):
        build_tokenizer_config(folder, {"model_type": family})


# --- special tokens, and what a file may say of them
# -----------------------------------------------------


def change(folder: Path, file_name: str, **fields: Any) -> None:
    path = folder / file_name
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | fields))


def added(content: str, token_id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


@pytest.mark.parametrize(
    ("file_name", "fields"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"650": added(CALL, 650)}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": BOS}}}),
        ("added_tokens.json", {CALL: 650}),
        ("added_tokens.json", {EOS: 0}),
        ("tokenizer.json", {"added_tokens": [added(BOS, 0), added(EOS, 1), added(CALL, 9000)]}),
        ("tokenizer.json", {"added_tokens": [added(BOS, 0), added(EOS, 5)]}),
    ],
)
def test_id_that_a_file_gives_a_token_is_its_id_or_refused(
    kinds: dict[str, Path], tmp_path: Path, file_name: str, fields: dict[str, Any]
) -> None:
    folder = write(tmp_path / "own", {}, source=kinds["byte-level, three digits"])
    change(folder, file_name, **fields)
    with pytest.raises(InputError, match=file_name) as refused:
        load_tokenizer(str(folder))
    assert refused.value.kind == "bad_model"


def test_token_that_a_file_adds_under_the_next_id_is_read(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder = write(tmp_path / "own", {}, source=kinds["byte-level, three digits"])
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    change(
        folder,
        "tokenizer_config.json",
        added_tokens_decoder={str(size): added(CALL, size) | {"id": None}},
    )
    decoder = {
        str(size): {name: value for name, value in added(CALL, size).items() if name != "id"}
    }
    change(folder, "tokenizer_config.json", added_tokens_decoder=decoder)
    assert load_tokenizer(str(folder))(CALL, add_special_tokens=False)["input_ids"] == [size]


@pytest.mark.parametrize(
    ("file_name", "fields", "named"),
    [
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens"),
        ("tokenizer.json", {"model": {"dropout": 0.1}}, "dropout"),
        (
            "tokenizer.json",
            {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
            "white space",
        ),
        (
            "tokenizer.json",
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}},
            "white space",
        ),
        ("tokenizer.json", {"normalizer": {"type": "Prepend", "prepend": " "}}, "as it is"),
    ],
)
def test_tokenizer_that_changes_a_text_is_refused(
    kinds: dict[str, Path], tmp_path: Path, file_name: str, fields: dict[str, Any], named: str
) -> None:
    folder = write(tmp_path / "own", {}, source=kinds["byte-level, three digits"])
    if "model" in fields:
        fields = {"model": json.loads((folder / file_name).read_text())["model"] | fields["model"]}
    change(folder, file_name, **fields)
    with pytest.raises(InputError, match=named):
        load_tokenizer(str(folder))


def test_truncation_and_padding_of_an_earlier_call_are_forgotten(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder = write(tmp_path / "own", {}, source=kinds["byte-level, three digits"])
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    right = raw.encode(TEXT * 3, add_special_tokens=False).ids
    raw.enable_truncation(max_length=4)
    raw.enable_padding(length=300)
    raw.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(str(folder))
    assert loaded.backend_tokenizer.encode(TEXT * 3, add_special_tokens=False).ids == right


def test_end_of_a_turn_that_is_spelt_out_in_letters_is_refused(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder = write(tmp_path / "own", {}, source=kinds["byte-level, three digits"])
    tokenizer = load_tokenizer(str(folder))
    tokenizer.split_special_tokens = True
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}"
    with pytest.raises(InputError, match="the end of a turn"):
        ChatFormat(tokenizer, ChatTemplate(name="own", text=template)).turn_end_token_ids()

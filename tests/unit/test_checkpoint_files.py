"""Damaged, foreign and awkward checkpoints: each is told apart by its headers and named in the message."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from open_instruct.checkpoints.background import in_background
from open_instruct.errors import InputError
from open_instruct.families import FAMILIES
from open_instruct.models.fingerprint import weights_fingerprint
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import INDEX_NAME, SINGLE_NAME
from open_instruct.models.hf.names import TensorNames, clean_name
from open_instruct.models.load import check_cover

HIDDEN, MLP, VOCAB = 4, 6, 8
LLAMA = SimpleNamespace(model_type="llama", num_hidden_layers=1, tie_word_embeddings=False)
HEAD = "lm_head.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def test_a_thread_that_saves_is_on_its_callers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on GPU 0: what it calls there would make a context of every rank on that one."""
    done: list[object] = []
    main = threading.main_thread()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0 if done else 5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: done.append((gpu, threading.current_thread() is main)))
    in_background(lambda: done.append("work")).result(timeout=60)
    assert done == [(5, False), "work"]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: None).result(timeout=60)


def llama_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": (MLP, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (MLP, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
        **{f"model.layers.0.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"},
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        HEAD: (VOCAB, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def expected_shapes(names: TensorNames) -> dict[str, tuple[int, ...]]:
    return {name: tuple(llama_tensors()[hf_name].shape) for name, hf_name in names}


def write_single(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    return folder


def write_indexed(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 2) -> dict[str, str]:
    weight_map = {}
    for number in range(num_files):
        part = dict(list(tensors.items())[number::num_files])
        file_name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        CheckpointFiles.open(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def not_covered(folder: Path, *words: str, config: SimpleNamespace = LLAMA) -> None:
    names = TensorNames(config)
    with CheckpointFiles.open(folder) as files, pytest.raises(InputError) as caught:
        check_cover(names, files, expected_shapes(names))
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("write", [write_single, write_indexed])
def test_slices_equal_what_was_written(tmp_path, dtype, write):
    tensors = llama_tensors(dtype)
    write(tmp_path, tensors)
    with CheckpointFiles.open(tmp_path) as files:
        assert set(files) == set(tensors)
        for name, tensor in tensors.items():
            assert (files.shapes[name], files.dtypes[name]) == (tuple(tensor.shape), dtype)
            assert torch.equal(files.read(name), tensor)
            assert torch.equal(files.read(name, (slice(1, 3),)), tensor[1:3])
        down = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(files.read(down, (slice(1, 4), slice(2, 5))), tensors[down][1:4, 2:5])


def test_writing_to_a_view_never_reaches_the_file(tmp_path):
    write_single(tmp_path, llama_tensors())
    before = (tmp_path / SINGLE_NAME).read_bytes()
    with CheckpointFiles.open(tmp_path) as files:
        files.read(HEAD).zero_()
    assert (tmp_path / SINGLE_NAME).read_bytes() == before


def test_empty_tensors_are_read(tmp_path):
    write_single(tmp_path, {"empty": torch.empty(0, 3), "full": torch.ones(2)})
    with CheckpointFiles.open(tmp_path) as files:
        assert files.read("empty", (slice(0, 0), slice(0, 3))).shape == (0, 3)


def test_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "not a folder")


def test_no_weights(tmp_path):
    refused(tmp_path, SINGLE_NAME, INDEX_NAME)


def test_pickle_is_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(tmp_path, "pickle", "convert")


def test_shards_without_their_index(tmp_path):
    write_indexed(tmp_path, llama_tensors())
    (tmp_path / INDEX_NAME).unlink()
    refused(tmp_path, "index is missing")


def test_index_is_not_json(tmp_path):
    write_indexed(tmp_path, llama_tensors())
    (tmp_path / INDEX_NAME).write_text("{not json")
    refused(tmp_path, INDEX_NAME, "not JSON")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_map(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    refused(tmp_path, INDEX_NAME, "weight_map")


def test_indexed_file_is_missing(tmp_path):
    write_indexed(tmp_path, llama_tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors", "missing")


def test_index_names_a_tensor_that_no_file_holds(tmp_path):
    weight_map = write_indexed(tmp_path, llama_tensors())
    weight_map["model.layers.7.ghost.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, "model.layers.7.ghost.weight", "model-00001-of-00002.safetensors")


def test_index_names_the_wrong_file(tmp_path):
    weight_map = write_indexed(tmp_path, llama_tensors())
    weight_map[HEAD] = next(name for name in weight_map.values() if name != weight_map[HEAD])
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, HEAD, weight_map[HEAD])


def test_file_holds_a_tensor_that_the_index_leaves_out(tmp_path):
    weight_map = write_indexed(tmp_path, llama_tensors())
    del weight_map[HEAD]
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, HEAD, INDEX_NAME)


def test_tensor_in_two_files(tmp_path):
    tensors = llama_tensors()
    write_indexed(tmp_path, tensors)
    second = {**dict(list(tensors.items())[1::2]), "model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    refused(tmp_path, "model.embed_tokens.weight", "two files")


@pytest.mark.parametrize("num_kept", [0, 5, 9, 200, -1])
def test_truncated_file(tmp_path, num_kept):
    write_single(tmp_path, llama_tensors())
    data = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).write_bytes(data[:num_kept])
    refused(tmp_path, SINGLE_NAME, "truncated")


def test_file_with_something_behind_it(tmp_path):
    write_single(tmp_path, llama_tensors())
    with (tmp_path / SINGLE_NAME).open("ab") as file:
        file.write(b"more")
    refused(tmp_path, SINGLE_NAME, "not fully covered", "damaged")


@pytest.mark.parametrize("garbage", [b"x" * 4096, b"\x10" + b"\0" * 7 + b"{not json at all}", b"PK\3\4" * 9])
def test_not_safetensors(tmp_path, garbage):
    (tmp_path / SINGLE_NAME).write_bytes(garbage)
    refused(tmp_path, SINGLE_NAME, "not a safetensors file")


def test_git_lfs_pointer(tmp_path):
    (tmp_path / SINGLE_NAME).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    refused(tmp_path, SINGLE_NAME, "git lfs pull")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "I4", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        7,
    ],
)
def test_header_that_contradicts_itself(tmp_path, entry):
    header = json.dumps({"weight": entry}).encode()
    (tmp_path / SINGLE_NAME).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 12)
    refused(tmp_path, SINGLE_NAME)


def test_missing_tensor(tmp_path):
    tensors = llama_tensors()
    del tensors[Q_PROJ]
    not_covered(write_single(tmp_path, tensors), Q_PROJ, "no tensor")


def test_missing_head_of_an_untied_model(tmp_path):
    tensors = llama_tensors()
    del tensors[HEAD]
    not_covered(write_single(tmp_path, tensors), HEAD, "no tensor")


def test_extra_tensor(tmp_path):
    tensors = {**llama_tensors(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(HIDDEN)}
    not_covered(write_single(tmp_path, tensors), "model.layers.0.self_attn.q_proj.bias", SINGLE_NAME)


def test_wrong_shape(tmp_path):
    tensors = {**llama_tensors(), Q_PROJ: torch.zeros(HIDDEN, HIDDEN + 1)}
    not_covered(write_single(tmp_path, tensors), Q_PROJ, f"({HIDDEN}, {HIDDEN + 1})", f"({HIDDEN}, {HIDDEN})")


def test_quantised_tensor(tmp_path):
    tensors = {**llama_tensors(), Q_PROJ: torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)}
    not_covered(write_single(tmp_path, tensors), Q_PROJ, "torch.int8", "quantised")


def test_many_problems_are_counted_not_listed(tmp_path):
    tensors = llama_tensors()
    not_covered(write_single(tmp_path, {HEAD: tensors[HEAD]}), "no tensor", "model.embed_tokens.weight", "and 7 more")


def test_complete_checkpoints_pass(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    tied = SimpleNamespace(**{**vars(LLAMA), "tie_word_embeddings": True})
    without_head = {name: tensor for name, tensor in llama_tensors().items() if name != HEAD}
    for number, (config, tensors) in enumerate(
        [(LLAMA, llama_tensors()), (LLAMA, {**llama_tensors(), **extra}), (tied, llama_tensors()), (tied, without_head)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        names = TensorNames(config)
        with CheckpointFiles.open(write_single(folder, tensors)) as files:
            check_cover(names, files, expected_shapes(names))


def test_tied_head_of_another_shape(tmp_path):
    tied = SimpleNamespace(**{**vars(LLAMA), "tie_word_embeddings": True})
    tensors = {**llama_tensors(), HEAD: torch.zeros(VOCAB + 1, HIDDEN)}
    not_covered(write_single(tmp_path, tensors), HEAD, f"expected ({VOCAB}, {HIDDEN})", config=tied)


def test_fingerprint_follows_the_bytes_alone(tmp_path):
    folders = [tmp_path / name for name in ("one", "same", "changed")]
    for folder in folders:
        folder.mkdir()
        write_indexed(folder, llama_tensors())
    file = folders[2] / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    prints = [weights_fingerprint(CheckpointFiles.open(folder)) for folder in folders]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("tie", [False, True])
# OLMo-core's own conversion knows no biases: those families are held against transformers' logits.
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.qkv_bias])
def test_names_agree_with_olmo_core(family, tie):
    convert = pytest.importorskip("olmo_core.nn.hf.convert")
    from olmo_core.nn.conversion.state_mapping import TemplatePlaceholder

    config = SimpleNamespace(model_type=family, num_hidden_layers=12, tie_word_embeddings=tie)
    names = TensorNames(config)
    mappings = convert.get_converter_from_hf(family).get_mappings(
        {hf_name: None for _, hf_name in names}, {TemplatePlaceholder.LAYER: config.num_hidden_layers}
    )
    theirs = {mapping.source_keys[0]: mapping.dest_keys[0] for mapping in mappings}
    assert theirs == {hf_name: name for name, hf_name in names}
    assert all(len(mapping.source_keys) == len(mapping.dest_keys) == 1 for mapping in mappings)
    assert [names.hf_name(name) for name in names.olmo_core_names] == [hf_name for _, hf_name in names]
    assert (HEAD in dict(names).values()) is not tie


def test_unknown_family_is_refused_by_name():
    with pytest.raises(InputError, match="mamba"):
        TensorNames(SimpleNamespace(model_type="mamba", num_hidden_layers=1, tie_word_embeddings=False))


def test_wrappers_are_stripped_from_names():
    wrapped = "_orig_mod.blocks.3._checkpoint_wrapped_module.feed_forward._orig_mod.w1.weight"
    assert clean_name(wrapped) == "blocks.3.feed_forward.w1.weight"

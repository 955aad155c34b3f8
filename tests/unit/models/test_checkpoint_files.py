"""Damaged, foreign and awkward checkpoints: each is told apart by its headers and named in the
message.
"""

import json
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from open_instruct.checkpoints.background import in_background
from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import INDEX_NAME, SINGLE_NAME
from open_instruct.models.hf.names import TensorNames, clean_name
from open_instruct.models.load import check_cover
from tests.refusals import refused

HIDDEN, MLP, VOCAB = 4, 6, 8
LLAMA = SimpleNamespace(model_type="llama", num_hidden_layers=1, tie_word_embeddings=False)
TIED = SimpleNamespace(model_type="llama", num_hidden_layers=1, tie_word_embeddings=True)
HEAD = "lm_head.weight"
Q_PROJ, Q_BIAS = (f"model.layers.0.self_attn.q_proj.{kind}" for kind in ("weight", "bias"))
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def test_thread_that_saves_is_on_its_callers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on GPU 0: what it calls there would make a context of every rank on that
    one.
    """
    done: list[object] = []
    main = threading.main_thread()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0 if done else 5)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: done.append((gpu, threading.current_thread() is main))
    )
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
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def expected_shapes(names: TensorNames) -> dict[str, tuple[int, ...]]:
    return {name: tuple(llama_tensors()[hf_name].shape) for name, hf_name in names}


def write_single(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    return folder


def write_indexed(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """In two files, of which `FIRST` has every second tensor from the first."""
    weight_map = {}
    for start, file_name in enumerate((FIRST, SECOND)):
        part = dict(list(tensors.items())[start::2])
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def is_refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        CheckpointFiles.open(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8]
)
@pytest.mark.parametrize("write", [write_single, write_indexed])
def test_slices_equal_what_was_written(tmp_path, dtype, write):
    tensors = llama_tensors(dtype)
    write(tmp_path, tensors)
    files = CheckpointFiles.open(tmp_path)
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
    files = CheckpointFiles.open(tmp_path)
    files.read(HEAD).zero_()
    assert (tmp_path / SINGLE_NAME).read_bytes() == before


def test_empty_tensors_are_read(tmp_path):
    write_single(tmp_path, {"empty": torch.empty(0, 3), "full": torch.ones(2)})
    files = CheckpointFiles.open(tmp_path)
    assert files.read("empty", (slice(0, 0), slice(0, 3))).shape == (0, 3)


def test_folder_without_weights_is_refused(tmp_path):
    is_refused(tmp_path / "nowhere", "nowhere", "not a folder")
    is_refused(tmp_path, SINGLE_NAME, INDEX_NAME)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    is_refused(tmp_path, "pickle", "convert")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{not json", "not JSON"),
        ("{}", "weight_map"),
        ('{"weight_map": [1]}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
    ],
)
def test_index_that_is_none(tmp_path, text, word):
    (tmp_path / INDEX_NAME).write_text(text)
    is_refused(tmp_path, INDEX_NAME, word)


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        # No file holds it.
        ("model.layers.7.ghost.weight", FIRST, ("model.layers.7.ghost.weight", FIRST)),
        (HEAD, FIRST, (HEAD, FIRST)),  # the other file holds it
        (HEAD, None, (HEAD, INDEX_NAME)),  # a file holds it, and the index leaves it out
    ],
)
def test_index_that_contradicts_its_files(tmp_path, name, file, words):
    weight_map = write_indexed(tmp_path, llama_tensors()) | {name: file}
    kept = {name: file for name, file in weight_map.items() if file is not None}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": kept}))
    is_refused(tmp_path, *words)


def test_files_that_contradict_their_index(tmp_path):
    tensors = llama_tensors()
    embeddings = "model.embed_tokens.weight"
    write_indexed(tmp_path, tensors)
    save_file(
        {**dict(list(tensors.items())[1::2]), embeddings: tensors[embeddings]}, tmp_path / SECOND
    )
    is_refused(tmp_path, embeddings, SECOND, "do not agree")
    (tmp_path / SECOND).unlink()
    is_refused(tmp_path, SECOND, "missing")
    (tmp_path / INDEX_NAME).unlink()
    is_refused(tmp_path, "index is missing")


@pytest.mark.parametrize("num_kept", [0, 5, 9, 200, -1])
def test_truncated_file(tmp_path, num_kept):
    write_single(tmp_path, llama_tensors())
    data = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).write_bytes(data[:num_kept])
    is_refused(tmp_path, SINGLE_NAME, "truncated")
    (tmp_path / SINGLE_NAME).write_bytes(data + b"more")
    is_refused(tmp_path, SINGLE_NAME, "not fully covered", "damaged")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x" * 4096, "not a safetensors file"),
        (b"\x10" + b"\0" * 7 + b"{not json at all}", "not a safetensors file"),
        (b"PK\3\4" * 9, "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "git lfs pull"),
    ],
)
def test_not_safetensors(tmp_path, content, words):
    (tmp_path / SINGLE_NAME).write_bytes(content)
    is_refused(tmp_path, SINGLE_NAME, words)


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
    is_refused(tmp_path, SINGLE_NAME)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({Q_PROJ: None}, (Q_PROJ, "no tensor")),
        ({HEAD: None}, (HEAD, "no tensor")),
        ({Q_BIAS: torch.zeros(HIDDEN)}, (Q_BIAS, SINGLE_NAME)),
        (
            {Q_PROJ: torch.zeros(HIDDEN, HIDDEN + 1)},
            (Q_PROJ, f"({HIDDEN}, {HIDDEN + 1})", f"({HIDDEN}, {HIDDEN})"),
        ),
        (
            {Q_PROJ: torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)},
            (Q_PROJ, "torch.int8", "quantised"),
        ),
        (
            dict.fromkeys(list(llama_tensors())[:-1]),
            ("no tensor", "model.embed_tokens.weight", "and 7 more"),
        ),
    ],
)
def test_tensors_that_the_model_has_not(tmp_path, changes, words):
    not_covered(tmp_path, LLAMA, changes, *words)


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("shape", [(2, 7, 4), (5000, 2, 4), (10**6, 0, 4), (4, 4)])
def test_tensor_that_packs_no_experts_is_itself(tmp_path, shape):
    name = f"{EXPERTS}.gate_up_proj"
    files = CheckpointFiles.open(write_single(tmp_path, {name: torch.zeros(shape)}))
    assert files.shapes == {name: shape}


def test_expert_that_is_there_twice(tmp_path):
    packed, alone = f"{EXPERTS}.down_proj", f"{EXPERTS}.1.down_proj.weight"
    write_single(tmp_path, {packed: torch.zeros(2, 4, 3), alone: torch.ones(4, 3)})
    is_refused(tmp_path, "twice", packed, alone)


def test_tied_head_of_another_shape(tmp_path):
    not_covered(
        tmp_path,
        TIED,
        {HEAD: torch.zeros(VOCAB + 1, HIDDEN)},
        HEAD,
        f"expected ({VOCAB}, {HIDDEN})",
    )


def not_covered(
    folder: Path, config: SimpleNamespace, changes: dict[str, torch.Tensor | None], *words: str
) -> None:
    tensors = {
        name: tensor for name, tensor in (llama_tensors() | changes).items() if tensor is not None
    }
    names = TensorNames(config)
    files = CheckpointFiles.open(write_single(folder, tensors))
    with pytest.raises(InputError) as caught:
        check_cover(names, files, expected_shapes(names))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_complete_checkpoints_pass(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    without_head = {name: tensor for name, tensor in llama_tensors().items() if name != HEAD}
    for number, (config, tensors) in enumerate(
        [
            (LLAMA, llama_tensors()),
            (LLAMA, {**llama_tensors(), **extra}),
            (TIED, llama_tensors()),
            (TIED, without_head),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        names = TensorNames(config)
        files = CheckpointFiles.open(write_single(folder, tensors))
        check_cover(names, files, expected_shapes(names))


def test_fingerprint_follows_the_bytes_alone(tmp_path):
    folders = [tmp_path / name for name in ("one", "same", "changed")]
    for folder in folders:
        folder.mkdir()
        write_indexed(folder, llama_tensors())
    file = folders[2] / SECOND
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    prints = [CheckpointFiles.open(folder).fingerprint for folder in folders]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("tie", [False, True])
# OLMo-core's own conversion knows no biases, and experts and layers that remember otherwise: these
# are held against transformers' logits.
@pytest.mark.parametrize(
    "family",
    [
        name
        for name, each in FAMILIES.items()
        if not (each.qkv_bias or each.expert_size or each.delta)
    ],
)
def test_names_agree_with_olmo_core(family, tie):
    convert = pytest.importorskip("olmo_core.nn.hf.convert")
    from olmo_core.nn.conversion.state_mapping import TemplatePlaceholder

    config = SimpleNamespace(model_type=family, num_hidden_layers=12, tie_word_embeddings=tie)
    names = TensorNames(config)
    mappings = convert.get_converter_from_hf(family).get_mappings(
        {hf_name: None for _, hf_name in names},
        {TemplatePlaceholder.LAYER: config.num_hidden_layers},
    )
    theirs = {mapping.source_keys[0]: mapping.dest_keys[0] for mapping in mappings}
    assert theirs == {hf_name: name for name, hf_name in names}
    assert all(len(mapping.source_keys) == len(mapping.dest_keys) == 1 for mapping in mappings)
    assert [names.hf_name(name) for name in names.olmo_core_names] == [
        hf_name for _, hf_name in names
    ]
    assert (HEAD in dict(names).values()) is not tie


def test_names_that_transformers_saves_are_read(tmp_path):
    """Those of Olmo-Hybrid's norms, and of the text part of a Qwen 3.5 that sees."""
    tensors = {
        "model.layers.0.attention_layer_norm.weight": torch.ones(2),
        "model.layers.0.feedforward_layer_norm.weight": torch.zeros(3),
        "model.language_model.norm.weight": torch.ones(4),
    }
    files = CheckpointFiles.open(write_single(tmp_path, tensors))
    assert files.shapes == {
        "model.layers.0.input_layernorm.weight": (2,),
        "model.layers.0.post_attention_layernorm.weight": (3,),
        "model.norm.weight": (4,),
    }
    assert torch.equal(files.read("model.norm.weight"), torch.ones(4))
    with refused("bad_model", None, "there twice"):
        CheckpointFiles.open(write_single(tmp_path, tensors | {"model.norm.weight": torch.ones(4)}))


def test_unknown_family_is_refused_by_name():
    with refused("unsupported_model", None, "mamba"):
        TensorNames(
            SimpleNamespace(model_type="mamba", num_hidden_layers=1, tie_word_embeddings=False)
        )


def test_wrappers_are_stripped_from_names():
    wrapped = "_orig_mod.blocks.3._checkpoint_wrapped_module.feed_forward._orig_mod.w1.weight"
    assert clean_name(wrapped) == "blocks.3.feed_forward.w1.weight"

"""Weights of a checkpoint that OLMo-core wrote: what is read of them, and what is never run."""

import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.distributed.checkpoint import save_state_dict
from olmo_core.nn.transformer import Transformer
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from open_instruct.core.errors import InputError
from open_instruct.models.build import build_model
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import check_cover, find_parameter_shapes, stream_load
from open_instruct.models.model_folder import load_model_config
from open_instruct.models.olmo_core.dcp_metadata import read_metadata
from open_instruct.models.open_files import open_files
from tests.olmo_core_checkpoints import (
    build_stock_model,
    make_config,
    scale_full_layers,
    write_checkpoint,
    write_config,
)
from tests.refusals import refused

CPU = torch.device("cpu")
WEIGHTS = "model_and_optim"
EMBEDDINGS = "embeddings.weight"


def load(folder: Path) -> Any:
    """The model here with the weights in a folder."""
    hf_config = load_model_config(folder)
    model = build_model(hf_config)
    model.init_weights(device=CPU, max_seq_len=64)
    names = TensorNames(hf_config)
    files = open_files(folder, hf_config)
    check_cover(names, files, find_parameter_shapes(model))
    stream_load(model, files, names, chunk_bytes=1000)
    return model


@pytest.mark.parametrize(
    "kind",
    [
        "olmo3 scaled",
        *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("olmo2", "olmo3")),
        *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("llama", "qwen3")),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_olmo_cores_own_model(tmp_path: Path, kind: str) -> None:
    config = make_config(kind.split()[0])
    if kind.endswith("scaled"):
        config = scale_full_layers(config)
    with torch.enable_grad():
        stock = write_checkpoint(tmp_path, config)
    ids = (torch.arange(40) * 7 % 250).unsqueeze(0)
    assert torch.equal(load(tmp_path)(ids), stock(ids))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    """A checkpoint of weights alone, and the model in it."""
    folder = tmp_path_factory.mktemp("saved")
    config = make_config("olmo2", n_layers=1)
    model = build_stock_model(config)
    write_config(folder, config)
    save_state_dict(folder / WEIGHTS, {"model": model.state_dict()})
    return folder, model


@pytest.fixture
def copied(saved: tuple[Path, Transformer], tmp_path: Path) -> Path:
    """A copy of the checkpoint, for what damages it."""
    folder, _ = saved
    for path in folder.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return tmp_path


def test_boxes_are_what_was_saved(saved: tuple[Path, Transformer]) -> None:
    folder, model = saved
    hf_config = load_model_config(folder)
    files = open_files(folder, hf_config)
    stored = model.state_dict()
    for name, hf_name in TensorNames(hf_config):
        whole = stored[name]
        assert (files.shapes[hf_name], files.dtypes[hf_name]) == (tuple(whole.shape), whole.dtype)
        assert torch.equal(files.read(hf_name), whole)
        box = tuple(slice(size // 3, size - 1) for size in whole.shape)
        assert torch.equal(files.read(hf_name, box), whole[box])


def test_tensors_in_chunks_are_joined(tmp_path: Path) -> None:
    """As ranks write them, each its own rows and columns, in 16 bits too."""
    whole = torch.arange(48, dtype=torch.bfloat16).view(6, 8)
    save_state_dict(tmp_path, {"model": {"w": whole[:2].clone(), "rest": whole[2:].clone()}})
    metadata = read_pickle(tmp_path)
    entry = metadata.state_dict_metadata["model.w"]
    other = metadata.state_dict_metadata.pop("model.rest")
    entry.size = torch.Size((6, 8))
    entry.chunks.append(
        ChunkStorageMetadata(offsets=torch.Size((2, 0)), sizes=other.chunks[0].sizes)
    )
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    index = next(index for index in metadata.storage_data if index.fqn == "model.w")
    moved = type(index)("model.w", torch.Size((2, 0)))
    metadata.storage_data = {index: places["model.w"], moved: places["model.rest"]}
    write_pickle(tmp_path, metadata)
    from open_instruct.models.olmo_core.saved_chunks import ChunkedTensor

    tensor = ChunkedTensor(path=tmp_path, saved=read_metadata(tmp_path)["w"])
    assert torch.equal(tensor.open()(()), whole)
    box = (slice(1, 5), slice(3, 7))
    assert torch.equal(tensor.open()(box), whole[box])
    assert tensor.open()((slice(2, 2), slice(0, 8))).shape == (0, 8)


def read_pickle(folder: Path) -> Any:
    """The metadata that this test wrote, to be changed."""
    return pickle.loads((folder / ".metadata").read_bytes())


def write_pickle(folder: Path, content: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


class Calls:
    """What calls a function with these arguments when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def plant_in_planner_data(folder: Path, command: str) -> bytes:
    metadata = read_pickle(folder)
    metadata.planner_data = {"model.w": Calls(os.system, command)}
    return pickle.dumps(metadata)


def name_through_module(folder: Path, command: str) -> bytes:
    """A module of the list, and a name that walks through what it imports."""
    words = (b"torch.distributed.checkpoint.metadata", b"os.system", command.encode())
    texts = [b"\x8c" + bytes([len(word)]) + word for word in words]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


PLANTS: dict[str, Callable[[Path, str], bytes]] = {
    "a function is called": lambda _, command: pickle.dumps(Calls(os.system, command)),
    "in protocol 0": lambda _, command: pickle.dumps(Calls(os.system, command), protocol=0),
    "a builtin": lambda _, command: pickle.dumps(
        Calls(eval, f"__import__('os').system({command!r})")
    ),
    "within good metadata": plant_in_planner_data,
    "a name through a module": name_through_module,
    "another name of a module": lambda _, command: pickle.dumps(Calls(torch.load, command)),
    "an old instance": lambda _, command: b"(S'" + command.encode() + b"'\nios\nsystem\n.",
    "a process": lambda _, command: (
        b"\x80\x02csubprocess\nPopen\nX"
        + len(command).to_bytes(4, "little")
        + command.encode()
        + b"\x85\x81."
    ),
    "an object elsewhere": lambda _, command: b"P" + command.encode() + b"\n.",
    "state of a class": lambda _, command: b"ctorch\nSize\n}X\x08\x00\x00\x00__dict__(K\x01tbb.",
}


@pytest.mark.parametrize("kind", PLANTS)
def test_metadata_that_could_run_code_is_refused(copied: Path, kind: str) -> None:
    canary = copied / "canary"
    planted = PLANTS[kind](copied / WEIGHTS, f"touch {canary}")
    list(pickletools.genops(planted))  # it is a pickle, which pickle.load would follow
    (copied / WEIGHTS / ".metadata").write_bytes(planted)
    with refused("bad_model", None, ".metadata"):
        open_files(copied, load_model_config(copied))
    assert not canary.exists()


def test_chunk_that_could_run_code_is_refused(copied: Path) -> None:
    canary = copied / "canary"
    folder = copied / WEIGHTS
    planted = folder / "planted.distcp"
    torch.save(Calls(os.system, f"touch {canary}"), planted)
    metadata = read_pickle(folder)
    for index, place in metadata.storage_data.items():
        if index.fqn == f"model.{EMBEDDINGS}":
            place.relative_path, place.offset, place.length = (
                planted.name,
                0,
                os.stat(planted).st_size,
            )
    write_pickle(folder, metadata)
    with refused("bad_model", None, planted.name, "posix.system"):
        files = open_files(copied, load_model_config(copied))
        files.read("model.embed_tokens.weight")
    assert not canary.exists()


def change_places(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            vars(place).update(fields)

    return change


def cut_chunk(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata[f"model.{EMBEDDINGS}"].chunks[0]
    chunk.sizes = torch.Size((7, chunk.sizes[1]))


def split_embeddings(*corners: tuple[int, int, int, int]) -> Callable[[Any], None]:
    """Chunks of the embeddings that begin at a row and a column, and have numbers of them."""

    def change(metadata: Any) -> None:
        name = f"model.{EMBEDDINGS}"
        index, place = next(item for item in metadata.storage_data.items() if item[0].fqn == name)
        del metadata.storage_data[index]
        entry = metadata.state_dict_metadata[name]
        num_rows, num_columns = entry.size
        entry.chunks = []
        for row, column, rows, columns in corners:
            start = torch.Size((row * num_rows // 4, column * num_columns // 4))
            size = torch.Size((rows * num_rows // 4, columns * num_columns // 4))
            entry.chunks.append(ChunkStorageMetadata(offsets=start, sizes=size))
            metadata.storage_data[type(index)(name, start)] = place

    return change


def drop_place(metadata: Any) -> None:
    metadata.storage_data.popitem()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (change_places(relative_path="../outside.distcp"), "bad_model", ["../outside.distcp"]),
        (change_places(relative_path="/etc/x.distcp"), "bad_model", ["/etc/x.distcp"]),
        (change_places(relative_path="gone.distcp"), "missing_file", ["gone.distcp"]),
        (change_places(length=10**12), "bad_model", ["__0_"]),
        (change_places(offset=-1), "bad_model", [".metadata"]),
        (change_places(transform_descriptors=["zstd"]), "bad_model", ["zstd"]),
        (cut_chunk, "bad_model", [EMBEDDINGS]),
        (
            # Quarters of the values, of which two lie over each other and one is missing.
            split_embeddings((0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 2), (1, 1, 2, 2)),
            "bad_model",
            [EMBEDDINGS, "each value once"],
        ),
        (split_embeddings((0, 0, 2, 4), (0, 0, 2, 4)), "bad_model", [EMBEDDINGS]),
        (drop_place, "bad_model", [".metadata"]),
        (lambda metadata: metadata.state_dict_metadata.clear(), "bad_model", ["model."]),
        (lambda metadata: vars(metadata).pop("storage_data"), "bad_model", [".metadata"]),
    ],
)
def test_metadata_that_contradicts_its_files_is_refused(
    copied: Path, change: Callable[[Any], None], kind: str, words: list[str]
) -> None:
    metadata = read_pickle(copied / WEIGHTS)
    change(metadata)
    write_pickle(copied / WEIGHTS, metadata)
    with pytest.raises(InputError) as caught:
        open_files(copied, load_model_config(copied))
    assert [problem.kind for problem in caught.value.problems] == [kind]
    for word in words:
        assert word in str(caught.value)


def test_chunks_that_are_damaged_are_refused(copied: Path) -> None:
    for path in (copied / WEIGHTS).glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    with refused("input", None, "fetch the checkpoint again"):
        load(copied)


def test_weights_that_are_no_numbers_are_named_as_olmo_core_does(tmp_path: Path) -> None:
    config = make_config("olmo2", n_layers=1)
    model = build_stock_model(config)
    with torch.no_grad():
        model.blocks["0"].feed_forward.w3.weight[3, 5] = torch.nan
    write_config(tmp_path, config)
    save_state_dict(tmp_path / WEIGHTS, {"model": model.state_dict()})
    with refused("input", None, "blocks.0.feed_forward.w3.weight", "NaN"):
        load(tmp_path)


def test_tensors_of_another_model_are_named_as_olmo_core_does(copied: Path) -> None:
    write_config(copied, make_config("olmo2", n_layers=2))
    with refused("bad_model", None, "blocks.1.attention.w_q.weight"):
        load(copied)


def test_fingerprint_is_of_the_weights(saved: tuple[Path, Transformer], copied: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return open_files(folder, load_model_config(folder)).fingerprint

    before = fingerprint(saved[0])
    assert fingerprint(copied) == before
    path = next((copied / WEIGHTS).glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert fingerprint(copied) != before

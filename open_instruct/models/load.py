"""Loads the weights of a checkpoint into shards: each rank reads the byte ranges of its own.

The steps, with a model that `build_model` made on the meta device and `parallelize` sharded::

    names = TensorNames(hf_config)
    files = CheckpointFiles.open(folder)
    check_cover(names, files, find_parameter_shapes(model))    # before anything is allocated
    report = stream_load(model, files, names)             # after the model is sharded
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from open_instruct.core.boxes import box_shape, complete_box
from open_instruct.core.errors import InputError
from open_instruct.models.build import find_not_finite
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.head_kinds import LM_HEAD
from open_instruct.models.hf.names import EMBEDDINGS, HF_LM_HEAD, TensorNames, is_harmless_extra
from open_instruct.models.nf4 import RoundingMeter, dequantize, find_rounding
from open_instruct.models.shards import LocalShard, find_local_shards
from open_instruct.parallel.process import gather_objects

CHUNK_BYTES = 8 * 2**20
QUANTIZING_BYTES = 16  # of a value: three float32 copies, and its code
LOADABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank read: bytes as stored on disk, parameters it holds a part of, seconds.

    `rounding` is of the whole model: of each matrix in 4 bits the relative change.
    """

    num_bytes_read: int
    num_tensors: int
    wall_time_s: float
    rounding: Mapping[str, float] = field(default_factory=dict)


def find_parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The full shape of every parameter by its OLMo-core name, of a meta or a sharded model."""
    shapes = {name: shard.shape for name, shard in find_local_shards(model).items()}
    if getattr(model, "tie_word_embeddings", False):
        shapes.pop(LM_HEAD, None)
    return shapes


def check_cover(
    names: TensorNames, files: CheckpointFiles, expected_shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the headers of a checkpoint fit the model that it will fill. Reads no tensor data.

    Args:
        names: of the model that config.json describes.
        files: the opened checkpoint.
        expected_shapes: the model's parameters, as `find_parameter_shapes` gives them.

    Raises:
        InputError: tensors are missing, extra, of another shape, or of a dtype that cannot be
            loaded; the message names the first few, with their file.
    """
    unmapped = sorted(set(expected_shapes) ^ set(names.olmo_core_names))
    assert not unmapped, f"the map of names does not fit the model: {unmapped[:MAX_NAMED]}"
    wanted = {hf_name: expected_shapes[name] for name, hf_name in names}
    if names.tied and HF_LM_HEAD in files:
        wanted[HF_LM_HEAD] = expected_shapes[EMBEDDINGS]
    if problem := find_cover_problem(files, wanted):
        raise InputError(
            f"{files.folder} {problem}. Is config.json of the same model?", kind="bad_model"
        )


def find_cover_problem(files: CheckpointFiles, wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Say how `files` differ from the wanted names and shapes; "" if they do not."""
    shapes = files.shapes
    dtypes = files.dtypes

    def locate(name: str) -> str:
        return f"(in {files.find_file(name).name})"

    missing = []
    other_shape = []
    other_dtype = []
    for name, shape in wanted.items():
        if name not in files:
            missing.append(files.spell(name))
            continue
        if shapes[name] != tuple(shape):
            expected = f"expected {tuple(shape)}"
            other_shape.append(f"{files.spell(name)} is {shapes[name]}, {expected} {locate(name)}")
        if dtypes[name] not in LOADABLE_DTYPES:
            other_dtype.append(f"{files.spell(name)} is {dtypes[name]} {locate(name)}")
    not_wanted = [name for name in files if name not in wanted and not is_harmless_extra(name)]
    extra = [f"{files.spell(name)} {locate(name)}" for name in not_wanted]
    not_loadable = (
        "holds a tensor whose dtype is not float32, float16 or bfloat16 (is it quantised? "
        "use the original):"
    )
    listed = (
        ("has no tensor", missing),
        ("holds a tensor that the model does not have:", extra),
        ("holds a tensor of another shape than the model's:", other_shape),
        (not_loadable, other_dtype),
    )
    return "; and it ".join(f"{problem} {list_some(names)}" for problem, names in listed if names)


def list_some(items: list[str]) -> str:
    """List the first items, and the number of further ones."""
    first = ", ".join(items[:MAX_NAMED])
    if len(items) <= MAX_NAMED:
        return first
    return f"{first} and {len(items) - MAX_NAMED} more"


@torch.no_grad()
def stream_load(
    model: nn.Module,
    files: CheckpointFiles,
    names: TensorNames,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> LoadReport:
    """Fill this rank's shards of `model` from `files`, cast to each parameter's dtype. Collective.

    Plain tensors and DTensors (FSDP, HSDP, tensor parallel, and together) are filled alike. Only
    `chunk_bytes` are held beside the shards. Ranks agree on the outcome, so an error is raised on
    all.

    Raises:
        InputError: a tensor in the files holds NaN or inf, or a separate head differs from the
            embeddings that it is tied to.
    """
    started_s = time.perf_counter()
    num_bytes_read = 0
    loaded = []
    unreadable: list[str] = []
    meter = RoundingMeter()
    for name, shard in find_local_shards(model).items():
        if names.tied and name == LM_HEAD:
            continue
        hf_name = names.hf_name(name)
        assert files.shapes[hf_name] == shard.shape, f"{name}: call check_cover first"
        try:
            for rows, stored in _read_chunks(shard, files, hf_name, chunk_bytes):
                shard.fill(rows, stored)
                if shard.scales is not None:
                    rounded = dequantize(shard.stored[rows], shard.scales[rows])
                    meter.add(hf_name, stored, rounded)
                num_bytes_read += stored.numel() * stored.element_size()
        except InputError as error:  # kept until all ranks are here
            unreadable.append(str(error))
        loaded.append(name)
    missed = set(names.olmo_core_names) - set(loaded)
    assert not missed, f"the model has no parameter {sorted(missed)[:MAX_NAMED]}"
    raise_together(unreadable)
    problems = [
        f"{files.find_file(names.hf_name(name))}: tensor {files.spell(names.hf_name(name))} holds "
        f"{value}: the checkpoint is damaged; fetch it again, or start from another"
        for name, value in find_not_finite(model).items()
    ]
    if names.tied and HF_LM_HEAD in files:
        problems += _check_tied_head(model, files, chunk_bytes)
    raise_together(problems)
    return LoadReport(
        num_bytes_read=num_bytes_read,
        num_tensors=len(loaded),
        wall_time_s=time.perf_counter() - started_s,
        rounding=find_rounding(gather_objects(meter.sums())),
    )


def _read_chunks(
    shard: LocalShard,
    files: CheckpointFiles,
    hf_name: str,
    chunk_bytes: int,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pairs of some rows of the shard and their values in the file.

    A chunk has at most `chunk_bytes`, but at least one row.
    """
    if shard.stored.numel() == 0:
        return
    shape = box_shape(shard.box)
    value_bytes = shard.stored.element_size() if shard.scales is None else QUANTIZING_BYTES
    row_bytes = math.prod(shape[1:]) * max(value_bytes, files.dtypes[hf_name].itemsize)
    num_rows = max(1, chunk_bytes // row_bytes)
    read = files.open_tensor(hf_name)
    slabs = None
    if shard.num_slabs > 1:
        slabs = shard.values(read(complete_box((), shard.shape)))
    for start in range(0, shape[0], num_rows):
        rows = slice(start, min(start + num_rows, shape[0]))
        yield rows, shard.read_rows(read, rows) if slabs is None else slabs[rows]


def _check_tied_head(model: nn.Module, files: CheckpointFiles, chunk_bytes: int) -> list[str]:
    """A problem if the file's lm_head differs from the embeddings, loaded in its place."""
    shard = find_local_shards(model)[EMBEDDINGS]
    pairs = _read_chunks(shard, files, HF_LM_HEAD, chunk_bytes)
    if all(torch.equal(shard.stored[rows], stored.to(shard.stored)) for rows, stored in pairs):
        return []
    return [
        f"{files.find_file(HF_LM_HEAD)}: {files.spell(HF_LM_HEAD)} differs from the embeddings, "
        "but config.json ties them: set tie_word_embeddings to false there to keep a head of "
        "its own"
    ]


def raise_together(
    problems: Iterable[str], *, kind: Callable[[str], Exception] = InputError
) -> None:
    """Raise one `kind` on every rank if any rank has a problem. Collective.

    So none waits for a rank that gave up.
    """
    distinct = list(dict.fromkeys(chain.from_iterable(gather_objects(list(problems)))))
    if distinct:
        raise kind("; ".join(distinct[:MAX_NAMED]))

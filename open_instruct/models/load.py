"""Weights from safetensors into shards: every rank reads the byte ranges of its own shards and
nothing else.

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

import torch
from torch import nn

from open_instruct.core.errors import InputError
from open_instruct.models.build import find_not_finite
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.head_kinds import LM_HEAD
from open_instruct.models.hf.names import EMBEDDINGS, HF_LM_HEAD, TensorNames, is_harmless_extra
from open_instruct.models.nf4 import RoundingMeter, dequantize, find_rounding
from open_instruct.models.shards import LocalShard, find_local_shards
from open_instruct.parallel.process import gather_objects

CHUNK_BYTES = 8 * 2**20
QUANTIZING_BYTES = 16  # a value, in float32 three times and its code
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
    """Full shape of every parameter by its OLMo-core name; works on meta and on sharded models."""
    shapes = {name: held.shape for name, held in find_local_shards(model).items()}
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
    """The difference between `files` and the wanted names and shapes, in words; "" if there is
    none.
    """
    shapes, dtypes = files.shapes, files.dtypes
    stored = [name for name in wanted if name in files]

    def where(name: str) -> str:
        return f"(in {files.find_file(name).name})"

    listed = {
        "has no tensor": [name for name in wanted if name not in files],
        "holds a tensor that the model does not have:": [
            f"{name} {where(name)}"
            for name in files
            if name not in wanted and not is_harmless_extra(name)
        ],
        "holds a tensor of another shape than the model's:": [
            f"{name} is {shapes[name]}, expected {tuple(wanted[name])} {where(name)}"
            for name in stored
            if shapes[name] != tuple(wanted[name])
        ],
        (
            "holds a tensor whose dtype is not float32, float16 or bfloat16 (is it quantised? "
            "use the original):"
        ): [
            f"{name} is {dtypes[name]} {where(name)}"
            for name in stored
            if dtypes[name] not in LOADABLE_DTYPES
        ],
    }
    problems = [f"{problem} {list_some(names)}" for problem, names in listed.items() if names]
    return "; and it ".join(problems)


def list_some(items: list[str]) -> str:
    """The first items, and the number of further ones."""
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return f"{', '.join(items[:MAX_NAMED])}{more}"


@torch.no_grad()
def stream_load(
    model: nn.Module, files: CheckpointFiles, names: TensorNames, *, chunk_bytes: int = CHUNK_BYTES
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
    meter = RoundingMeter()
    for name, held in find_local_shards(model).items():
        if names.tied and name == LM_HEAD:
            continue
        assert files.shapes[names.hf_name(name)] == held.shape, f"{name}: call check_cover first"
        for rows, stored in _read_chunks(held, files, names.hf_name(name), chunk_bytes):
            held.fill(rows, stored)
            if held.scales is not None:
                rounded = dequantize(held.stored[rows], held.scales[rows])
                meter.add(names.hf_name(name), stored, rounded)
            num_bytes_read += stored.numel() * stored.element_size()
        loaded.append(name)
    missed = set(names.olmo_core_names) - set(loaded)
    assert not missed, f"the model has no parameter {sorted(missed)[:MAX_NAMED]}"
    problems = [
        f"{files.find_file(names.hf_name(name))}: tensor {names.hf_name(name)} holds {value}: the "
        "checkpoint is damaged; fetch it again, or start from another"
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
    held: LocalShard, files: CheckpointFiles, hf_name: str, chunk_bytes: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pairs (some rows of the shard, their values in the file), of at most `chunk_bytes` but at
    least one row.
    """
    if held.stored.numel() == 0:
        return
    stored = held.values(files.read(hf_name))
    own_bytes = held.stored.element_size() if held.scales is None else QUANTIZING_BYTES
    row_bytes = math.prod(stored.shape[1:]) * max(own_bytes, files.dtypes[hf_name].itemsize)
    num_rows = max(1, chunk_bytes // row_bytes)
    for start in range(0, stored.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        yield rows, stored[rows]


def _check_tied_head(model: nn.Module, files: CheckpointFiles, chunk_bytes: int) -> list[str]:
    """A problem if the file's lm_head differs from the embeddings, which were loaded in its
    place.
    """
    held = find_local_shards(model)[EMBEDDINGS]
    pairs = _read_chunks(held, files, HF_LM_HEAD, chunk_bytes)
    if all(torch.equal(held.stored[rows], stored.to(held.stored)) for rows, stored in pairs):
        return []
    return [
        f"{files.find_file(HF_LM_HEAD)}: {HF_LM_HEAD} differs from the embeddings, but config.json "
        "ties them: set tie_word_embeddings to false there to keep a head of its own"
    ]


def raise_together(
    problems: Iterable[str], *, kind: Callable[[str], Exception] = InputError
) -> None:
    """Raise one `kind` on every rank if any rank has a problem, so that none waits for one that
    gave up. Collective.
    """
    distinct = list(
        dict.fromkeys(
            problem for rank_problems in gather_objects(list(problems)) for problem in rank_problems
        )
    )
    if distinct:
        raise kind("; ".join(distinct[:MAX_NAMED]))

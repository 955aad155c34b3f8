"""Reads which bytes of which files hold the tensors of a checkpoint of OLMo-core.

Its folder `model_and_optim` is in the format of `torch.distributed.checkpoint` (DCP): `.metadata`,
a pickle of records, says of each tensor its dtype, its shape and its chunks, and where in the
`.distcp` files each chunk lies. It is read as plain data (`plain_pickle.py`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from open_instruct.core.boxes import intersect_boxes
from open_instruct.core.errors import InputError
from open_instruct.models.olmo_core.dcp_names import METADATA_NAME, MODEL_PREFIX
from open_instruct.models.olmo_core.plain_pickle import Record, allow_names, read_pickle

MAX_METADATA_BYTES = 2**31
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
ALLOWED = allow_names(
    {
        "torch.distributed.checkpoint.metadata": (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "olmo_core.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "torch": ("Size", *DTYPES),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, and the bytes of a file that torch.save wrote of it.

    Example: the lower half of a matrix of four rows, `Chunk(start=(2, 0), size=(2, 3),
    path=Path("__1_0.distcp"), offset=0, num_bytes=1480)`.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor in a checkpoint, whose chunks are the whole of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, SavedTensor]:
    """The tensors of the model in the DCP `folder`, by OLMo-core's names.

    The state of an optimizer beside them is passed over.

    Raises:
        InputError: `.metadata` is missing, damaged, or a pickle that could run code; or chunks do
            not fit together, or name files that are not there.
    """
    path = folder / METADATA_NAME
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_METADATA_BYTES:
            raise InputError(
                f"{path} has {num_bytes:,} bytes, more than any checkpoint: fetch it again",
                kind="bad_model",
            )
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): fetch the whole checkpoint",
            kind="missing_file",
        ) from None
    metadata = read_pickle(content, ALLOWED, where=str(path))
    try:
        tensors = dict(_parse_tensors(metadata, folder))
    except InputError:
        raise
    # What a foreign file has may be of any type.
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} does not describe a checkpoint ({type(error).__name__}): fetch it again",
            kind="bad_model",
        ) from None
    if not tensors:
        raise InputError(
            f"{path} lists no tensor of a model (none begins with {MODEL_PREFIX!r}): a checkpoint "
            "of OLMo-core's Trainer is needed",
            kind="bad_model",
        )
    return tensors


def _parse_tensors(metadata: Record, folder: Path) -> Iterator[tuple[str, SavedTensor]]:
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, place in metadata.state["storage_data"].items():
        offset = index.state.get("offset")
        name = index.state["fqn"]
        if offset is not None and name.startswith(MODEL_PREFIX):
            places[name, _parse_size(offset)] = place
    sizes: dict[Path, int] = {}
    for name, entry in metadata.state["state_dict_metadata"].items():
        if not name.startswith(MODEL_PREFIX) or entry.name != "TensorStorageMetadata":
            continue
        chunks = []
        for chunk in entry.state["chunks"]:
            start = _parse_size(chunk.state["offsets"])
            size = _parse_size(chunk.state["sizes"])
            if math.prod(size):
                chunks.append(_parse_chunk(folder, name, start, size, places[name, start], sizes))
        shape = _parse_size(entry.state["size"])
        _check_chunks(folder, name, shape, chunks)
        dtype = DTYPES[entry.state["properties"].state[0].name]
        yield (
            name.removeprefix(MODEL_PREFIX),
            SavedTensor(dtype=dtype, shape=shape, chunks=tuple(chunks)),
        )


def _parse_size(size: Record) -> tuple[int, ...]:
    (numbers,) = size.arguments
    return tuple(_check_count(number) for number in numbers)


def _check_count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number


def _parse_chunk(
    folder: Path,
    name: str,
    start: tuple[int, ...],
    size: tuple[int, ...],
    place: Record,
    sizes: dict[Path, int],
) -> Chunk:
    """The chunk at `place`; `sizes` are those of the files that were looked at so far."""
    fields: Mapping[str, Any] = place.state
    file_name = fields["relative_path"]
    path = folder / file_name
    if path.name != file_name or path.suffix != ".distcp" or not file_name.isprintable():
        raise InputError(
            f"{folder / METADATA_NAME}: {name} is said to be in {file_name!r}; only names of "
            ".distcp files beside it may stand there: fetch the checkpoint again, from a source "
            "that you trust",
            kind="bad_model",
        )
    if fields.get("transform_descriptors"):
        raise InputError(
            f"{path}: {name} is compressed ({fields['transform_descriptors']!r}), which is not "
            "read: save the checkpoint without",
            kind="bad_model",
        )
    if path not in sizes:
        sizes[path] = _find_size(path)
    offset = _check_count(fields["offset"])
    num_bytes = _check_count(fields["length"])
    if offset + num_bytes > sizes[path]:
        raise InputError(
            f"{path} is shorter than {METADATA_NAME} says: fetch it again", kind="bad_model"
        )
    return Chunk(start=start, size=size, path=path, offset=offset, num_bytes=num_bytes)


def _find_size(path: Path) -> int:
    if not path.is_file():
        raise InputError(
            f"{path} is missing, but {METADATA_NAME} names it: fetch the checkpoint again",
            kind="missing_file",
        )
    return path.stat().st_size


def _check_chunks(folder: Path, name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """:raises InputError: the chunks of a tensor are not the whole of it, or overlap."""
    are_inside = all(
        len(chunk.size) == len(shape)
        and all(a + n <= whole for a, n, whole in zip(chunk.start, chunk.size, shape, strict=True))
        for chunk in chunks
    )
    num_values = sum(math.prod(chunk.size) for chunk in chunks)
    # Where none lie over each other, equal numbers leave no hole.
    if not are_inside or num_values != math.prod(shape) or _find_overlap(chunks) is not None:
        raise InputError(
            f"{folder / METADATA_NAME}: the chunks of {name} are not the whole of it, "
            f"{shape}, each value once: fetch the checkpoint again",
            kind="bad_model",
        )


def _find_overlap(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks of a tensor that have values in common, if there are any.

    In the order of their first rows, a chunk is compared with those alone that reach its first row.
    """
    reaching: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        if chunk.start:
            first_row = chunk.start[0]
            reaching = [other for other in reaching if other.start[0] + other.size[0] > first_row]
        for other in reaching:
            if intersect_boxes(chunk.start, chunk.size, other.start, other.size) is not None:
                return other, chunk
        reaching.append(chunk)
    return None

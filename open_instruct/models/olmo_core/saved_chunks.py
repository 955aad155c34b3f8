"""Reads boxes of a tensor from its chunks, each of which torch.save wrote into a `.distcp` file.

Such a chunk is a zip archive, not compressed: a pickle that describes the tensor, and its values.
The pickle is read as plain data, and the values are copied from the mapped file, byte by byte, so
that only the bytes of the box are read.
"""

import io
import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from open_instruct.core.boxes import Box, box_shape, complete_box, intersect_boxes, shift_box
from open_instruct.core.errors import InputError
from open_instruct.models.hf.checkpoint_files import FileRange, ReadBox
from open_instruct.models.olmo_core.dcp_metadata import Chunk, SavedTensor
from open_instruct.models.olmo_core.plain_pickle import allow_names, read_pickle

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
ALLOWED = allow_names(
    {
        "torch": tuple(STORAGES),
        "torch._utils": ("_rebuild_tensor_v2",),
        "collections": ("OrderedDict",),
    }
)
# What a foreign archive raises; a library that meets an encrypted one raises RuntimeError.
UNREADABLE = (
    *(OSError, zipfile.BadZipFile, struct.error, RuntimeError),
    *(AttributeError, KeyError, IndexError, TypeError, ValueError),
)
MAX_PICKLE_BYTES = 2**16  # of the description of one tensor
# The header of an entry in a zip archive: its size, and in it the lengths of the name and of more.
HEADER_BYTES = 30
LENGTHS = slice(26, 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTensor:
    """A tensor in chunks, as `CheckpointFiles` takes it."""

    path: Path
    saved: SavedTensor

    @property
    def dtype(self) -> torch.dtype:
        return self.saved.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.saved.shape

    @property
    def ranges(self) -> Sequence[FileRange]:
        """The bytes of its chunks; the state of an optimizer lies in the same files."""
        chunks = self.saved.chunks
        return [(each.path, each.offset, each.offset + each.num_bytes) for each in chunks]

    def open(self) -> ReadBox:
        """What reads a box into new memory. A chunk's place is looked up at its first use."""
        find_offset = cache(lambda chunk: find_values(chunk, self.dtype))

        def read(slices: tuple[slice, ...]) -> torch.Tensor:
            box = complete_box(slices, self.shape)
            values = torch.empty(box_shape(box), dtype=self.dtype)
            starts = [part.start for part in box]
            for chunk in self.saved.chunks:
                common = intersect_boxes(chunk.start, chunk.size, starts, values.shape)
                if common is None:
                    continue
                stored = _map_bytes(chunk, find_offset(chunk), self.dtype)
                target = values[shift_box(common, starts)].view(torch.uint8)
                target.copy_(stored[_widen(shift_box(common, chunk.start), self.dtype)])
            return values

        return read


def _map_bytes(chunk: Chunk, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a chunk's values on the mapped file, which may lie at any address."""
    num_bytes = math.prod(chunk.size) * dtype.itemsize
    # Copied on writing, since torch warns of memory that cannot be written.
    mapped = np.memmap(chunk.path, dtype=np.uint8, mode="c", offset=offset, shape=(num_bytes,))
    return torch.from_numpy(mapped).view(*chunk.size[:-1], chunk.size[-1] * dtype.itemsize)


def _widen(box: Box, dtype: torch.dtype) -> Box:
    """A box of values as one of bytes."""
    *rows, last = box
    return (*rows, slice(last.start * dtype.itemsize, last.stop * dtype.itemsize))


def find_values(chunk: Chunk, dtype: torch.dtype) -> int:
    """Find the place in its file of a chunk's first value.

    Raises:
        InputError: the chunk is not what torch.save writes of a tensor of its size and dtype, or
            its description could run code.
    """
    try:
        with chunk.path.open("rb") as file, zipfile.ZipFile(_Window(file, chunk)) as archive:
            entries = archive.infolist()
            description = _read_description(archive, entries, str(chunk.path))
            place, num_bytes = _find_storage(archive, entries, description, chunk, dtype)
            file.seek(chunk.offset + place)
            lengths = file.read(HEADER_BYTES)[LENGTHS]
    except UNREADABLE as error:
        raise InputError(
            f"{chunk.path}: the chunk at byte {chunk.offset} is not what torch.save writes of a "
            f"tensor of {chunk.size} in {dtype} ({type(error).__name__}: {error}): fetch the "
            "checkpoint again",
            kind="bad_model",
        ) from None
    start = place + HEADER_BYTES + sum(struct.unpack("<HH", lengths))
    if start + num_bytes > chunk.num_bytes:
        raise InputError(f"{chunk.path} is damaged: fetch it again", kind="bad_model")
    return chunk.offset + start


def _read_description(
    archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo], where: str
) -> Any:
    """The arguments of the function that would make the tensor."""
    (entry,) = [each for each in entries if each.filename.endswith("/data.pkl")]
    if entry.file_size > MAX_PICKLE_BYTES or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its description is too long, or compressed")
    for each in entries:
        if each.filename.endswith("/byteorder") and archive.read(each) != b"little":
            raise ValueError("its bytes are in another order")
    record = read_pickle(archive.read(entry), ALLOWED, where=where, has_storages=True)
    if getattr(record, "name", None) != "_rebuild_tensor_v2":
        raise ValueError("it is no plain tensor")
    return record.arguments


def _find_storage(
    archive: zipfile.ZipFile,
    entries: Sequence[zipfile.ZipInfo],
    description: Any,
    chunk: Chunk,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """The place in the archive of the entry with the values, and the bytes of these."""
    (_, storage, key, _, _), first, size, stride = description[:4]
    if STORAGES.get(storage.name) != dtype:
        raise ValueError(f"it holds {storage.name}")
    strides = {
        dim: (step, math.prod(chunk.size[dim + 1 :]))
        for dim, step in enumerate(stride)
        if chunk.size[dim] > 1  # another is never taken
    }
    is_contiguous = all(step == usual for step, usual in strides.values())
    if first != 0 or tuple(size) != chunk.size or not is_contiguous:
        raise ValueError(f"its values are laid out otherwise: {size} by strides {stride}")
    (entry,) = [each for each in entries if each.filename.endswith(f"/data/{key}")]
    num_bytes = math.prod(chunk.size) * dtype.itemsize
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < num_bytes:
        raise ValueError("its values are compressed or too few")
    return entry.header_offset, num_bytes


class _Window(io.RawIOBase):
    """The bytes of a chunk as a file of their own."""

    def __init__(self, file: Any, chunk: Chunk) -> None:
        self._file = file
        self._start = chunk.offset
        self._length = chunk.num_bytes
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins: Mapping[int, int] = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._place,
            io.SEEK_END: self._length,
        }
        place = origins[whence] + offset
        if place < 0:
            raise ValueError("a place before the beginning")
        self._place = place
        return place

    def readinto(self, buffer: Any) -> int:
        num_bytes = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._start + self._place)
        content = self._file.read(num_bytes)
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)

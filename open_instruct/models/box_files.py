"""Sharded tensors in safetensors files, one file a rank, which any other layout can read.

Each rank holds boxes of tensors. A box that several ranks hold is assigned to one of them, which
writes it; files are hashed while they are written.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from open_instruct.core.boxes import intersect_boxes, shift_box
from open_instruct.models.hf.checkpoint_files import (
    DTYPE_NAMES,
    CheckpointFiles,
    make_header,
    read_header,
)
from open_instruct.models.shards import find_local_box, local_part

PIECE_BYTES = 16 * 2**20  # hashed while it is still in the processor's cache

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The box of a tensor that this rank holds.

    Example: the lower half of a matrix of four rows, `Part(local=zeros(2, 3), start=(2, 0),
    shape=(4, 3))`.
    """

    local: torch.Tensor
    start: Numbers
    shape: Numbers

    @property
    def claim(self) -> Claim:
        return Claim(
            dtype=DTYPE_NAMES[self.local.dtype],
            start=self.start,
            size=tuple(self.local.shape),
            shape=self.shape,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A rank's claim to hold the box of `size` at `start` of a tensor of `shape`.

    Example: `Claim(dtype="F32", start=(2, 0), size=(2, 3), shape=(4, 3))`.
    """

    dtype: str
    start: Numbers
    size: Numbers
    shape: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """Size and digest of a file as it was written.

    Example: `WrittenFile(num_bytes=8, xxh3="2d06…")`.
    """

    num_bytes: int
    xxh3: str


def make_part(tensor: torch.Tensor | Part) -> Part:
    """The tensor as a part; an ordinary tensor is whole, and the same on every rank."""
    if isinstance(tensor, Part):
        return tensor
    start = tuple(cut.start for cut in find_local_box(tensor))
    return Part(local=local_part(tensor).detach(), start=start, shape=tuple(tensor.shape))


def assign_boxes(claims_of_ranks: Sequence[Mapping[str, Claim]]) -> dict[str, dict[str, Any]]:
    """Assign each box to one writer: the holder with the fewest bytes to write so far.

    Returns, for each tensor, what a reader needs: dtype, shape, and its boxes as (rank, start,
    size).

    :raises ValueError: the boxes of a tensor are not the whole of it.
    """
    holders: dict[tuple[str, Claim], list[int]] = {}
    for rank, claims in enumerate(claims_of_ranks):
        for name, claim in claims.items():
            if math.prod(claim.size):
                holders.setdefault((name, claim), []).append(rank)
    load = [0] * len(claims_of_ranks)
    index: dict[str, dict[str, Any]] = {}
    largest_first = sorted(holders, key=lambda box: (-math.prod(box[1].size), box[0]))
    for name, claim in largest_first:
        ranks = holders[name, claim]
        owner = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] += math.prod(claim.size)
        new_entry = {
            "dtype": claim.dtype,
            "shape": list(claim.shape),
            "boxes": [],
        }
        entry = index.setdefault(name, new_entry)
        entry["boxes"].append([owner, list(claim.start), list(claim.size)])
    for name, entry in index.items():
        entry["boxes"].sort(key=lambda box: box[1])
        if sum(math.prod(size) for _, _, size in entry["boxes"]) != math.prod(entry["shape"]):
            raise ValueError(f"the ranks together do not hold {name!r} once and whole")
    return dict(sorted(index.items()))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> WrittenFile:
    """Write `tensors` in their order as a safetensors file, without a second copy on the CPU."""
    entries = ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    contents = (_view_bytes(tensor) for tensor in tensors.values())
    return write_hashed(path, itertools.chain((make_header(entries),), contents))


def _view_bytes(tensor: torch.Tensor) -> memoryview:
    # `numpy()` would have the storage never be resized again, as a learner's is that rests.
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    raw: memoryview = np.from_dlpack(flat).data
    return raw


def write_hashed(path: Path, contents: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write `contents` one after the other, and flush them to the disk."""
    bits = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("wb") as file:
        for content in contents:
            num_bytes += len(content)
            for start in range(0, len(content), PIECE_BYTES):
                piece = content[start : start + PIECE_BYTES]
                bits.update(piece)
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(num_bytes=num_bytes, xxh3=bits.hexdigest())


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A slice (`source`) of the box that a file has of a tensor, and the view it is copied into."""

    file_name: str
    name: str
    size: list[int]
    source: tuple[slice, ...]
    target: torch.Tensor


@torch.no_grad()
def read_parts(
    folder: Path, index: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Part]
) -> None:
    """Fill `parts` from the ranks' files in `folder`: `rank0.safetensors` and so on.

    :param index: what `assign_boxes` returned when they were written.
    :raises ValueError: a tensor is missing, has another shape or dtype, or is not there whole.
        Nothing is filled then.
    """
    pieces: list[_Piece] = []
    for name, part in parts.items():
        if part.local.numel():
            pieces += _find_pieces(name, part, index.get(name))
    names = sorted({piece.file_name for piece in pieces})
    files = {name: CheckpointFiles(folder, read_header(folder / name)) for name in names}
    for piece in pieces:
        stored = files[piece.file_name].tensors.get(piece.name)
        if stored is None or (stored.dtype, list(stored.shape)) != (piece.target.dtype, piece.size):
            raise ValueError(f"{piece.file_name} does not hold {piece.name!r} as the index says")
    for piece in pieces:
        piece.target.copy_(files[piece.file_name].read(piece.name, piece.source))


def _find_pieces(name: str, part: Part, entry: Mapping[str, Any] | None) -> Iterator[_Piece]:
    """The pieces that fill a part."""
    if entry is None:
        raise ValueError(f"it has no {name!r}")
    saved = f"{entry['dtype']} of shape {tuple(entry['shape'])}"
    wanted = f"{DTYPE_NAMES[part.local.dtype]} of shape {part.shape}"
    if saved != wanted:
        raise ValueError(f"{name!r} is {saved} there, {wanted} here")
    missing = part.local.numel()
    for rank, start, size in entry["boxes"]:
        common = intersect_boxes(start, size, part.start, part.local.shape)
        if common is None:
            continue
        target = part.local[shift_box(common, part.start)]
        missing -= target.numel()
        yield _Piece(
            file_name=f"rank{int(rank)}.safetensors",
            name=name,
            size=size,
            source=shift_box(common, start),
            target=target,
        )
    if missing:
        raise ValueError(f"{name!r} is not there whole")

"""The manifest of a weight sync: the order of tensors, and their places in buckets.

A bucket is a run of whole tensors that together have at most `bucket_bytes`, or a piece of a larger
tensor: an equal share of every rank's rows (or of its values, where ranks hold ranges of values),
so that each rank sends a part of every piece. A bucket holds first all parts of rank 0, then all
parts of rank 1, and so on: a rank's parts are one message, and receivers assemble the tensors.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from open_instruct.core.boxes import Box, box_shape
from open_instruct.core.weight_buckets import plan_buckets
from open_instruct.models.shards import select_box


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a tensor, and its place in the bucket.

    A `box` of a single range is a run of the tensor's values, counted row by row.
    """

    box: Box  # its place in the whole tensor
    local_box: Box  # its place in the rank's tensor
    start: int  # its first byte in the bucket
    num_bytes: int

    def view(self, flat: torch.Tensor, dtype: torch.dtype, first_byte: int = 0) -> torch.Tensor:
        """The part in `flat`, the bytes of the bucket from `first_byte` on."""
        start = self.start - first_byte
        return flat[start : start + self.num_bytes].view(dtype).view(box_shape(self.box))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that travel together: by name their shapes, and by rank and name their parts.

    Example: the second of three pieces of an embedding is `Bucket(dtype=torch.bfloat16,
    shapes={"wte": (9, 4)}, parts=…, num_bytes=24, piece=1, num_pieces=3)`; a bucket of whole
    tensors has one piece.
    """

    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[int, Mapping[str, Part]]
    num_bytes: int
    piece: int = 0
    num_pieces: int = 1

    def span(self, rank: int) -> tuple[int, int]:
        """The byte range of the parts of `rank`, as start and stop."""
        parts = list(self.parts.get(rank, {}).values())
        if not parts:
            return 0, 0
        last = parts[-1]
        return parts[0].start, last.start + last.num_bytes

    def pack(
        self,
        flat: torch.Tensor,
        find_local: Callable[[str], torch.Tensor],
        *,
        rank: int,
        first_byte: int = 0,
    ) -> None:
        """Copy the parts of `rank`, cast to the bucket's dtype, to their places in the bucket.

        Args:
            flat: bytes of the bucket, from `first_byte` on.
            find_local: returns the rank's local tensor of a name.
        """
        for name, part in self.parts.get(rank, {}).items():
            part.view(flat, self.dtype, first_byte).copy_(find_local(name)[part.local_box])

    @property
    def num_bytes_of_wholes(self) -> int:
        """Bytes of the whole tensors, more than those of the bucket if it is a piece."""
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def wholes(self, into: torch.Tensor) -> dict[str, torch.Tensor]:
        """The whole tensors by name, as consecutive views of `into`."""
        wholes: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape) * self.dtype.itemsize
            wholes[name] = into[start:stop].view(self.dtype).view(shape)
            start = stop
        return wholes

    def unpack(
        self,
        flat: torch.Tensor,
        wholes: Mapping[str, torch.Tensor],
        *,
        rank: int,
        first_byte: int = 0,
    ) -> None:
        """Copy the parts of `rank` to their places in the tensors that `wholes` made.

        Args:
            flat: bytes of the bucket, from `first_byte` on.
        """
        for name, part in self.parts.get(rank, {}).items():
            select_box(wholes[name], part.box).copy_(part.view(flat, self.dtype, first_byte))


class Manifest:
    """Buckets in the order in which they travel."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.buckets = list(buckets)
        self.ranks = sorted(set().union(*(bucket.parts for bucket in self.buckets)))

    @property
    def largest_bucket_bytes(self) -> int:
        return max(bucket.num_bytes for bucket in self.buckets)

    @property
    def most_bytes_of_wholes(self) -> int:
        """The most bytes of the whole tensors of one bucket."""
        return max(bucket.num_bytes_of_wholes for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def largest_span(self, rank: int) -> int:
        """The most bytes that `rank` sends of one bucket."""
        spans = [bucket.span(rank) for bucket in self.buckets]
        return max(stop - start for start, stop in spans)

    def find_bucket(self, position: int) -> Bucket:
        """The bucket at a position in the life of a channel; every version sends all buckets."""
        return self.buckets[position % len(self.buckets)]

    def describe_bucket(self, position: int) -> str:
        """The number of that bucket within its version, for people: "3 of 9"."""
        return f"{position % len(self.buckets) + 1} of {len(self.buckets)}"


class WeightManifest(Manifest):
    """Tensors by Hugging Face's names, the one dtype in which they travel, and their buckets.

    Example: a model of 1.2 GB with the default of 256 MiB has five or six buckets.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        boxes: Mapping[str, Mapping[int, Box]],
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        slabs: Mapping[str, int] | None = None,
    ) -> None:
        """Pack the tensors in the order of `shapes`.

        Args:
            boxes: the part of each tensor that each rank sends; the parts cover the tensor.
            slabs: the number of slabs that a tensor is cut into along its columns, if values are
                counted slab by slab.
        """
        self.shapes = shapes
        self.boxes = boxes
        self.slabs = slabs or {}
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes
        sizes = {
            name: (math.prod(shape) * dtype.itemsize, self._most_rows(name))
            for name, shape in shapes.items()
        }
        super().__init__(self._lay_out(*run) for run in plan_buckets(sizes, bucket_bytes))

    def constructor_arguments(self) -> dict[str, Any]:
        """The arguments that build an equal manifest: plain types, to be pickled."""
        names = ("shapes", "boxes", "dtype", "bucket_bytes", "slabs")
        return {name: getattr(self, name) for name in names}

    def _most_rows(self, name: str) -> int:
        """The most rows that a rank sends of a tensor; 1 for a scalar."""
        return max(_count_rows(box) for box in self.boxes[name].values())

    def _lay_out(self, names: list[str], piece: int, num_pieces: int) -> Bucket:
        parts: dict[int, dict[str, Part]] = {}
        start = 0
        ranks = set().union(*(self.boxes[name] for name in names))
        # Small tensors come first, as they make one message.
        names_by_size = sorted(names, key=lambda name: math.prod(self.shapes[name]))
        for rank in sorted(ranks):
            for name in names_by_size:
                if rank not in self.boxes[name]:
                    continue
                box, local_box = _cut_box(self.boxes[name][rank], piece, num_pieces)
                num_bytes = math.prod(box_shape(box)) * self.dtype.itemsize
                if num_bytes:
                    part = Part(
                        box=box,
                        local_box=local_box,
                        start=start,
                        num_bytes=num_bytes,
                    )
                    parts.setdefault(rank, {})[name] = part
                    start += num_bytes
        shapes = {name: self.shapes[name] for name in names}
        return Bucket(
            dtype=self.dtype,
            shapes=shapes,
            parts=parts,
            num_bytes=start,
            piece=piece,
            num_pieces=num_pieces,
        )


def _count_rows(box: Box) -> int:
    """The rows of a box; 1 for a scalar's."""
    if not box:
        return 1
    return box[0].stop - box[0].start


def _cut_box(box: Box, piece: int, num_pieces: int) -> tuple[Box, Box]:
    """Cut a piece's rows out of a box: their place in the whole tensor, and in the box itself."""
    if not box:
        return box, box
    rows, *others = box
    num_rows = rows.stop - rows.start
    start = num_rows * piece // num_pieces
    stop = num_rows * (piece + 1) // num_pieces
    rows_of_piece = slice(rows.start + start, rows.start + stop)
    return (rows_of_piece, *others), (slice(start, stop),)

"""The manifest of a weight sync: the order of tensors and their places in buckets, the same on
every side.

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

from open_instruct.core.weight_buckets import plan_buckets
from open_instruct.models.shards import Box, at, box_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a tensor: `num_bytes` from `start` of the bucket. `own` is its place in
    the rank's tensor.

    A `box` of a single range is a run of the tensor's values, counted row by row.
    """

    box: Box
    own: Box
    start: int
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
        return (parts[0].start, parts[-1].start + parts[-1].num_bytes) if parts else (0, 0)

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
            part.view(flat, self.dtype, first_byte).copy_(find_local(name)[part.own])

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
            at(wholes[name], part.box).copy_(part.view(flat, self.dtype, first_byte))


class Manifest:
    """Buckets in the order in which they travel."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.buckets = list(buckets)
        self.ranks = sorted({rank for bucket in self.buckets for rank in bucket.parts})

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
        return max(stop - start for start, stop in (bucket.span(rank) for bucket in self.buckets))

    def bucket_at(self, position: int) -> Bucket:
        """The bucket at a position of a channel's life, in which every version sends all
        buckets.
        """
        return self.buckets[position % len(self.buckets)]

    def number_at(self, position: int) -> str:
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
        return {
            name: getattr(self, name)
            for name in ("shapes", "boxes", "dtype", "bucket_bytes", "slabs")
        }

    def _most_rows(self, name: str) -> int:
        """The most rows that a rank sends of a tensor; 1 for a scalar."""
        return max(box[0].stop - box[0].start if box else 1 for box in self.boxes[name].values())

    def _lay_out(self, names: list[str], piece: int, num_pieces: int) -> Bucket:
        parts: dict[int, dict[str, Part]] = {}
        start = 0
        for rank in sorted({rank for name in names for rank in self.boxes[name]}):
            # Small ones make one message.
            for name in sorted(names, key=lambda name: math.prod(self.shapes[name])):
                if rank not in self.boxes[name]:
                    continue
                box, own = _cut(self.boxes[name][rank], piece, num_pieces)
                num_bytes = math.prod(box_shape(box)) * self.dtype.itemsize
                if num_bytes:
                    parts.setdefault(rank, {})[name] = Part(
                        box=box, own=own, start=start, num_bytes=num_bytes
                    )
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


def _cut(box: Box, piece: int, num_pieces: int) -> tuple[Box, Box]:
    """The rows of a box that belong to a piece, as their place in the tensor and their place in the
    box.
    """
    if not box:
        return box, box
    rows, *others = box
    start, stop = ((rows.stop - rows.start) * end // num_pieces for end in (piece, piece + 1))
    return (slice(rows.start + start, rows.start + stop), *others), (slice(start, stop),)

"""What travels, in which order and where in a bucket: the same on every side.

A bucket is a run of whole tensors that together have at most `bucket_bytes`. A larger tensor is a bucket of
its own. Within a bucket lie first all parts that rank 0 brings, then all that rank 1 brings, and so on: what a rank
brings is one message, and receivers put the tensors together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from open_instruct.models.shards import Box, box_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank brings of a tensor: `num_bytes` from `start` of the bucket."""

    box: Box
    start: int
    num_bytes: int

    def view(self, flat: torch.Tensor, dtype: torch.dtype, first_byte: int = 0) -> torch.Tensor:
        """The part in `flat`, the bytes of the bucket from `first_byte` on."""
        start = self.start - first_byte
        return flat[start : start + self.num_bytes].view(dtype).view(box_shape(self.box))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that travel together: by name their shapes, and by rank and name their parts."""

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[int, Mapping[str, Part]]
    num_bytes: int

    def span(self, rank: int) -> tuple[int, int]:
        """First byte of what `rank` brings, and the one after the last."""
        parts = list(self.parts.get(rank, {}).values())
        return (parts[0].start, parts[-1].start + parts[-1].num_bytes) if parts else (0, 0)

    def pack(
        self,
        flat: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        *,
        rank: int,
        dtype: torch.dtype,
        first_byte: int = 0,
    ) -> None:
        """Copy what `rank` has of each tensor, cast to `dtype`, to its place in the bucket.

        Args:
            flat: bytes of the bucket, from `first_byte` on.
        """
        for name, part in self.parts.get(rank, {}).items():
            part.view(flat, dtype, first_byte).copy_(tensors[name])

    def wholes(self, into: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors by name, one behind the other in `into`: as many bytes as the bucket."""
        wholes: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape) * dtype.itemsize
            wholes[name] = into[start:stop].view(dtype).view(shape)
            start = stop
        return wholes

    def unpack(self, flat: torch.Tensor, wholes: Mapping[str, torch.Tensor], *, rank: int, first_byte: int = 0) -> None:
        """Copy what `rank` has brought to its places in the tensors that `wholes` made.

        Args:
            flat: bytes of the bucket, from `first_byte` on.
        """
        for name, part in self.parts.get(rank, {}).items():
            whole = wholes[name]
            whole[part.box].copy_(part.view(flat, whole.dtype, first_byte))


class WeightManifest:
    """Tensors by Hugging Face's names, the one dtype in which they travel, and their buckets.

    Example: a model of 1.2 GB with the default of 256 MiB has five or six buckets of whole tensors.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        boxes: Mapping[str, Mapping[int, Box]],
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        """Pack the tensors in the order of `shapes`.

        Args:
            boxes: what each rank brings of each tensor; together the whole of it.
        """
        self.shapes = shapes
        self.boxes = boxes
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes
        self.buckets = tuple(self._lay_out(run) for run in self._runs())
        self.ranks = sorted({rank for bucket in self.buckets for rank in bucket.parts})

    @property
    def largest_bucket_bytes(self) -> int:
        return max(bucket.num_bytes for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def most_bytes_of(self, rank: int) -> int:
        """The most that `rank` brings of a bucket."""
        spans = [bucket.span(rank) for bucket in self.buckets]
        return max(stop - start for start, stop in spans)

    def as_json(self) -> dict[str, Any]:
        """As strings and numbers, for a process that imports nothing of ours."""
        return {
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "boxes": {
                name: [[rank, [[cut.start, cut.stop] for cut in box]] for rank, box in boxes.items()]
                for name, boxes in self.boxes.items()
            },
            "dtype": str(self.dtype).removeprefix("torch."),
            "bucket_bytes": self.bucket_bytes,
        }

    @classmethod
    def from_json(cls, info: Mapping[str, Any]) -> WeightManifest:
        """What `as_json` was made from."""
        return cls(
            {name: tuple(shape) for name, shape in info["shapes"].items()},
            {
                name: {rank: tuple(slice(start, stop) for start, stop in box) for rank, box in boxes}
                for name, boxes in info["boxes"].items()
            },
            dtype=getattr(torch, info["dtype"]),
            bucket_bytes=info["bucket_bytes"],
        )

    def _runs(self) -> Iterator[list[str]]:
        run: list[str] = []
        num_bytes = 0
        for name, shape in self.shapes.items():
            more = math.prod(shape) * self.dtype.itemsize
            if run and num_bytes + more > self.bucket_bytes:
                yield run
                run, num_bytes = [], 0
            run.append(name)
            num_bytes += more
        yield run

    def _lay_out(self, names: list[str]) -> Bucket:
        parts: dict[int, dict[str, Part]] = {}
        start = 0
        for rank in sorted({rank for name in names for rank in self.boxes[name]}):
            for name in names:
                box = self.boxes[name].get(rank)
                num_bytes = 0 if box is None else math.prod(box_shape(box)) * self.dtype.itemsize
                if box is not None and num_bytes:
                    parts.setdefault(rank, {})[name] = Part(box=box, start=start, num_bytes=num_bytes)
                    start += num_bytes
        return Bucket(shapes={name: self.shapes[name] for name in names}, parts=parts, num_bytes=start)

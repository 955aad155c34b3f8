"""Which tensors travel, in which order, and how they are packed into buckets: the same on every side.

A bucket is a run of whole tensors, one after the other, that together have at most `bucket_bytes`. A larger
tensor is a bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """A tensor's place in its bucket: `num_bytes` from `start`."""

    name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that travel together."""

    tensors: tuple[PackedTensor, ...]
    num_bytes: int

    def views(self, flat: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor with its name, as a view of `flat`: the bucket's bytes."""
        for tensor in self.tensors:
            stop = tensor.start + tensor.num_bytes
            yield tensor.name, flat[tensor.start : stop].view(dtype).view(tensor.shape)


class WeightManifest:
    """Names (Hugging Face's), shapes and the one dtype of what travels, packed into buckets.

    Example: a model of 1.2 GB with the default of 256 MiB has five or six buckets of whole tensors.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype, bucket_bytes: int) -> None:
        """Pack the tensors in the order of `shapes`."""
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.buckets = tuple(self._pack())

    @property
    def largest_bucket_bytes(self) -> int:
        return max(bucket.num_bytes for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def plain(self) -> dict[str, Any]:
        """As strings and numbers, for a process that imports nothing of ours."""
        return {
            "names": list(self.shapes),
            "shapes": [list(shape) for shape in self.shapes.values()],
            "dtype": str(self.dtype).removeprefix("torch."),
            "bucket_bytes": self.bucket_bytes,
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> WeightManifest:
        """What `plain` was made from."""
        return cls(
            dict(zip(plain["names"], plain["shapes"], strict=True)),
            dtype=getattr(torch, plain["dtype"]),
            bucket_bytes=plain["bucket_bytes"],
        )

    def _pack(self) -> Iterator[Bucket]:
        tensors: list[PackedTensor] = []
        start = 0
        for name, shape in self.shapes.items():
            num_bytes = math.prod(shape) * self.dtype.itemsize
            if tensors and start + num_bytes > self.bucket_bytes:
                yield Bucket(tensors=tuple(tensors), num_bytes=start)
                tensors, start = [], 0
            tensors.append(PackedTensor(name=name, shape=shape, start=start, num_bytes=num_bytes))
            start += num_bytes
        yield Bucket(tensors=tuple(tensors), num_bytes=start)

"""The state of a learner leaves its device, so that an engine may use the memory, and comes back.

Storages move, not tensors: the bytes of each are copied to host memory and the storage is resized
to nothing; later it is resized again and filled. So every tensor, view and shard that a library or
a checkpoint refers to stays the same object, and no library has to know. FSDP2 frees gathered
weights in the same way.

DeepSpeed's own `offload_states` is not used: it has no stage 0 and no `BF16_Optimizer`, takes no
optimizer but DeepSpeed's at stage 3, and brings states back in other storages, while the ranges
that checkpoints, exports and weight syncs read are views of the old ones.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from open_instruct.models.storages import view_storages

# Pinned memory is rounded up to a power of two, so blocks are one.
BLOCK_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What one move took: bytes that crossed between device and host, and seconds."""

    num_bytes: int
    seconds: float


class HostBlocks:
    """Host memory that bytes are packed into end to end, pinned beside a GPU.

    It is allocated block by block as it is needed, and stays: to pin memory takes longer than to
    copy into it.
    """

    def __init__(self, *, pinned: bool, block_bytes: int = BLOCK_BYTES) -> None:
        self._pinned = pinned
        self._block_bytes = block_bytes
        self._blocks: list[torch.Tensor] = []

    def pieces(self, start: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """The memory from byte `start` on, in the pieces that blocks cut it into."""
        stop = start + num_bytes
        while start < stop:
            index, offset = divmod(start, self._block_bytes)
            while index >= len(self._blocks):
                block = torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=self._pinned)
                self._blocks.append(block)
            size = min(stop - start, self._block_bytes - offset)
            yield self._blocks[index][offset : offset + size]
            start += size


class StateMover:
    """Moves all storages of some tensors between `device` and host memory.

    Nothing may use the tensors while they are on the host. Other tensors than those listed stay
    where they are, and so do those that are on the host anyway.

    Args:
        list_tensors: lists what is to move; called anew for each move to the host.
        device: where the tensors belong.
        block_bytes: of host memory that is allocated at once.
    """

    def __init__(
        self,
        list_tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._list_tensors = list_tensors
        self._device = device
        self._blocks = HostBlocks(pinned=device.type == "cuda", block_bytes=block_bytes)
        self._absent: list[torch.Tensor] | None = None  # the bytes of each storage, in order

    @property
    def is_on_device(self) -> bool:
        return self._absent is None

    @torch.no_grad()
    def move_to_host(self) -> Move:
        """Copy every storage to the host, and free it on the device; nothing if it was done.

        Raises:
            RunError: a storage belongs to another process or to a file, and cannot be freed.
        """
        began_s = time.perf_counter()
        if self._absent is not None:
            return Move(num_bytes=0, seconds=0.0)
        flats = view_storages(self._list_tensors(), self._device)
        self._wait()  # libraries compute on streams of their own
        num_bytes = self._copy(flats, to_host=True)
        self._wait()
        for flat in flats:
            flat.untyped_storage().resize_(0)
        self._absent = flats
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return Move(num_bytes=num_bytes, seconds=time.perf_counter() - began_s)

    @torch.no_grad()
    def move_to_device(self) -> Move:
        """Bring every storage back, bit for bit; nothing if all is there."""
        began_s = time.perf_counter()
        if self._absent is None:
            return Move(num_bytes=0, seconds=0.0)
        for flat in self._absent:
            flat.untyped_storage().resize_(flat.numel())
        num_bytes = self._copy(self._absent, to_host=False)
        self._wait()
        self._absent = None
        return Move(num_bytes=num_bytes, seconds=time.perf_counter() - began_s)

    def _copy(self, flats: Iterable[torch.Tensor], *, to_host: bool) -> int:
        """Copy all bytes, without waiting for the device; returns how many there are."""
        position = 0
        for flat in flats:
            start = 0
            for piece in self._blocks.pieces(position, flat.numel()):
                part = flat[start : start + len(piece)]
                if to_host:
                    piece.copy_(part, non_blocking=True)
                else:
                    part.copy_(piece, non_blocking=True)
                start += len(piece)
            position += flat.numel()
        return position

    def _wait(self) -> None:
        """Wait for all streams of the device: each may read, or write, what moves."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

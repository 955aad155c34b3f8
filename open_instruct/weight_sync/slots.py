"""Two transports by shared memory: a file of /dev/shm on one host, or memory of one CUDA device.

Every rank of one copy of the model writes its parts of a bucket straight into one of two slots,
from which all receivers copy. Nothing is gathered, nothing is sent.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from open_instruct.cluster.watchdog import MARK_VARIABLE, SHARED_MEMORY
from open_instruct.core.errors import RunError
from open_instruct.weight_sync.channel import (
    NUM_SLOTS,
    ChannelEnd,
    FindLocal,
    FindWholes,
    Incoming,
    Info,
    Outgoing,
    wait_for_device,
)
from open_instruct.weight_sync.manifest import Bucket
from open_instruct.weight_sync.progress import SyncProgress, learner_name

MIB = 2**20
INDEX_OF_DEVICE = 6  # among the arguments that torch exports a CUDA tensor with


def view_slot(slots_SN: torch.Tensor, position: int, bucket: Bucket) -> torch.Tensor:
    """The bytes of a bucket in the slot for the `position`-th bucket of a channel's life."""
    return slots_SN[position % NUM_SLOTS, : bucket.num_bytes]


class SlotEnd(ChannelEnd):
    """An end that maps the slots, unless it made them itself; it has none before it joined."""

    slots_SN = torch.empty(0)

    def join(self, info: Info) -> None:
        if "path" in info:
            self.slots_SN = map_shared_file(info["path"], self.manifest.largest_bucket_bytes)
        elif not len(self.slots_SN):
            self.slots_SN = import_device_slots(info["device_slots"], self.device)

    def close(self) -> None:
        self.slots_SN = torch.empty(0)


class SlotWriter(SlotEnd, Outgoing):
    """Writes a rank's parts to their places in a slot.

    Learner 0 makes the slots. On a CPU they are a file, whose name is removed once all members have
    mapped it.
    """

    path: Path | None = None

    def offer(self) -> dict[str, Any]:
        slot_bytes = self.manifest.largest_bucket_bytes
        if self.device.type == "cpu":
            self.path = create_shared_file(slot_bytes)
            return {"path": str(self.path)}
        self.slots_SN = torch.empty(NUM_SLOTS, slot_bytes, dtype=torch.uint8, device=self.device)
        return {"device_slots": export_device_slots(self.slots_SN)}

    def connect(self, info: Info, progress: SyncProgress) -> None:
        super().connect(info, progress)
        self._remove_file()

    def put(self, position: int, find_local: FindLocal) -> None:
        bucket = self.manifest.find_bucket(position)
        flat = view_slot(self.slots_SN, position, bucket)
        bucket.pack(flat, find_local, rank=self.index)
        wait_for_device(self.device)
        self.progress.report(f"filled/{position}")

    def close(self) -> None:
        super().close()
        self._remove_file()

    def _remove_file(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class SlotReader(SlotEnd, Incoming):
    """Copies all parts out of a slot."""

    def take(self, position: int, find_wholes: FindWholes) -> None:
        bucket = self.manifest.find_bucket(position)
        writers = [learner_name(rank) for rank in self.manifest.ranks]
        self.progress.wait(
            f"filled/{position}",
            writers,
            to=f"write bucket {self.manifest.describe_bucket(position)}",
        )
        for rank in bucket.parts:
            bucket.unpack(
                view_slot(self.slots_SN, position, bucket), find_wholes(position), rank=rank
            )


def create_shared_file(slot_bytes: int) -> Path:
    """Reserve two slots in a file of shared memory, and return its path.

    The watchdog removes the file if nobody else does.

    Raises:
        RunError: shared memory has too little room.
    """
    mark = os.environ.get(MARK_VARIABLE, f"open_instruct-{os.getpid()}")
    path = SHARED_MEMORY / f"{mark}-weights-{os.urandom(4).hex()}"
    path.touch(mode=0o600, exist_ok=False)
    try:
        with path.open("r+b") as file:
            # Without this, writing to the file would end the process where there is no room.
            os.posix_fallocate(file.fileno(), 0, NUM_SLOTS * slot_bytes)
    except OSError as error:
        path.unlink()
        raise RunError(
            f"weight sync: {SHARED_MEMORY} has no room for two buckets of {slot_bytes / MIB:.0f} "
            f"MiB ({error.strerror}); lower --weight_sync_bucket_mib, give the container more "
            "(docker run --shm-size), or use --weight_sync_backend gloo"
        ) from error
    return path


def map_shared_file(path: str, slot_bytes: int) -> torch.Tensor:
    """The two slots as bytes, shape (2, slot_bytes)."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), NUM_SLOTS * slot_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(NUM_SLOTS, slot_bytes)


def export_device_slots(slots_SN: torch.Tensor) -> tuple[Any, ...]:
    """The arguments with which one other process on the same device can map these slots."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(slots_SN)
    return tuple(arguments)


def import_device_slots(arguments: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The slots that another process exported; `device` is this process's name for the device."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    rebuild: Callable[..., torch.Tensor] = rebuild_cuda_tensor
    return rebuild(*arguments[:INDEX_OF_DEVICE], device.index, *arguments[INDEX_OF_DEVICE + 1 :])

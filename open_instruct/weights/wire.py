"""Buckets travel through memory that two processes share, or a process group of the sender and the receivers."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from open_instruct.cluster.addresses import address_towards
from open_instruct.cluster.watchdog import MARK_VARIABLE, SHARED_MEMORY
from open_instruct.errors import RunError
from open_instruct.weights.manifest import Bucket
from open_instruct.weights.progress import SyncProgress, receiver_name

NUM_SLOTS = 2
MIB = 2**20
INDEX_OF_DEVICE = 6  # among the arguments that torch exports a CUDA tensor with
# Extra seconds of a process group's time-out, so that a member's own time-out, which names the missing one, is first.
GROUP_PATIENCE_S = 10.0
# Read by a process group of NCCL as it is made: a peer that is gone, or late, ends the communicator, not this process.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
GIVE_UP_COMMUNICATOR = "2"


def slot_of(slots_SN: torch.Tensor, position: int, bucket: Bucket) -> torch.Tensor:
    """The bytes of a bucket in the slot for the `position`-th bucket of a channel's life."""
    return slots_SN[position % NUM_SLOTS, : bucket.num_bytes]


def create_shared_file(slot_bytes: int) -> str:
    """Reserve two slots in shared memory; returns the path. The watchdog removes it if nobody else does.

    Raises:
        RunError: shared memory has too little room.
    """
    mark = os.environ.get(MARK_VARIABLE, f"open_instruct-{os.getpid()}")
    path = SHARED_MEMORY / f"{mark}-weights-{os.urandom(4).hex()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Without pages behind it, writing to the file would end the process where there is no room.
        os.posix_fallocate(file, 0, NUM_SLOTS * slot_bytes)
    except OSError as error:
        remove_shared_file(str(path))
        raise RunError(
            f"weight sync: {SHARED_MEMORY} has no room for two buckets of {slot_bytes / MIB:.0f} MiB "
            f"({error.strerror}); lower --weight_sync_bucket_mib, give the container more (docker run --shm-size), or "
            "use --weight_sync_backend gloo"
        ) from error
    finally:
        os.close(file)
    return str(path)


def remove_shared_file(path: str) -> None:
    """Remove the file's name; processes that have it mapped keep the memory."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def map_shared_file(path: str, slot_bytes: int) -> torch.Tensor:
    """The two slots as bytes, shape (2, slot_bytes)."""
    file = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(file, NUM_SLOTS * slot_bytes)
    finally:
        os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8).view(NUM_SLOTS, slot_bytes)


def export_device_slots(slots_SN: torch.Tensor) -> tuple[Any, ...]:
    """Arguments with which one other process on the same device can map these slots."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(slots_SN)
    return tuple(arguments)


def import_device_slots(arguments: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The slots that another process exported; `device` is this process's name for the device."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    rebuild: Callable[..., torch.Tensor] = rebuild_cuda_tensor
    return rebuild(*arguments[:INDEX_OF_DEVICE], device.index, *arguments[INDEX_OF_DEVICE + 1 :])


def broadcast_group(
    info: Mapping[str, Any], progress: SyncProgress, *, sender: str, rank: int, device: torch.device
) -> Any:
    """A process group of `sender`, its rank 0, and a channel's receivers, beside any that these processes are in.

    Returns when all are connected. Members wait for each other here, and not in the group, which could not say who is
    missing; NCCL connects them when the first byte is sent, which therefore is sent now.

    Raises:
        RunError: some did not come within the time-out (they are named), or could not be connected.
    """
    members = [sender, *map(receiver_name, range(info["num_receivers"]))]
    # First see that all are there: a member that waits with another sender is not missing.
    for stage in ("connecting", f"connecting/{sender}"):
        progress.report(stage)
        progress.wait(stage, members, to=f"connect with {sender}")
    try:
        group = _group(info, progress.store, sender=sender, rank=rank)
        first = broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))
        others = [member for member in members if member != progress.member]
        progress.wait_until(first.is_completed, who=lambda: others, to=f"be connected with {sender}")
        first.wait()
    except RuntimeError as error:
        raise progress.lost(
            f"{progress.member} could not be connected with {' and '.join(members)}: {error}"
        ) from error
    return group


def _group(info: Mapping[str, Any], store: TCPStore, *, sender: str, rank: int) -> Any:
    prefixed, size = PrefixStore(f"{info['backend']}/{sender}/", store), info["num_receivers"] + 1
    if info["backend"] == "gloo":
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # At the address that reaches the store, and no other: on one host all stays on loopback.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(info["address"], info["port"]))]
        gloo._timeout = timedelta(seconds=info["timeout_s"] + GROUP_PATIENCE_S)
        return dist.ProcessGroupGloo(prefixed, rank, size, gloo)
    nccl = dist.ProcessGroupNCCL.Options()
    # Its clock starts when a bucket is asked for, while the one before is still being loaded.
    nccl._timeout = timedelta(seconds=2 * info["timeout_s"] + GROUP_PATIENCE_S)
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = GIVE_UP_COMMUNICATOR
    try:
        return dist.ProcessGroupNCCL(prefixed, rank, size, nccl)
    finally:
        os.environ.pop(ERROR_HANDLING)
        if before is not None:
            os.environ[ERROR_HANDLING] = before


def broadcast(group: Any, flat: torch.Tensor) -> dist.Work:
    """Begin to send `flat` from rank 0 of the group to all others."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work: dist.Work = group.broadcast([flat], options)
    return work


def wait_for_device(device: torch.device) -> None:
    """Wait for this stream's work, so that another process may read its results.

    Other streams are not waited for, as the next bucket travels on them.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

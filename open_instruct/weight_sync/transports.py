"""The transports for weights from learners to engines, and when each one works."""

from open_instruct.cluster.watchdog import SHARED_MEMORY
from open_instruct.core.errors import InputError
from open_instruct.weight_sync.broadcasts import PartBroadcaster, PartReceiver
from open_instruct.weight_sync.channel import Incoming, Outgoing
from open_instruct.weight_sync.gathered_slots import GatheredReader, GatheringWriter
from open_instruct.weight_sync.slots import SlotReader, SlotWriter

TRANSPORTS: dict[str, tuple[type[Outgoing], type[Incoming]]] = {
    "nccl": (PartBroadcaster, PartReceiver),
    "gloo": (PartBroadcaster, PartReceiver),
    "ipc": (SlotWriter, SlotReader),
    "shm": (SlotWriter, SlotReader),
    "gathered": (GatheringWriter, GatheredReader),
}
"""The classes of both ends, by the values of `--weight_sync_backend`; and `GATHERED`."""

GATHERED = "gathered"
"""What "ipc" is where learners and engines take turns on several GPUs."""

TRANSPORT_WORDS = {
    "nccl": "over NCCL",
    "gloo": "over gloo",
    "ipc": "by CUDA IPC",
    "gathered": "by CUDA IPC, gathered on each GPU",
    "shm": "by shared memory",
    "files": "by files in a folder",
}
"""How weights go to engines, in a sentence."""

ON_DEVICE = ("nccl", "ipc", GATHERED)
"""Transports from CUDA device to CUDA device; the others go through the CPU."""

FOLDER = "files"
"""The value of `--weight_sync_backend` for the transport without a channel (`folder.py`)."""


def choose_transport(
    flag: str,
    *,
    on_cuda: bool,
    single_device: bool,
    same_host: bool,
    takes_turns: bool = False,
    has_free_engines: bool = False,
) -> str:
    """The transport that `--weight_sync_backend` stands for.

    Args:
        flag: its value.
        on_cuda: learners and engines have GPUs.
        single_device: one learner and one engine share one device.
        same_host: every learner and every engine is on one host. Known once they are placed.
        takes_turns: engines are on the devices of learners.
        has_free_engines: others are not; learners can then reach all alike through the host alone.

    Raises:
        InputError: it cannot work; says why, and what would.
    """
    reaches_by_host = takes_turns and has_free_engines
    gathers = takes_turns and on_cuda and not reaches_by_host and not single_device
    if gathers and flag in ("auto", "ipc"):
        return GATHERED
    if flag == "auto" and on_cuda and not reaches_by_host:
        return "ipc" if single_device else "nccl"
    if flag == "auto":
        return "shm" if same_host and SHARED_MEMORY.is_dir() else "gloo"
    problem = ""
    if flag in ON_DEVICE and not on_cuda:
        problem = "there is no CUDA device; use auto, shm or gloo"
    elif flag == "ipc" and not single_device:
        problem = (
            "learner and engine share a device only with --placement shared or "
            "--single_gpu_mode; use auto or nccl"
        )
    elif flag == "nccl" and single_device:
        problem = (
            "needs a GPU for each process, and --single_gpu_mode has one for both; use auto or ipc"
        )
    elif flag == "shm" and not same_host:
        problem = (
            "learners and engines are on several hosts, which share no memory; use auto or gloo"
        )
    elif flag == "shm" and not SHARED_MEMORY.is_dir():
        problem = f"this system has no {SHARED_MEMORY}; use auto or gloo"
    if problem:
        raise InputError(f"--weight_sync_backend {flag}: {problem}", kind="conflict")
    return flag

"""The ways for weights from the learners to the engines, and the condition under which each one works."""

from dataclasses import dataclass

from open_instruct.cluster.watchdog import SHARED_MEMORY
from open_instruct.errors import InputError
from open_instruct.weights.broadcasts import PartBroadcaster, PartReceiver
from open_instruct.weights.slots import SlotReader, SlotWriter
from open_instruct.weights.way import Incoming, Outgoing


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Both ends of a way; weights that are `on_device` go from CUDA device to CUDA device, others through the CPU."""

    outgoing: type[Outgoing]
    incoming: type[Incoming]
    on_device: bool


WAYS = {
    "nccl": Way(outgoing=PartBroadcaster, incoming=PartReceiver, on_device=True),
    "gloo": Way(outgoing=PartBroadcaster, incoming=PartReceiver, on_device=False),
    "ipc": Way(outgoing=SlotWriter, incoming=SlotReader, on_device=True),
    "shm": Way(outgoing=SlotWriter, incoming=SlotReader, on_device=False),
}
"""By the values of `--weight_sync_backend`."""

FOLDER = "files"
"""Another of its values: the way without a channel (`folder.py`)."""


def is_on_device(backend: str) -> bool:
    """Whether weights go from CUDA device to CUDA device."""
    return backend != FOLDER and WAYS[backend].on_device


def choose_backend(flag: str, *, on_cuda: bool, single_device: bool, same_host: bool) -> str:
    """The way that `--weight_sync_backend` stands for.

    Args:
        flag: its value.
        on_cuda: learners and engines have GPUs.
        single_device: one learner and one engine share one device.
        same_host: every learner and every engine is on one host. Known once they are placed.

    Raises:
        InputError: it cannot work; says why, and what would.
    """
    if flag == "auto" and on_cuda:
        return "ipc" if single_device else "nccl"
    if flag == "auto":
        return "shm" if same_host and SHARED_MEMORY.is_dir() else "gloo"
    problem = ""
    if is_on_device(flag) and not on_cuda:
        problem = "there is no CUDA device; use auto, shm or gloo"
    elif flag == "ipc" and not single_device:
        problem = "learner and engine share a device only with --single_gpu_mode; use auto or nccl"
    elif flag == "nccl" and single_device:
        problem = "needs a GPU for each process, and --single_gpu_mode has one for both; use auto or ipc"
    elif flag == "shm" and not same_host:
        problem = "learners and engines are on several hosts, which share no memory; use auto or gloo"
    elif flag == "shm" and not SHARED_MEMORY.is_dir():
        problem = f"this system has no {SHARED_MEMORY}; use auto or gloo"
    if problem:
        raise InputError(f"--weight_sync_backend {flag}: {problem}")
    return flag

"""How weights travel from the learners to the engines: which ways there are, and when each one works."""

from __future__ import annotations

from open_instruct.cluster.watchdog import SHARED_MEMORY
from open_instruct.errors import InputError

SHARED = ("shm", "ipc")
"""Learners write a bucket into memory that the receivers read too; the other ways broadcast it."""
ON_DEVICE = ("nccl", "ipc")
"""Weights go from CUDA device to CUDA device; the other ways pass through the CPU."""


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
    if flag in ON_DEVICE and not on_cuda:
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

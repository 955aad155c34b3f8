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
    given = f"--weight_sync_backend {flag}:"
    if flag in ON_DEVICE and not on_cuda:
        raise InputError(f"{given} there is no CUDA device; use auto, shm or gloo")
    if flag == "ipc" and not single_device:
        raise InputError(
            f"{given} hands over memory of one device, which learner and engine share only with --single_gpu_mode; "
            "use auto or nccl"
        )
    if flag == "nccl" and single_device:
        raise InputError(
            f"{given} needs a GPU for each process, and --single_gpu_mode has one for both; use auto or ipc"
        )
    if flag == "shm" and not same_host:
        raise InputError(f"{given} learners and engines are on several hosts, which share no memory; use auto or gloo")
    if flag == "shm" and not SHARED_MEMORY.is_dir():
        raise InputError(f"{given} this system has no {SHARED_MEMORY}; use auto or gloo")
    return flag

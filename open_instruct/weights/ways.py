"""How weights travel from the learners to the engines: which ways there are, and when each one works."""

from __future__ import annotations

from open_instruct.cluster.watchdog import SHARED_MEMORY
from open_instruct.config.rollout_sections import FleetSection
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
    """
    if flag != "auto":
        return flag
    if on_cuda:
        return "ipc" if single_device else "nccl"
    return "shm" if same_host and SHARED_MEMORY.is_dir() else "gloo"


def check_backend(fleet: FleetSection, *, on_cuda: bool, single_device: bool, same_host: bool) -> None:
    """Refuse a `--weight_sync_backend` that cannot work; arguments as for `choose_backend`.

    Raises:
        InputError: says why, and what would work.
    """
    flag = fleet.weight_sync_backend
    if flag in ON_DEVICE and not on_cuda:
        raise InputError(f"--weight_sync_backend {flag}: there is no CUDA device; use auto, shm or gloo")
    if flag == "ipc" and not single_device:
        raise InputError(
            "--weight_sync_backend ipc: hands over memory of one device, which learner and engine share only with "
            "--single_gpu_mode; use auto or nccl"
        )
    if flag == "nccl" and single_device:
        raise InputError(
            "--weight_sync_backend nccl: needs a GPU for each process, and --single_gpu_mode has one for both; use "
            "auto or ipc"
        )
    if flag == "shm" and not same_host:
        raise InputError(
            "--weight_sync_backend shm: learners and engines are on several hosts, which share no memory; use auto or "
            "gloo"
        )
    if flag == "shm" and not SHARED_MEMORY.is_dir():
        raise InputError(f"--weight_sync_backend shm: this system has no {SHARED_MEMORY}; use auto or gloo")

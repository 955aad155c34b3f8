"""The device that is checked: its name, its peak, and how long something takes on it."""

import statistics
import time
from collections.abc import Callable

import torch

from open_instruct.planning.subject.devices import DEVICES, find_gpu

GIB = 2**30


def device_of(rehearse: bool) -> torch.device:
    return torch.device("cpu") if rehearse else torch.device("cuda", 0)


def peak_flops() -> float | None:
    """Of the GPU that is there, dense bfloat16; None where the planner's table has no such GPU.

    OLMo-core's own table takes a GPU that it does not know, an H200 among them, for an A100.
    """
    name = known_gpu()
    if name is None or not DEVICES[name].has_bf16:
        return None
    return DEVICES[name].peak_tflops_bf16 * 1e12


def known_gpu() -> str | None:
    """The planner's name of the GPU that is there; None where it knows none of that kind."""
    if not torch.cuda.is_available():
        return None
    found = find_gpu(torch.cuda.get_device_name())
    return None if found is None else found.name


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    work: Callable[[], object], device: torch.device, *, num_rounds: int = 10
) -> float:
    """Of one call of `work`, after two calls that are not timed."""
    for _ in range(2):
        work()
    wait(device)
    seconds = []
    for _ in range(num_rounds):
        began_s = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)

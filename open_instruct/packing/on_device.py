"""Copies of tensors from the CPU to the device, without waiting for the device."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils._pytree import tree_map_only

T = TypeVar("T")


def on_device(batch: T, device: torch.device) -> T:
    """`batch` (a tensor, or tensors in tuples and dicts) on `device`.

    Copies to a GPU are asynchronous, from pinned memory: from other memory, CUDA would first finish all launched work.
    """
    if device.type == "cpu":
        return batch

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if tensor.device.type == "cpu" else tensor

    moved_batch: T = tree_map_only(torch.Tensor, moved, batch)
    return moved_batch

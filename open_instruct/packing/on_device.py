"""What was put together on the CPU, brought to the device without waiting for it."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils._pytree import tree_map_only

T = TypeVar("T")


def on_device(batch: T, device: torch.device) -> T:
    """`batch` (a tensor, or tensors in tuples and dicts) on `device`.

    Copies to a GPU leave from pinned memory, and nobody waits for them: from any other, CUDA first lets all that was
    launched come to its end.
    """
    if device.type == "cpu":
        return batch

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if tensor.device.type == "cpu" else tensor

    moved_batch: T = tree_map_only(torch.Tensor, moved, batch)
    return moved_batch

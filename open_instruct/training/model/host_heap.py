"""On a CPU, gives the memory of freed tensors back to the operating system.

glibc keeps what is freed, and finds it little use. PyTorch aligns tensors to 64 bytes, and for an
aligned piece glibc (2.36, `_int_memalign`) looks for a free one that is larger by the alignment:
the place of a freed tensor is too small for the next one of the same size. A run of SmolLM2-135M
took up to 35% more than it needed.

`malloc_trim` gives all free pages back. It takes well under a millisecond, but every page that is
used again then costs a page fault: with a trim in every pass, a step of a model of 4M parameters
takes 15% more processor time. So the heap is trimmed where there is much to give back, which small
models never have.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import psutil
import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.config.sharding_sections import MemorySection

# A process may be larger than it ever was right after a trim, by this share of it and this much.
MOST_GROWTH = 0.05
LEAST_BYTES = 256 << 20


class HeapTrimmer:
    """Trims the heap between blocks, in passes that learn.

    Args:
        trim: gives free memory back.
        measure_bytes: the memory of this process.
    """

    def __init__(self, trim: Callable[[], Any], measure_bytes: Callable[[], int]) -> None:
        self._trim = trim
        self._measure_bytes = measure_bytes
        self._most_bytes_needed = 0

    def hook_block(self, block: torch.nn.Module) -> None:
        """Trim after a forward pass of `block`, and before its backward pass."""
        block.register_forward_hook(self._after_forward)

    def _after_forward(self, block: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        self.trim_if_grown()
        output.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self.trim_if_grown()

    def trim_if_grown(self) -> None:
        """Trim where the process is much larger than it needed to be until now."""
        growth = self._measure_bytes() - self._most_bytes_needed
        if growth <= max(MOST_GROWTH * self._most_bytes_needed, LEAST_BYTES):
            return
        self._trim()
        self._most_bytes_needed = max(self._most_bytes_needed, self._measure_bytes())


def trim_between_blocks(model: Transformer, memory: MemorySection, device: torch.device) -> None:
    """Have the heap trimmed between the blocks of `model` on a CPU, where the C library can.

    Blocks that are compiled are left as they are: the compiler would trace the hooks.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if device.type != "cpu" or memory.compile_model or malloc_trim is None:
        return
    process = psutil.Process()
    trimmer = HeapTrimmer(
        trim=lambda: malloc_trim(0),
        measure_bytes=lambda: process.memory_info().rss,
    )
    for block in model.blocks.values():
        trimmer.hook_block(block)

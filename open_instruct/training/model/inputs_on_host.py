"""Inputs of recomputed blocks wait in host memory from the forward pass to the backward pass.

A recomputed block saves only its input. A separate stream copies the input out while the block
runs, and back while the next block runs backward, so the host waits for neither. The last block's
input never leaves the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from open_instruct.config.sharding_sections import MemorySection
from open_instruct.models.shards import local_part


@dataclass(eq=False, slots=True)
class BlockInput:
    """One input of a block, of which this rank has a local part."""

    buffer: torch.Tensor
    """The buffer in host memory; it may be larger than the input."""

    on_host: torch.Tensor
    """The local part, in the buffer."""

    on_device: torch.Tensor | None
    make_whole: Callable[[torch.Tensor], torch.Tensor]
    """Makes the block's input from the local part."""

    copied: Any = None
    """The event after the last copy, out or back."""


class InputsOnHost:
    """Moves the tensors that blocks save for the backward pass to pinned host buffers.

    One stream makes all copies in order, so a buffer is free for another input as soon as its copy
    back has been queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream()
        self._inputs: list[BlockInput] = []
        self._free_buffers: list[torch.Tensor] = []

    def hook_block(self, block: torch.nn.Module) -> None:
        """Move the tensors that `block` saves in its forward passes."""
        hooks = saved_tensors_hooks(self.pack, self.unpack)
        block.register_forward_pre_hook(lambda *_: hooks.__enter__())
        block.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True)

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> BlockInput | torch.Tensor:
        if tensor.device.type != self._device.type or tensor.numel() == 0:
            return tensor
        if self._inputs:
            # The previous block has run. Its input's memory may be reused, by work that is queued
            # behind the copy.
            before = self._inputs[-1]
            self._streams.current_stream().wait_event(before.copied)
            before.on_device = None
        local = local_part(tensor.detach())
        buffer = self._take_buffer(local.nbytes)
        on_host = buffer[: local.nbytes].view(local.dtype).view(local.shape)
        block_input = BlockInput(
            buffer=buffer,
            on_host=on_host,
            on_device=local,
            make_whole=_find_inverse(tensor),
        )
        self._copy(block_input, into=on_host, source=local)
        self._inputs.append(block_input)
        return block_input

    @torch.no_grad()
    def unpack(self, block_input: BlockInput | torch.Tensor) -> torch.Tensor:
        if isinstance(block_input, torch.Tensor):
            return block_input
        position = self._inputs.index(block_input)
        del self._inputs[position]
        local = self._fetch(block_input)
        self._streams.current_stream().wait_event(block_input.copied)
        block_input.on_device = None
        self._free_buffers.append(block_input.buffer)
        if position:
            self._fetch(self._inputs[position - 1])
        return block_input.make_whole(local)

    def _fetch(self, block_input: BlockInput) -> torch.Tensor:
        if block_input.on_device is None:
            block_input.on_device = torch.empty_like(block_input.on_host, device=self._device)
            self._copy(block_input, into=block_input.on_device, source=block_input.on_host)
        return block_input.on_device

    def _copy(self, block_input: BlockInput, *, into: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            into.copy_(source, non_blocking=True)
        block_input.copied = self._stream.record_event()

    def _take_buffer(self, num_bytes: int) -> torch.Tensor:
        if self._free_buffers:
            buffer = self._free_buffers.pop()
            if buffer.numel() >= num_bytes:
                return buffer
        size = 1 << (num_bytes - 1).bit_length()  # PyTorch pins memory by powers of two
        is_pinned = self._device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def offload_inputs(model: Transformer, memory: MemorySection, device: torch.device) -> None:
    """Move the inputs of all blocks, which are recomputed, to host memory.

    That is done only if the flags say so, and on CUDA.
    """
    if memory.activation_checkpointing == "offload" and device.type == "cuda":
        inputs = InputsOnHost(device)
        for block in model.blocks.values():
            inputs.hook_block(block)


def _find_inverse(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from this rank's local part of `tensor` back to a tensor (or DTensor) like it."""
    if not isinstance(tensor, DTensor):
        return lambda local: local
    return partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )

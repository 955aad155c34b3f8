"""Inputs of recomputed blocks wait in host memory from the forward pass to the backward pass.

A recomputed block saves only its input. A separate stream copies the input out while the block
runs, and back while the next block runs backward, so the host waits for neither. The last block's
input never leaves the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from open_instruct.config.sharding_sections import MemorySection
from open_instruct.models.shards import local_part


@dataclass(eq=False, slots=True)
class Kept:
    """One input.

    `copied`: the event after its last copy, out or back; `whole_of`: makes the block's input from
    it.
    """

    host: torch.Tensor
    shown_as: torch.Tensor
    on_device: torch.Tensor | None
    whole_of: Callable[[torch.Tensor], torch.Tensor]
    copied: Any = None


class InputsOnHost:
    """Moves the tensors that blocks save for the backward pass to pinned host buffers, which are
    reused.

    One stream makes all copies in order, so a buffer is free as soon as its copy back has been
    queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream()
        self._kept: list[Kept] = []
        self._free: list[torch.Tensor] = []

    def around(self, block: torch.nn.Module) -> None:
        """Keep the tensors that `block` saves in its forward passes."""
        hooks = saved_tensors_hooks(self.pack, self.unpack)
        block.register_forward_pre_hook(lambda *_: hooks.__enter__())
        block.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True)

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> Kept | torch.Tensor:
        if tensor.device.type != self._device.type or tensor.numel() == 0:
            return tensor
        if self._kept:
            # The previous block has run. Its input's memory may be reused, by work that is queued
            # behind the copy.
            self._streams.current_stream().wait_event(self._kept[-1].copied)
            self._kept[-1].on_device = None
        local = local_part(tensor.detach())
        host = self._buffer(local.nbytes)
        shown_as = host[: local.nbytes].view(local.dtype).view(local.shape)
        kept = Kept(host=host, shown_as=shown_as, on_device=local, whole_of=_whole_of(tensor))
        self._copy(kept, into=shown_as, source=local)
        self._kept.append(kept)
        return kept

    @torch.no_grad()
    def unpack(self, kept: Kept | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        place = self._kept.index(kept)
        del self._kept[place]
        local = self._fetched(kept)
        self._streams.current_stream().wait_event(kept.copied)
        kept.on_device = None
        self._free.append(kept.host)
        if place:
            self._fetched(self._kept[place - 1])
        return kept.whole_of(local)

    def _fetched(self, kept: Kept) -> torch.Tensor:
        if kept.on_device is None:
            kept.on_device = torch.empty_like(kept.shown_as, device=self._device)
            self._copy(kept, into=kept.on_device, source=kept.shown_as)
        return kept.on_device

    def _copy(self, kept: Kept, *, into: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            into.copy_(source, non_blocking=True)
        kept.copied = self._stream.record_event()

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.numel() < num_bytes:
            # PyTorch pins memory by powers of two.
            size, is_pinned = 1 << (num_bytes - 1).bit_length(), self._device.type == "cuda"
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return buffer


def offload_inputs(model: Transformer, memory: MemorySection, device: torch.device) -> None:
    """Keep the inputs of all blocks, which are recomputed, in host memory, if the flags say so and
    there is CUDA.
    """
    if memory.activation_checkpointing == "offload" and device.type == "cuda":
        inputs = InputsOnHost(device)
        for block in model.blocks.values():
            inputs.around(block)


def _whole_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from this rank's local part of `tensor` back to a tensor (or DTensor) like it."""
    if not isinstance(tensor, DTensor):
        return lambda local: local
    mesh, placements, shape, stride = (
        tensor.device_mesh,
        tensor.placements,
        tensor.shape,
        tensor.stride(),
    )
    return lambda local: DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )

"""What lets a checkpoint be written while the training goes on: a thread, and copies that nobody changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")

Way = Callable[[Callable[[], T]], Future[T]]
"""A way of having work done: `at_once` or `in_background`."""


def at_once(work: Callable[[], T]) -> Future[T]:
    """What comes of `work`, done here and now."""
    outcome: Future[T] = Future()
    _do(work, outcome)
    return outcome


def in_background(work: Callable[[], T]) -> Future[T]:
    """What will come of `work`, done in a thread that no end of the process waits for.

    On the caller's GPU: a thread begins on the first one, where what it calls would make a context, half a GiB a rank.
    """
    outcome: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def on_device() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return work()

    threading.Thread(target=_do, args=(on_device, outcome), daemon=True, name="checkpoint").start()
    return outcome


def _do(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)


class HostCopies:
    """Copies of a run's tensors in host memory, which is kept: pages that were touched once cost nothing again."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of all of `tensors`, in their order. Those of the last call change: nobody may read them still.

        From a GPU they come beside what it computes, on a stream of their own.
        """
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        stream = None if device is None else torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream(device))
            for name, tensor in tensors.items():
                copy = self._copies.get(name)
                if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=stream is not None)
                    self._copies[name] = copy
                copy.copy_(tensor, non_blocking=True)
        if stream is not None:
            stream.synchronize()
        return {name: self._copies[name] for name in tensors}

"""A thread and copies in host memory, with which a checkpoint is written during training."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Do `work` in a thread, and return the future of its result.

    The thread takes the caller's GPU: by default it would use the first GPU, and make a context of
    half a GiB there.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    device = -1  # `set_device` ignores it
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()

    def on_device() -> T:
        torch.cuda.set_device(device)
        return work()

    outcome = executor.submit(on_device)
    executor.shutdown(wait=False)
    return outcome


@torch.no_grad()
def copy_to_host(
    tensors: Mapping[str, torch.Tensor], copies: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copy all of `tensors` to host memory; returns the copies in the same order.

    They overwrite the `copies` of the last call, as pages that were touched once cost nothing
    again. A GPU copies on another stream, while it goes on computing.
    """
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    stream: torch.cuda.Stream | None = None
    if device is not None:
        stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream(device))
        for name, tensor in tensors.items():
            copy = copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=stream is not None
                )
                copies[name] = copy
            copy.copy_(tensor, non_blocking=True)
    if stream is not None:
        stream.synchronize()
    return {name: copies[name] for name in tensors}

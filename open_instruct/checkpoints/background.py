"""A thread, and copies in host memory, let a checkpoint be written while the training goes on."""

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
    # Which `set_device` passes over.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

    def on_device() -> T:
        torch.cuda.set_device(device)
        return work()

    outcome = executor.submit(on_device)
    executor.shutdown(wait=False)
    return outcome


@torch.no_grad()
def copied_to_host(
    tensors: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies of all of `tensors` in host memory, in their order. They overwrite those `kept` from
    the last call.

    Pages that were touched once cost nothing again. A GPU makes the copies on a stream of their
    own, while it goes on computing.
    """
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    stream = None if device is None else torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream(device))
        for name, tensor in tensors.items():
            copy = kept.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=stream is not None
                )
                kept[name] = copy
            copy.copy_(tensor, non_blocking=True)
    if stream is not None:
        stream.synchronize()
    return {name: kept[name] for name in tensors}

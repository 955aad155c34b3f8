"""Tensors that are alive at the same time, on fake tensors."""

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill_runs.heads import step_of


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that were made under it and are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def gone(_: Any) -> None:
            del self.storages[key]
            self.bytes -= size

        self.storages[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def counted(way: str, num_tokens: int, width: int) -> int:
    """Bytes of the tensors that are alive at the worst moment, beyond those before."""
    with FakeTensorMode():
        step = step_of(way, num_tokens, width, "bfloat16")
        with Alive() as alive:
            step()
    return int(alive.peak)

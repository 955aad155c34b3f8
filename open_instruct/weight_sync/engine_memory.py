"""An engine's memory on a CPU, given up and taken again by methods that vLLM's worker gets.

On CUDA vLLM does it itself (`sleep` and `wake_up`); its CPU build has neither. There the storages
of weights and of the cache are emptied and filled again in place, as whatever refers to them has to
go on to. Weights that its kernels have packed for themselves are dropped, and packed anew when the
weights that come are loaded. What stays: buffers, such as sines and cosines, and vLLM itself.
"""

from typing import Any, Literal, NoReturn

import torch

from open_instruct.models.storages import list_nested_tensors, view_storages

MemoryPart = Literal["weights", "kv_cache"]
"""The tags by which vLLM wakes up a part of an engine."""

MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")


class EngineMemory:
    """Methods of a worker; `self` is the worker, and nothing may be computed in between."""

    def release_memory(self: Any) -> int:
        """Give up weights and cache; returns how many bytes of tensors that were."""
        model = self.model_runner.get_model()
        tensors = {
            "weights": list(model.parameters()),
            "kv_cache": list(list_nested_tensors(self.model_runner.kv_caches)),
        }
        self.absent_bytes: dict[str, list[torch.Tensor]] = {}
        num_bytes = 0
        for part, listed in tensors.items():
            flats = view_storages(listed, self.device)
            num_bytes += sum(flat.numel() for flat in flats)
            self.absent_bytes[part] = flats
            for flat in flats:
                flat.untyped_storage().resize_(0)
        for layer in model.modules():
            if hasattr(layer, "cpu_linear"):
                layer.cpu_linear = _refuse_to_compute
        return num_bytes

    def take_memory(self: Any, part: MemoryPart) -> None:
        """Take the memory of one part again; what is in it is of no use before it is written."""
        for flat in self.absent_bytes.pop(part):
            flat.untyped_storage().resize_(flat.numel())
            if part == "kv_cache":
                flat.zero_()


def _refuse_to_compute(*inputs: torch.Tensor) -> NoReturn:
    raise RuntimeError("this engine has given up its weights, and was sent no others")

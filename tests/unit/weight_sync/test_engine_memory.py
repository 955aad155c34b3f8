"""An engine's worker on a CPU gives up its weights and its cache, and takes their memory again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from open_instruct.weight_sync.engine_memory import EngineMemory


class Worker(EngineMemory):
    """A worker of a model with a packed layer, a tied one and a buffer, and of a cache."""

    def __init__(self) -> None:
        model = nn.Module()
        model.linear = nn.Linear(8, 4)
        packed = model.linear.weight.detach().clone()
        model.linear.cpu_linear = lambda x, weight, bias: x @ packed.T  # type: ignore[assignment]
        model.head = nn.Linear(8, 4, bias=False)
        model.head.weight = model.linear.weight
        model.register_buffer("positions", torch.arange(5.0))
        self.model: Any = model
        caches = [torch.ones(2, 16), [torch.ones(3), torch.ones(3)]]
        self.model_runner = SimpleNamespace(get_model=lambda: model, kv_caches=caches)
        self.device = torch.device("cpu")

    def count_bytes(self) -> dict[str, int]:
        runner = self.model_runner
        return {
            "weights": self.model.linear.weight.untyped_storage().nbytes(),
            "kv_cache": runner.kv_caches[0].untyped_storage().nbytes(),
            "buffer": self.model.positions.untyped_storage().nbytes(),
        }


def test_weights_and_cache_are_given_up_and_buffers_stay() -> None:
    worker = Worker()
    before = worker.count_bytes()
    num_bytes = worker.release_memory()
    assert num_bytes == 4 * (8 * 4 + 4) + 4 * (32 + 3 + 3)  # tied weights count once
    assert worker.count_bytes() == {"weights": 0, "kv_cache": 0, "buffer": before["buffer"]}
    with pytest.raises(RuntimeError, match="has given up its weights"):
        worker.model.linear.cpu_linear(torch.ones(8), None, None)
    worker.take_memory("weights")
    assert worker.count_bytes() == before | {"kv_cache": 0}
    worker.take_memory("kv_cache")
    assert worker.count_bytes() == before
    assert not any(cache.any() for cache in worker.model_runner.kv_caches[1])
    worker.model.linear.weight.data.fill_(2.0)
    assert torch.equal(worker.model.head.weight, torch.full((4, 8), 2.0))  # still tied

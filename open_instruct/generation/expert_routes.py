"""The experts that layers choose for tokens, recorded where vLLM does not report them (on a CPU).

They lie in slots, as the keys and values of the tokens do: what requests share, and what is
computed again or overwritten there, is so here.

Legend: N blocks of the cache, S slots of a block, L layers, K experts of a token, T tokens of a
step.
"""

from functools import partial
from typing import Any

import numpy as np
import torch


def record_routes(worker: Any) -> None:
    """Begin to record the experts that a vLLM worker's layers choose.

    vLLM refuses a model whose layers do not report them.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    runner = worker.model_runner
    cache = runner.kv_cache_config
    model = runner.model_config
    slots = (cache.num_blocks, cache.kv_cache_groups[0].kv_cache_spec.block_size)
    experts = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
    worker.routes_NSLK = torch.full(slots + experts, -1, dtype=torch.int16)
    # vLLM calls a capturer's `capture`; the worker is one from here on.
    worker.capture = partial(_record_step, worker.routes_NSLK.flatten(0, 1))
    bind_routed_experts_capturer(runner.get_model(), worker)


def _record_step(routes_SLK: torch.Tensor, layer: int, experts_TK: torch.Tensor) -> None:
    """Write one layer's choices into the slots of the step's tokens (S: slots of all blocks)."""
    from vllm.forward_context import get_forward_context

    metadata: Any = get_forward_context().attn_metadata
    layer_metadata = next(iter(metadata.values()))
    slots_T = layer_metadata.slot_mapping[: len(experts_TK)]
    routes_SLK[slots_T, layer] = experts_TK.short()


def read_routes(worker: Any, key: int) -> np.ndarray:
    """The recorded experts of a request in the last step: int16, shape (tokens fed, L, K)."""
    runner = worker.model_runner
    for name in runner.input_batch.req_ids:
        if name.rpartition("-")[0] == str(key):  # vLLM adds some letters of its own
            request = runner.requests[name]
            routes_SLK = worker.routes_NSLK[request.block_ids[0]].flatten(0, 1)
            return routes_SLK[: request.num_tokens - 1].numpy()
    return worker.routes_NSLK[0, :0].numpy()

"""The experts that an engine's layers choose for its tokens, where vLLM does not tell them: on a CPU.

They lie in slots as the keys and values of the tokens do: what is shared among requests, computed anew or overwritten
there is so here.

Legend: N blocks of the cache, S slots of a block, L layers, K experts of a token, T tokens of a step.
"""

from functools import partial
from typing import Any

import numpy as np
import torch


def note_routes(worker: Any) -> None:
    """Begin to note the experts that the layers of a vLLM worker choose; vLLM refuses layers that do not tell them."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

    runner = worker.model_runner
    cache, model = runner.kv_cache_config, runner.model_config
    slots = (cache.num_blocks, cache.kv_cache_groups[0].kv_cache_spec.block_size)
    experts = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
    worker.routes_NSLK = torch.full(slots + experts, -1, dtype=torch.int16)
    worker.capture = partial(_note, worker.routes_NSLK.flatten(0, 1))  # what vLLM asks of a capturer
    bind_routed_experts_capturer(runner.get_model(), worker)


def _note(routes_SLK: torch.Tensor, layer: int, experts_TK: torch.Tensor) -> None:
    """:param routes_SLK: those of the slots of all blocks."""
    from vllm.forward_context import get_forward_context

    metadata: Any = get_forward_context().attn_metadata
    routes_SLK[next(iter(metadata.values())).slot_mapping[: len(experts_TK)], layer] = experts_TK.short()


def routes_of(worker: Any, key: int) -> np.ndarray:
    """What is noted of a request that had part in the last step: int16, (tokens that were fed, L, K)."""
    runner = worker.model_runner
    for name in runner.input_batch.req_ids:
        if name.rpartition("-")[0] == str(key):  # vLLM adds some letters of its own
            request = runner.requests[name]
            return worker.routes_NSLK[request.block_ids[0]].flatten(0, 1)[: request.num_tokens - 1].numpy()
    return worker.routes_NSLK[0, :0].numpy()

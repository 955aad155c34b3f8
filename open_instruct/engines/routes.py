"""The experts that an engine's layers choose for its tokens, where vLLM does not tell them: on a CPU.

They lie in slots as the keys and values of the tokens do: what is shared among requests, computed anew or overwritten
there is so here.

Legend: N blocks of the cache, S slots of a block, L layers, K experts of a token, T tokens of a step.
"""

from functools import partial
from typing import Any

import torch


def note_routes(worker: Any) -> None:
    """Begin to note the experts that the layers of a vLLM worker choose."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runner = worker.model_runner
    sparse = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
    num_layers = runner.model_config.get_total_num_hidden_layers()
    cache = runner.kv_cache_config
    sizes = (cache.num_blocks, cache.kv_cache_groups[0].kv_cache_spec.block_size, num_layers, sparse[0].router.top_k)
    worker.routes_NSLK = torch.full(sizes, -1, dtype=torch.int16)
    for layer in sparse:
        layer.router.set_capture_fn(partial(_note, worker.routes_NSLK.flatten(0, 1)[:, layer.layer_id]))


def _note(routes_SK: torch.Tensor, experts_TK: torch.Tensor) -> None:
    """:param routes_SK: those of a layer, of the slots of all blocks."""
    from vllm.forward_context import get_forward_context

    metadata: Any = get_forward_context().attn_metadata
    routes_SK[next(iter(metadata.values())).slot_mapping[: len(experts_TK)]] = experts_TK.short()


def routes_of(worker: Any, key: int) -> bytes:
    """What is noted of a request that had part in the last step: int16, (tokens that were fed, L, K)."""
    runner = worker.model_runner
    for name in runner.input_batch.req_ids:
        if name.rpartition("-")[0] == str(key):  # vLLM adds some letters of its own
            request = runner.requests[name]
            return bytes(worker.routes_NSLK[request.block_ids[0]].flatten(0, 1)[: request.num_tokens - 1].numpy())
    return b""

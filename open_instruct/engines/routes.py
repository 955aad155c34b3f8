"""The experts that an engine's layers choose for its tokens, where vLLM does not tell them: on a CPU.

They lie in slots as the keys and values of the tokens do: what is shared among requests, computed anew or overwritten
there is so here.

Legend: S slots of the cache, L layers, K experts of a token, T tokens of a step.
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
    num_slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
    worker.routes_SLK = torch.full((num_slots, num_layers, sparse[0].router.top_k), -1, dtype=torch.int16)
    for layer in sparse:
        layer.router.set_capture_fn(partial(_note, worker.routes_SLK[:, layer.layer_id]))


def _note(routes_SK: torch.Tensor, experts_TK: torch.Tensor) -> None:
    from vllm.forward_context import get_forward_context

    metadata: Any = get_forward_context().attn_metadata
    if metadata is not None:  # there is none where vLLM tries the model, without requests
        slots_T = next(iter(metadata.values())).slot_mapping[: len(experts_TK)]
        routes_SK[slots_T] = experts_TK.short()


def routes_of(worker: Any, key: int) -> bytes:
    """What is noted of the request's tokens that have been computed, if the last step had it: int16, (tokens, L, K)."""
    runner = worker.model_runner
    for name in runner.input_batch.req_ids:
        if name.rpartition("-")[0] == str(key):  # vLLM adds some letters of its own
            request = runner.requests[name]
            size = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            starts = torch.tensor(request.block_ids[0]).unsqueeze(1) * size
            slots = (starts + torch.arange(size)).flatten()[: request.num_tokens - 1]  # the last was not fed
            return worker.routes_SLK[slots].numpy().tobytes()
    return b""

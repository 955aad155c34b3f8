"""Heads that share the embeddings' weights, in a vLLM engine.

A sync sends such a model one tensor for both layers. On CUDA that is enough where both have one
storage. On a CPU vLLM multiplies with a packed copy of the head, and packs anew only the layer that
a tensor was loaded for: the embeddings.
"""

from collections.abc import Iterator
from typing import Any

import torch

from open_instruct.core.errors import RunError


def find_tied_heads(model: torch.nn.Module) -> Iterator[Any]:
    """The heads of a loaded vLLM model whose weights are those of its embeddings."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    addresses = {layer.weight.data_ptr() for layer in layers if layer not in heads}
    for head in heads:
        if head.weight.data_ptr() in addresses:
            yield head


def require_tied_heads(model: torch.nn.Module, *, hf_config: Any) -> None:
    """Check that loading the embeddings of a model with tied embeddings loads its head too.

    Raises:
        RunError: the head has weights of its own, which no sync would reach.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not getattr(hf_config, "tie_word_embeddings", False):
        return
    has_head = any(isinstance(layer, ParallelLMHead) for layer in model.modules())
    if has_head and not any(find_tied_heads(model)):
        raise RunError(
            "config.json ties the head to the embeddings (tie_word_embeddings), and this engine "
            "holds a copy of the head, which would keep the start model's weights for ever. This "
            "is a defect: please report the model, and set tie_word_embeddings to false in a copy "
            "of it that has the head's tensor"
        )


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack tied heads again for the products of a CPU, after their embeddings were loaded."""
    for head in find_tied_heads(model):
        head.quant_method.process_weights_after_loading(head)

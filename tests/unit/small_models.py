"""Models of every family that are small enough for a test of a second, with weights that no norm hides."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from olmo_core.nn.transformer import Transformer

from open_instruct.models.build import build_model

CPU = torch.device("cpu")
VOCAB_SIZE = 89
WINDOW = 7


def hf_config(family: str) -> transformers.PretrainedConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    if family == "olmo3":
        return transformers.Olmo3Config(sliding_window=WINDOW, **fields)
    if family == "olmo2":
        return transformers.Olmo2Config(**fields)
    if family == "qwen3":
        return transformers.Qwen3Config(head_dim=24, **fields)
    return transformers.Qwen2Config(**fields) if family == "qwen2" else transformers.LlamaConfig(**fields)


def with_random_weights(model: Transformer) -> Transformer:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3, generator=generator)
    return model


def new_model(family: str) -> Transformer:
    model = build_model(hf_config(family))
    model.init_weights(device=CPU, max_seq_len=64)
    return with_random_weights(model)


random_model = cache(new_model)

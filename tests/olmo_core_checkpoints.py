"""Tiny checkpoints that OLMo-core itself writes: its model, its config, its writer."""

import json
from pathlib import Path
from typing import Any

import torch
from olmo_core.data.tokenizer import TokenizerConfig
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
from olmo_core.nn.layer_norm import LayerNormType
from olmo_core.nn.rope import YaRNRoPEScalingConfig
from olmo_core.nn.transformer import Transformer, TransformerBlockType, TransformerConfig

from tests.unit.small_models import with_random_weights

VOCAB_SIZE = 256
NUM_TOKENS = 250  # of the tokenizer, whose size OLMo-core rounds up


def make_config(kind: str, *, vocab_size: int = VOCAB_SIZE, **options: Any) -> TransformerConfig:
    """A model of one kind of OLMo-core's, in sizes that no two dims share."""
    kinds: dict[str, dict[str, Any]] = {
        "olmo2": {"block_name": TransformerBlockType.reordered_norm, "qk_norm": True},
        "llama": {"layer_norm_name": LayerNormType.qwen_rms, "rope_full_precision": False},
        "qwen3": {
            "layer_norm_name": LayerNormType.qwen_rms,
            "rope_full_precision": False,
            "qk_norm": True,
            "use_head_qk_norm": True,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
    }
    kinds["olmo3"] = kinds["olmo2"] | {
        "sliding_window": SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
            pattern=[7, 7, 7, -1],
        )
    }
    settings: dict[str, Any] = {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "hidden_size_multiple_of": 16,
        "layer_norm_eps": 1e-6,
        "attn_backend": AttentionBackendName.torch,
        **kinds[kind],
        **options,
    }
    return TransformerConfig.llama_like(vocab_size=vocab_size, **settings)


def scale_full_layers(config: TransformerConfig) -> TransformerConfig:
    """YaRN on the layers without a window, as OLMo 3 is extended to longer texts."""
    scaling = YaRNRoPEScalingConfig(factor=4.0, old_context_len=64)
    return config.with_rope_scaling(scaling, full_attn_layers_only=True)


def write_config(
    folder: Path,
    config: TransformerConfig,
    *,
    identifier: str | None = None,
    num_tokens: int = NUM_TOKENS,
) -> dict[str, Any]:
    """The config.json that OLMo-core's ConfigSaverCallback writes for an experiment."""
    tokenizer = TokenizerConfig(
        vocab_size=num_tokens, eos_token_id=1, pad_token_id=0, identifier=identifier
    )
    fields = {
        "model": config.as_config_dict(),
        "dataset": {"tokenizer": tokenizer.as_config_dict(), "sequence_length": 128},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return fields


def build_stock_model(config: TransformerConfig) -> Transformer:
    """OLMo-core's own model with random weights, tied where its config says so."""
    return with_random_weights(config.build(init_device="cpu"))


def write_checkpoint(folder: Path, config: TransformerConfig, **tokenizer: Any) -> Transformer:
    """Write a checkpoint with the state of an optimizer; returns the model in it."""
    model = build_stock_model(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(6).unsqueeze(0)).square().mean().backward()
    optimizer.step()
    write_config(folder, config, **tokenizer)
    save_model_and_optim_state(folder / "model_and_optim", model, optimizer)
    return model

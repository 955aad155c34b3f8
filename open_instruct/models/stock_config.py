"""The config of OLMo-core's own model that computes what ours does, for checkpoints it opens."""

import math
from typing import Any, NoReturn

from olmo_core.nn.attention import AttentionConfig
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.rope import (
    PIRoPEScalingConfig,
    RoPEConfig,
    RoPEScalingConfig,
    StepwiseRoPEScalingConfig,
    YaRNRoPEScalingConfig,
)
from olmo_core.nn.transformer import TransformerBlockConfig, TransformerConfig
from transformers import PretrainedConfig

from open_instruct.core.errors import InputError
from open_instruct.core.families import find_family
from open_instruct.models.family import RoPEScaling, build_transformer_config
from open_instruct.models.hf.rope import MAX_POSITIONS

SAME = 1e-6  # relative; what a number loses on its way through a file


def build_stock_config(hf_config: PretrainedConfig) -> TransformerConfig:
    """OLMo-core's config of the model, of classes that OLMo-core has.

    The backend of attention is left to OLMo-core, which chooses by what is installed.

    Raises:
        InputError: OLMo-core has no such model; the message names what it lacks.
    """
    family = find_family(hf_config.model_type)
    if family.qkv_bias:
        _refuse(f"{family.name} has biases on queries, keys and values alone")
    config = build_transformer_config(hf_config)
    assert isinstance(config.block, TransformerBlockConfig)
    for block in (config.block, *(config.block_overrides or {}).values()):
        mixer = block.sequence_mixer
        is_plain = type(mixer) is AttentionConfig and type(block.layer_norm) is LayerNormConfig
        if not is_plain or family.expert_size is not None:
            _refuse(f"{family.name} has layers that OLMo-core builds otherwise")
        assert isinstance(mixer, AttentionConfig)
        mixer.backend = None
        if mixer.rope is not None:
            _convert_rope(mixer.rope)
    return config


def _convert_rope(rope: RoPEConfig) -> None:
    if rope.theta != int(rope.theta):
        _refuse(f"RoPE's theta is {rope.theta}, and OLMo-core takes a whole number")
    rope.theta = int(rope.theta)
    if rope.scaling is not None:
        assert isinstance(rope.scaling, RoPEScaling)
        rope.scaling = _convert_scaling(rope.scaling.parameters)


def _convert_scaling(parameters: dict[str, Any]) -> RoPEScalingConfig:
    factor = float(parameters["factor"])
    kind = parameters["rope_type"]
    if kind == "linear":
        return PIRoPEScalingConfig(factor=factor)
    positions = int(parameters[MAX_POSITIONS])
    if kind == "llama3":
        return StepwiseRoPEScalingConfig(
            factor=factor,
            low_freq_proportion=1 - 1 / parameters["low_freq_factor"],
            high_freq_proportion=1 / parameters["high_freq_factor"],
            old_context_len=positions,
        )
    scaling = YaRNRoPEScalingConfig(
        factor=factor,
        beta_fast=int(parameters.get("beta_fast", 32)),
        beta_slow=int(parameters.get("beta_slow", 1)),
        old_context_len=positions,
    )
    usual = scaling.get_attention_rescale_factor()
    stated = parameters.get("attention_factor", usual)
    if not math.isclose(stated, usual, rel_tol=SAME):
        _refuse(f"YaRN's attention_factor is {stated}, and OLMo-core computes {usual:.6g}")
    return scaling


def _refuse(problem: str) -> NoReturn:
    raise InputError(
        f"OLMo-core has no model that computes the same: {problem}; export in Hugging Face's form "
        "alone",
        kind="unsupported_model",
    )

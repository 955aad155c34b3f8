"""Builds OLMo-core's `TransformerConfig` from the config.json of each family of models.

A field of config.json that would change the forward pass and has no counterpart here is refused by
name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.nn.attention import (
    AttentionBackendName,
    AttentionConfig,
    SlidingWindowAttentionConfig,
)
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig
from olmo_core.nn.rope import RoPEConfig, RoPEScalingConfig
from olmo_core.nn.transformer import TransformerBlockConfig, TransformerBlockType, TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

from open_instruct.core.errors import InputError
from open_instruct.core.families import FULL, LINEAR, SLIDING, Family, find_family
from open_instruct.models.attention.gated import GatedAttentionConfig, NormFromZeroConfig
from open_instruct.models.delta_rule.mixer import DeltaRuleConfig
from open_instruct.models.delta_rule.shape import read_delta_shape
from open_instruct.models.experts.routed import ExpertsConfig
from open_instruct.models.hf.config_values import FIELDS, PART_TURNED, check_number, read_size
from open_instruct.models.hf.rope import check_rope_scaling
from open_instruct.models.hf.supported import NO_EXPERTS, REQUIRED_VALUES, check_fields

KNOWN = {*FIELDS["known"], *REQUIRED_VALUES, *NO_EXPERTS}


@dataclass
class RoPEScaling(RoPEScalingConfig):
    """The frequencies that transformers computes from the `rope_parameters` of a config.json."""

    parameters: dict[str, Any]

    def compute_scaled_inv_freq(
        self, theta: int, dim: int, device: torch.device
    ) -> tuple[torch.Tensor, float]:
        """Inverse frequencies of shape (dim / 2,), float32, and the factor on sine and cosine."""
        del theta  # one of the parameters
        config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim)
        # Set here because the class would compare them with the number of positions, which is not
        # known here.
        config.rope_parameters = dict(self.parameters)
        return ROPE_INIT_FUNCTIONS[self.parameters["rope_type"]](config, device)

    def to_hf_config(self) -> dict[str, Any]:
        return dict(self.parameters)


def build_transformer_config(hf_config: PretrainedConfig) -> TransformerConfig:
    """The OLMo-core model that computes what transformers computes for `hf_config`.

    Logits agree with transformers' to 1e-5 in float32. Parameters are float32 (the master weights);
    a lower compute dtype is FSDP's or the caller's business.

    Raises:
        InputError: the family, or a field that changes the forward pass, is not supported; the
            message names the field, its value and what is supported.
    """
    family = find_family(hf_config.model_type)
    check_fields(hf_config, family)

    kind = LayerNormType.rms if family.in_float32 else LayerNormType.qwen_rms
    norm_config = NormFromZeroConfig if family.norms_from_zero else LayerNormConfig
    norm = norm_config(
        name=kind,
        eps=hf_config.rms_norm_eps,
        bias=False,
        dtype=DType.float32,
    )
    layer_types = family.layer_types(
        getattr(hf_config, "layer_types", None), hf_config.num_hidden_layers
    )
    if SLIDING in layer_types:
        read_size(vars(hf_config), "config.json", "sliding_window")
    kinds = [
        (layer_type, family.is_sparse(hf_config, layer))
        for layer, layer_type in enumerate(layer_types)
    ]
    blocks = {kind: _build_block(hf_config, family, norm, *kind) for kind in set(kinds)}
    overrides = {layer: blocks[kind] for layer, kind in enumerate(kinds) if kind != kinds[0]}
    return TransformerConfig(
        d_model=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        n_layers=hf_config.num_hidden_layers,
        block=blocks[kinds[0]],
        block_overrides=overrides or None,
        lm_head=LMHeadConfig(layer_norm=norm, bias=False, dtype=DType.float32),
        dtype=DType.float32,
        tie_word_embeddings=bool(hf_config.tie_word_embeddings),
    )


def find_unknown_fields(hf_config: PretrainedConfig) -> list[str]:
    """Fields of config.json that neither transformers nor this package reads for this family."""
    unknown = []
    for name, value in vars(hf_config).items():
        is_known = name in KNOWN or name.startswith("_") or hasattr(type(hf_config), name)
        if not is_known and value is not None and value is not False:
            unknown.append(name)
    return unknown


def _build_block(
    hf_config: PretrainedConfig,
    family: Family,
    norm: LayerNormConfig,
    layer_type: str,
    is_sparse: bool,
) -> TransformerBlockConfig:
    sliding_window = None
    if layer_type == SLIDING:
        sliding_window = SlidingWindowAttentionConfig(
            pattern=[hf_config.sliding_window],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        )
    mixer: AttentionConfig | DeltaRuleConfig
    if layer_type == LINEAR:
        mixer = DeltaRuleConfig(
            shape=read_delta_shape(
                vars(hf_config), "config.json", is_fused=family.delta == "fused"
            ),
            norm_eps=family.delta_norm_eps or hf_config.rms_norm_eps,
            doubles_rates=family.delta_may_negate and hf_config.linear_allow_neg_eigval,
        )
    else:
        attention_config = GatedAttentionConfig if family.gates_attention else AttentionConfig
        mixer = attention_config(
            n_heads=hf_config.num_attention_heads,
            n_kv_heads=hf_config.num_key_value_heads,
            head_dim=find_head_dim(hf_config),
            bias=family.qkv_bias,
            rope=_build_rope(hf_config, family, layer_type),
            qk_norm=None if family.qk_norm == "none" else norm,
            use_head_qk_norm=family.qk_norm == "head",
            backend=AttentionBackendName.torch,
            sliding_window=sliding_window,
            dtype=DType.float32,
        )
    block_type = TransformerBlockType.default
    if family.norm_after and layer_type != LINEAR:
        block_type = TransformerBlockType.reordered_norm
    return TransformerBlockConfig(
        name=block_type,
        sequence_mixer=mixer,
        feed_forward=_build_feed_forward(hf_config, family, is_sparse),
        layer_norm=norm,
    )


def _build_feed_forward(
    hf_config: PretrainedConfig, family: Family, is_sparse: bool
) -> FeedForwardConfig:
    if not is_sparse or family.expert_size is None:
        return FeedForwardConfig(
            hidden_size=hf_config.intermediate_size, bias=False, dtype=DType.float32
        )
    return ExpertsConfig(
        hidden_size=getattr(hf_config, family.expert_size),
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        normalized=bool(hf_config.norm_topk_prob),
    )


def find_head_dim(hf_config: PretrainedConfig) -> int:
    """The size of an attention head; not always hidden_size / num_attention_heads (Qwen 3)."""
    stated: int | None = getattr(hf_config, "head_dim", None)
    return stated or hf_config.hidden_size // hf_config.num_attention_heads


def _build_rope(hf_config: PretrainedConfig, family: Family, layer_type: str) -> RoPEConfig | None:
    """The RoPE of layers of one type; None where they have no positions.

    transformers keeps one set of parameters for all layers, or (OLMo 3) one for each layer type.
    """
    parameters = hf_config.rope_parameters or {}
    where = "rope_parameters"
    if FULL in parameters or SLIDING in parameters:
        parameters = parameters.get(layer_type)
        where = f"rope_parameters.{layer_type}"
    if not isinstance(parameters, dict):
        raise InputError(
            f"config.json: {where} = {parameters!r}; an object with rope_theta is needed",
            kind="bad_model",
        )
    if family.may_not_turn and parameters.get("rope_theta") is None:
        return None
    part = parameters.get(PART_TURNED, 1.0) if family.turned_share else 1.0
    head_dim = find_head_dim(hf_config)
    num_turned = int(head_dim * check_number(f"{where}.{PART_TURNED}", part))
    if num_turned not in range(2, head_dim + 1, 2):
        raise InputError(
            f"config.json: {where}.{PART_TURNED} = {part!r} of a head is no even number of "
            "features",
            kind="unsupported_model",
        )
    scaling_numbers = check_rope_scaling(parameters, where, family)
    scaling = None
    if scaling_numbers is not None:
        scaling = RoPEScaling(parameters=scaling_numbers)
    return RoPEConfig(
        theta=check_number(f"{where}.rope_theta", parameters.get("rope_theta"), above=1),
        full_precision=family.in_float32,
        scaling=scaling,
        partial_rotary_factor=part,
    )

"""Each family of Hugging Face models as an OLMo-core `TransformerConfig`.

A field of config.json that would change the forward pass and has no counterpart here is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.nn.attention import AttentionBackendName, AttentionConfig, SlidingWindowAttentionConfig
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig
from olmo_core.nn.rope import RoPEConfig, RoPEScalingConfig
from olmo_core.nn.transformer import TransformerBlockConfig, TransformerBlockType, TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

from open_instruct.errors import InputError
from open_instruct.families import FULL, LINEAR, MAX_EXPERTS, SLIDING, Family, family_of
from open_instruct.models.attention.gated import GatedAttentionConfig, NormFromZeroConfig
from open_instruct.models.delta_rule.mixer import DeltaRuleConfig
from open_instruct.models.delta_rule.shape import delta_shape
from open_instruct.models.experts.routed import ExpertsConfig
from open_instruct.models.hf.hf_config import FIELDS, PART_TURNED, check_multiple, check_number, check_size, size_of

ROWS_OF = 8  # values of 16 bits
HEAD_DIM = "head_dim (else hidden_size / num_attention_heads)"

REQUIRED_VALUES, NO_EXPERTS, ROPE_NUMBERS = (FIELDS[name] for name in ("required", "no_experts", "rope"))
KNOWN = {*FIELDS["known"], *REQUIRED_VALUES, *NO_EXPERTS}


@dataclass
class RoPEScaling(RoPEScalingConfig):
    """The frequencies that transformers computes from the `rope_parameters` of a config.json."""

    parameters: dict[str, Any]

    def compute_scaled_inv_freq(self, theta: int, dim: int, device: torch.device) -> tuple[torch.Tensor, float]:
        """Inverse frequencies of shape (dim / 2,), float32, and the factor on sine and cosine."""
        del theta  # one of the parameters
        config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim)
        # Set here because the class would compare them with the number of positions, which is not known here.
        config.rope_parameters = dict(self.parameters)
        return ROPE_INIT_FUNCTIONS[self.parameters["rope_type"]](config, device)

    def to_hf_config(self) -> dict[str, Any]:
        return dict(self.parameters)


def transformer_config(hf_config: PretrainedConfig) -> TransformerConfig:
    """The OLMo-core model that computes what transformers computes for `hf_config`.

    Logits agree with transformers' to 1e-5 in float32. Parameters are float32 (the master weights);
    a lower compute dtype is FSDP's or the caller's business.

    Raises:
        InputError: the family, or a field that changes the forward pass, is not supported; the message
            names the field, its value and what is supported.
    """
    family = family_of(hf_config.model_type)
    _check_fields(hf_config, family)

    kind = LayerNormType.rms if family.in_float32 else LayerNormType.qwen_rms
    norm_config = NormFromZeroConfig if family.norms_from_zero else LayerNormConfig
    norm = norm_config(name=kind, eps=hf_config.rms_norm_eps, bias=False, dtype=DType.float32)
    layer_types = family.layer_types(getattr(hf_config, "layer_types", None), hf_config.num_hidden_layers)
    if SLIDING in layer_types:
        size_of(vars(hf_config), "config.json", "sliding_window")
    kinds = [(layer_type, family.is_sparse(hf_config, layer)) for layer, layer_type in enumerate(layer_types)]
    blocks = {kind: _block(hf_config, family, norm, *kind) for kind in set(kinds)}
    return TransformerConfig(
        d_model=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        n_layers=hf_config.num_hidden_layers,
        block=blocks[kinds[0]],
        block_overrides={layer: blocks[kind] for layer, kind in enumerate(kinds) if kind != kinds[0]} or None,
        lm_head=LMHeadConfig(layer_norm=norm, bias=False, dtype=DType.float32),
        dtype=DType.float32,
        tie_word_embeddings=bool(hf_config.tie_word_embeddings),
    )


def unknown_fields(hf_config: PretrainedConfig) -> list[str]:
    """Fields of config.json that neither transformers nor this package reads for this family."""
    given = (name for name, value in vars(hf_config).items() if value is not None and value is not False)
    unknown = (name for name in given if name not in KNOWN and not hasattr(type(hf_config), name))
    return [name for name in unknown if not name.startswith("_")]


def _check_fields(hf_config: PretrainedConfig, family: Family) -> None:
    # In families without windows, transformers gives all layers a window by this field alone.
    required = REQUIRED_VALUES if family.has_windows else REQUIRED_VALUES | {"sliding_window": (None,)}
    if family.turned_share:  # which is in rope_parameters then, too
        required = {field: values for field, values in required.items() if field != PART_TURNED}
    required = required | {"attn_output_gate": (family.gates_attention, None)}  # which engines read
    if family.expert_size is None:
        required = required | NO_EXPERTS
    else:
        _check_experts(hf_config, family.expert_size)
    for field, supported in required.items():
        value = getattr(hf_config, field, supported[0])
        if value not in supported:
            problem = f"{field} = {value!r} is not supported for {hf_config.model_type!r}"
            others = " or ".join(repr(value) for value in supported if value is not None)
            raise InputError(f"config.json: {problem}; supported: {others or 'absent'}", kind="unsupported_model")
    check_number("rms_norm_eps", hf_config.rms_norm_eps)
    if check_size(HEAD_DIM, head_dim(hf_config), "config.json") % 2:
        raise InputError(
            f"config.json: {HEAD_DIM} = {head_dim(hf_config)} is odd, and RoPE turns pairs", kind="bad_model"
        )
    num_heads, num_kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    check_multiple("config.json", num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)


def _check_experts(hf_config: PretrainedConfig, expert_size: str) -> None:
    where = "config.json"
    num_experts = check_size("num_experts", hf_config.num_experts, where, MAX_EXPERTS)
    check_size("num_experts_per_tok", hf_config.num_experts_per_tok, where, num_experts)
    check_size("decoder_sparse_step", getattr(hf_config, "decoder_sparse_step", 1), where)
    for field in (expert_size, "hidden_size"):
        if check_size(field, getattr(hf_config, field), where) % ROWS_OF:
            raise InputError(
                f"{where}: {field} = {getattr(hf_config, field)} is not a multiple of {ROWS_OF}: the product of tokens "
                "with their experts takes rows of 16 bytes and multiples of that",
                kind="unsupported_model",
            )
    if hf_config.output_router_logits:
        check_number("router_aux_loss_coef (output_router_logits = true)", hf_config.router_aux_loss_coef)


def _block(
    hf_config: PretrainedConfig, family: Family, norm: LayerNormConfig, layer_type: str, is_sparse: bool
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
            shape=delta_shape(vars(hf_config), "config.json", is_fused=family.delta == "fused"),
            norm_eps=family.delta_norm_eps or hf_config.rms_norm_eps,
            doubles_rates=family.delta_may_negate and hf_config.linear_allow_neg_eigval,
        )
    else:
        mixer = (GatedAttentionConfig if family.gates_attention else AttentionConfig)(
            n_heads=hf_config.num_attention_heads,
            n_kv_heads=hf_config.num_key_value_heads,
            head_dim=head_dim(hf_config),
            bias=family.qkv_bias,
            rope=_rope(hf_config, family, layer_type),
            qk_norm=None if family.qk_norm == "none" else norm,
            use_head_qk_norm=family.qk_norm == "head",
            backend=AttentionBackendName.torch,
            sliding_window=sliding_window,
            dtype=DType.float32,
        )
    norm_after = family.norm_after and layer_type != LINEAR
    return TransformerBlockConfig(
        name=TransformerBlockType.reordered_norm if norm_after else TransformerBlockType.default,
        sequence_mixer=mixer,
        feed_forward=_feed_forward(hf_config, family, is_sparse),
        layer_norm=norm,
    )


def _feed_forward(hf_config: PretrainedConfig, family: Family, is_sparse: bool) -> FeedForwardConfig:
    if not is_sparse or family.expert_size is None:
        return FeedForwardConfig(hidden_size=hf_config.intermediate_size, bias=False, dtype=DType.float32)
    return ExpertsConfig(
        hidden_size=getattr(hf_config, family.expert_size),
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        normalized=bool(hf_config.norm_topk_prob),
    )


def head_dim(hf_config: PretrainedConfig) -> int:
    """Size of one attention head; Qwen 3 gives it apart from hidden_size / num_attention_heads."""
    given: int | None = getattr(hf_config, "head_dim", None)
    return given or hf_config.hidden_size // hf_config.num_attention_heads


def _rope(hf_config: PretrainedConfig, family: Family, layer_type: str) -> RoPEConfig | None:
    # transformers keeps one set of parameters for all layers, or (OLMo 3) one for each layer type.
    parameters = hf_config.rope_parameters or {}
    where = "rope_parameters"
    if FULL in parameters or SLIDING in parameters:
        parameters = parameters.get(layer_type)
        where = f"rope_parameters.{layer_type}"
    if not isinstance(parameters, dict):
        raise InputError(
            f"config.json: {where} = {parameters!r}; an object with rope_theta is needed", kind="bad_model"
        )
    if family.may_not_turn and parameters.get("rope_theta") is None:
        return None
    part = parameters.get(PART_TURNED, 1.0) if family.turned_share else 1.0
    num_turned = int(head_dim(hf_config) * check_number(f"{where}.{PART_TURNED}", part))
    if num_turned not in range(2, head_dim(hf_config) + 1, 2):
        raise InputError(
            f"config.json: {where}.{PART_TURNED} = {part!r} of a head is no even number of features",
            kind="unsupported_model",
        )
    return RoPEConfig(
        theta=check_number(f"{where}.rope_theta", parameters.get("rope_theta"), above=1),
        full_precision=family.in_float32,
        scaling=_rope_scaling(parameters, where, family),
        partial_rotary_factor=part,
    )


def _rope_scaling(parameters: Mapping[str, Any], where: str, family: Family) -> RoPEScaling | None:
    rope_type = parameters.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in ROPE_NUMBERS:
        supported = ", ".join(map(repr, ROPE_NUMBERS))
        raise InputError(
            f"config.json: {where}.rope_type = {rope_type!r} is not supported; supported: {supported}",
            kind="unsupported_model",
        )
    neutral = {"rope_type": (rope_type,), "type": (rope_type,), PART_TURNED: (1,), "truncate": (True,)}
    read_elsewhere = {"rope_theta", *((PART_TURNED, *FIELDS["rope_of_pictures"]) if family.turned_share else ())}
    for field, value in parameters.items():
        known = field in read_elsewhere or field in ROPE_NUMBERS[rope_type]
        if not known and value is not None and value not in neutral.get(field, ()):
            raise InputError(
                f"config.json: {where}.{field} = {value!r} is not supported with rope_type {rope_type!r}",
                kind="unsupported_model",
            )
    if rope_type == "default":
        return None
    used: dict[str, Any] = {"rope_type": rope_type, "rope_theta": parameters["rope_theta"]}
    for field in ROPE_NUMBERS[rope_type]:
        value = parameters.get(field)
        if value is not None or field not in FIELDS["rope_optional"]:
            above = 1 if field == "original_max_position_embeddings" else 0
            used[field] = check_number(f"{where}.{field}", value, above=above)
    if rope_type == "llama3":
        check_number(f"{where}.high_freq_factor", used["high_freq_factor"], above=used["low_freq_factor"])
    return RoPEScaling(parameters=used)

"""Refuses a config.json whose model cannot be trained, before torch is loaded.

A plan, a preview and a run ask alike. A field that would change the forward pass and has no
counterpart here is refused by name. What a file leaves out has the default of the family's class in
transformers, which the run itself asks again once that is loaded.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.families import MAX_EXPERTS, Family, find_family
from open_instruct.models.hf.config_values import (
    FIELDS,
    PART_TURNED,
    check_multiple,
    check_number,
    check_size,
)
from open_instruct.models.hf.rope import check_rope_scaling, read_rope

ROW_VALUES = 8  # of 16 bits each: 16 bytes
HEAD_DIM = "head_dim (else hidden_size / num_attention_heads)"
REQUIRED_VALUES = FIELDS["required"]
NO_EXPERTS = FIELDS["no_experts"]


def check_supported(fields: Mapping[str, Any], where: str = "config.json") -> None:
    """Check the fields of a config.json; `where` stands in a refusal.

    Raises:
        InputError: the family, or a field that changes the forward pass, is not supported, or a
            number is impossible; the message names the field, its value and what is supported.
    """
    family = find_family(fields.get("model_type"), where)
    check_fields(SimpleNamespace(**fields), family, where)
    for layer_type, parameters in read_rope(fields, family, where).items():
        if parameters.get("rope_theta") is None and family.may_not_turn:
            continue
        check_rope_scaling(
            parameters, f"rope_parameters of {layer_type}", family, where=where, is_whole=False
        )
        if parameters.get("rope_theta") is not None:
            check_number("rope_theta", parameters["rope_theta"], where, above=1)


def check_fields(model: Any, family: Family, where: str = "config.json") -> None:
    """Check the attributes of a config, transformers' own or a file's; those of RoPE are not."""
    for field, supported in _required_values(model, family).items():
        value = getattr(model, field, supported[0])
        if not any(
            value is each or (value == each and type(value) is not bool) for each in supported
        ):
            problem = f"{field} = {value!r} is not supported for {model.model_type!r}"
            others = " or ".join(repr(value) for value in supported if value is not None)
            raise InputError(
                f"{where}: {problem}; supported: {others or 'absent'}", kind="unsupported_model"
            )
    if family.expert_size is not None:
        _check_experts(model, family.expert_size, where)
    if getattr(model, "rms_norm_eps", None) is not None:
        check_number("rms_norm_eps", model.rms_norm_eps, where)
    hidden_size = getattr(model, "hidden_size", None)
    num_heads = getattr(model, "num_attention_heads", None)
    num_kv_heads = getattr(model, "num_key_value_heads", None)
    if hidden_size is None or num_heads is None:
        return  # the family's class has them
    check_size("hidden_size", hidden_size, where)
    check_size("num_attention_heads", num_heads, where)
    dim = getattr(model, "head_dim", None) or family.default_head_dim or hidden_size // num_heads
    if check_size(HEAD_DIM, dim, where) % 2:
        raise InputError(
            f"{where}: {HEAD_DIM} = {dim} is odd, and RoPE turns pairs", kind="bad_model"
        )
    if num_kv_heads is not None:
        check_size("num_key_value_heads", num_kv_heads, where)
        check_multiple(where, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)


def _required_values(model: Any, family: Family) -> dict[str, Any]:
    """The values that the forward pass has, by field; a bool is not the same as 0 or 1."""
    required = dict(REQUIRED_VALUES)
    # In families without windows, transformers gives all layers a window by this field alone.
    if not family.has_windows and not family.has_window_switch:
        required["sliding_window"] = (None,)
    if family.turned_share:  # which is in rope_parameters then, too
        del required[PART_TURNED]
    required["attn_output_gate"] = (family.gates_attention, None)  # which engines read
    if not family.expert_size:
        required |= NO_EXPERTS
    return required


def _check_experts(model: Any, expert_size: str, where: str) -> None:
    num_experts = getattr(model, "num_experts", None) or getattr(model, "num_local_experts", None)
    num_experts = check_size("num_experts", num_experts, where, MAX_EXPERTS)
    check_size(
        "num_experts_per_tok", getattr(model, "num_experts_per_tok", None), where, num_experts
    )
    check_size("decoder_sparse_step", getattr(model, "decoder_sparse_step", 1), where)
    for field in (expert_size, "hidden_size"):
        size = check_size(field, getattr(model, field, None), where)
        if size % ROW_VALUES:
            raise InputError(
                f"{where}: {field} = {size} is not a multiple of {ROW_VALUES}: the product of "
                "tokens with their experts takes rows of 16 bytes and multiples of that",
                kind="unsupported_model",
            )
    if getattr(model, "output_router_logits", False):
        factor = getattr(model, "router_aux_loss_coef", 0.001)
        check_number("router_aux_loss_coef (output_router_logits = true)", factor, where)

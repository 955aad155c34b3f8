"""Reads the RoPE of an OLMo-core config.json as Hugging Face's parameters."""

import math
from typing import Any

from open_instruct.models.hf.config_values import check_number
from open_instruct.models.hf.rope import MAX_POSITIONS, THETA
from open_instruct.models.olmo_core.config_section import ConfigSection

DEFAULT_THETA = 500_000


def read_rope_config(rope: ConfigSection, head_dim: int) -> tuple[dict[str, Any], bool]:
    """The parameters of RoPE as transformers has them, and whether it is applied in float32.

    Raises:
        InputError: RoPE, or its scaling, is of a kind that is not supported.
    """
    rope.require("name", "default", default="default")
    rope.require("no_global_rope", False, default=False)
    rope.require("partial_rotary_factor", 1, default=1)
    in_float32 = bool(rope.take("full_precision", True))
    theta = check_number(THETA, rope.take("theta", DEFAULT_THETA), rope.where, above=1)
    scaling = rope.open("scaling")
    rope.finish()
    if scaling is None:
        return {"rope_type": "default", THETA: theta}, in_float32
    parameters = _read_scaling(scaling, theta, head_dim)
    scaling.finish()
    return parameters, in_float32


def _read_scaling(scaling: ConfigSection, theta: float, head_dim: int) -> dict[str, Any]:
    kind = scaling.class_name
    if kind == "YaRNRoPEScalingConfig":
        return _read_yarn(scaling, theta, head_dim)
    scaling.require("attention_rescale_factor", 1, default=1)
    if kind == "ABFRoPEScalingConfig":
        return {"rope_type": "default", THETA: scaling.take("new_theta", 8_000_000)}
    if kind == "PIRoPEScalingConfig":
        return {"rope_type": "linear", THETA: theta, "factor": scaling.take("factor", 2.0)}
    if kind == "StepwiseRoPEScalingConfig":
        low = check_number("1 - low_freq_proportion", 1 - scaling.take("low_freq_proportion", 0.0))
        high = check_number("high_freq_proportion", scaling.take("high_freq_proportion", 0.25))
        return {
            "rope_type": "llama3",
            THETA: theta,
            "factor": scaling.take("factor", 32.0),
            MAX_POSITIONS: scaling.take("old_context_len", 8192),
            "low_freq_factor": 1 / low,
            "high_freq_factor": 1 / high,
        }
    scaling.refuse(f"RoPE scaled by {kind}", "supported: ABF, PI, stepwise and YaRN")


def _read_yarn(scaling: ConfigSection, theta: float, head_dim: int) -> dict[str, Any]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), whose attention factor OLMo-core computes."""
    scaling.pass_over("attention_rescale_factor")  # as OLMo-core does
    factor = check_number("factor", scaling.take("factor", 8.0), scaling.where)
    positions = check_number(MAX_POSITIONS, scaling.take("old_context_len", 8192), scaling.where)
    slow = check_number("beta_slow", scaling.take("beta_slow", 1), scaling.where)
    # The last feature of the ramp. OLMo-core ends it within the head, transformers may not.
    turns = math.log(positions / (slow * 2 * math.pi))
    if math.ceil(head_dim * turns / (2 * math.log(theta))) > head_dim // 2 - 1:
        scaling.refuse(
            f"old_context_len = {positions} with theta = {theta}", "the ramp would end elsewhere"
        )
    return {
        "rope_type": "yarn",
        THETA: theta,
        "factor": factor,
        MAX_POSITIONS: positions,
        "beta_fast": scaling.take("beta_fast", 32),
        "beta_slow": slow,
        "attention_factor": 0.1 * math.log(factor) + 1.0,
    }

"""The shape of a layer of the gated delta rule, from a config.json and without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from open_instruct.models.hf.hf_config import check_multiple, size_of

CHUNK = 64
"""Tokens of the longest chunk: what a chunk computes at once grows with its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Heads of keys (and queries) and of values, which groups of the latter share, their features, and the convolution.

    Example: a layer of Olmo-Hybrid 7B::

        DeltaShape(key_heads=30, value_heads=30, key_dim=96, value_dim=192, kernel=4, is_fused=False)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_fused: bool  # queries, keys and values are one matrix

    @property
    def widths(self) -> tuple[int, int, int]:
        """Features of all queries, of all keys and of all values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def parts(self) -> dict[str, int]:
        """The matrices that queries, keys and values come from, and their rows."""
        return {"qkv": sum(self.widths)} if self.is_fused else dict(zip("qkv", self.widths, strict=True))

    @property
    def output(self) -> str:
        """The matrix of the output: adapters for `o_proj` are beside `w_out`, and one matrix for all has `out_proj`."""
        return "w_output" if self.is_fused else "w_out"

    @property
    def rule_flops(self) -> int:
        """Of the rule for one token in a forward pass: with what is remembered, and within a chunk."""
        return (
            2 * self.value_heads * (2 * self.key_dim * self.value_dim + CHUNK * (3 * self.key_dim + 2 * self.value_dim))
        )

    @property
    def numbers_of_chunk(self) -> tuple[int, int, int]:
        """Of the rule for a chunk: those that it keeps, and those it has beside them forward and backward."""
        keys, values, heads = self.key_dim, self.value_dim, self.value_heads
        kept = CHUNK * (8 * keys + 2 * values + 5 * CHUNK) + keys * (2 * values + keys)
        forward = CHUNK * (7 * keys + 3 * values + 5 * CHUNK)
        return heads * kept, heads * forward, heads * CHUNK * (values + CHUNK)

    def tensors(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Parameters by their names in the layer, in the order in which it registers them."""
        heads, (_, _, values) = (self.value_heads,), self.widths
        return {
            "A_log": heads,
            "dt_bias": heads,
            **{f"w_{part}.weight": (rows, d_model) for part, rows in self.parts.items()},
            "w_a.weight": (*heads, d_model),
            "w_b.weight": (*heads, d_model),
            "w_g.weight": (values, d_model),
            f"{self.output}.weight": (d_model, values),
            **{f"{part}_conv1d.weight": (rows, 1, self.kernel) for part, rows in self.parts.items()},
            "o_norm.weight": (self.value_dim,),
        }


def delta_shape(fields: Mapping[str, Any], where: str, *, is_fused: bool) -> DeltaShape:
    """The shape that the fields of a config.json give; `where` stands in errors.

    Raises:
        InputError: a size is none, or groups of value heads cannot share the key heads.
    """
    count = partial(size_of, fields, where)
    key_heads, value_heads = count("linear_num_key_heads"), count("linear_num_value_heads")
    check_multiple(where, linear_num_value_heads=value_heads, linear_num_key_heads=key_heads)
    return DeltaShape(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=count("linear_key_head_dim"),
        value_dim=count("linear_value_head_dim"),
        kernel=count("linear_conv_kernel_dim"),
        is_fused=is_fused,
    )

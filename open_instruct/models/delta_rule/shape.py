"""The shape of a layer of the gated delta rule, from a config.json and without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.models.hf.config_values import check_multiple, read_size

SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
CHUNK = 64
"""Tokens of the longest chunk: what a chunk computes at once grows with its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """The sizes of a layer of the gated delta rule.

    Queries have as many heads as keys; groups of value heads share a key head. The sizes have the
    names of config.json, without its `linear_`.

    Example: a layer of Olmo-Hybrid 7B::

        DeltaShape(num_key_heads=30, num_value_heads=30, key_head_dim=96, value_head_dim=192,
                   conv_kernel_dim=4,
                   is_fused=False)
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    is_fused: bool  # queries, keys and values are one matrix

    @property
    def widths(self) -> tuple[int, int, int]:
        """Features of all queries, of all keys and of all values."""
        keys = self.num_key_heads * self.key_head_dim
        return keys, keys, self.num_value_heads * self.value_head_dim

    @property
    def parts(self) -> dict[str, int]:
        """The matrices that queries, keys and values come from, and their rows."""
        if self.is_fused:
            return {"qkv": sum(self.widths)}
        return dict(zip("qkv", self.widths, strict=True))

    @property
    def output(self) -> str:
        """The name of the output's matrix.

        Adapters for `o_proj` are beside `w_out`; a layer with one matrix for all has `out_proj`.
        """
        return "w_output" if self.is_fused else "w_out"

    @property
    def rule_flops(self) -> int:
        """The operations of the rule for one token in a forward pass."""
        keys = self.key_head_dim
        values = self.value_head_dim
        return 2 * self.num_value_heads * (2 * keys * values + CHUNK * (3 * keys + 2 * values))

    @property
    def chunk_value_counts(self) -> tuple[int, int, int, int]:
        """Of the rule for a chunk: those that it keeps; those that it has in a forward pass,
        without what it keeps and beside it; and those beside it in a backward pass. Fitted to plain
        PyTorch with heads of 32 to 128 features.
        """
        keys = self.key_head_dim
        values = self.value_head_dim
        heads = self.num_value_heads
        kept = CHUNK * (8 * keys + 2 * values + 5 * CHUNK) + keys * (2 * values + keys)
        alone = CHUNK * (7 * keys + 3 * values + 5 * CHUNK) + 2 * keys * (keys + values)
        beside = CHUNK * 2 * (keys + values) + keys * values
        return heads * kept, heads * alone, heads * beside, heads * CHUNK * (values + CHUNK)

    def tensors(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Parameters by their names in the layer, in the order in which it registers them."""
        heads = self.num_value_heads
        values = self.widths[2]
        shapes: dict[str, tuple[int, ...]] = {"A_log": (heads,), "dt_bias": (heads,)}
        for part, rows in self.parts.items():
            shapes[f"w_{part}.weight"] = (rows, d_model)
        shapes["w_a.weight"] = (heads, d_model)
        shapes["w_b.weight"] = (heads, d_model)
        shapes["w_g.weight"] = (values, d_model)
        shapes[f"{self.output}.weight"] = (d_model, values)
        for part, rows in self.parts.items():
            shapes[f"{part}_conv1d.weight"] = (rows, 1, self.conv_kernel_dim)
        shapes["o_norm.weight"] = (self.value_head_dim,)
        return shapes


def read_delta_shape(fields: Mapping[str, Any], where: str, *, is_fused: bool) -> DeltaShape:
    """The shape that the fields of a config.json give; `where` stands in errors.

    Raises:
        InputError: a size is none, or groups of value heads cannot share the key heads.
    """
    sizes = {name: read_size(fields, where, f"linear_{name}") for name in SIZES}
    check_multiple(
        where, **{f"linear_{name}": sizes[name] for name in ("num_value_heads", "num_key_heads")}
    )
    return DeltaShape(**sizes, is_fused=is_fused)

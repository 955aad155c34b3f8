"""The shapes of a model's parameters from its config.json alone, without torch and without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from open_instruct.data.foreign_json import read_object
from open_instruct.errors import InputError
from open_instruct.families import FAMILIES, Family, QKNorm, family_of
from open_instruct.models.hf_config import MAX_SIZE, SIZES, check_size

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}

SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter by OLMo-core's name.

    `layer` is None outside the blocks. `tensor_axis` is the axis that tensor parallelism splits; None: each
    tensor rank holds the whole of it.

    Example: the gate of a feed-forward, `w1` of layer 3, whose rows are split::

        ParameterShape(name="blocks.3.feed_forward.w1.weight", shape=(11008, 4096), layer=3, tensor_axis=0)
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    tensor_axis: int | None = None

    @property
    def num_params(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The parameters that FSDP gathers and frees together."""

    name: str
    parameters: tuple[ParameterShape, ...]

    @property
    def num_params(self) -> int:
        return sum(parameter.num_params for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What decides how large a model is and what it computes.

    `windows` has one entry a layer: the tokens that a query sees, itself among them; None: all before it. A model that
    `scores` has a head of one row.
    """

    name: str
    family: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    qk_norm: QKNorm
    windows: tuple[int | None, ...]
    checkpoint_bytes_per_param: int = 2
    scores: bool = False

    @cached_property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters, in the order of the real model. With tied embeddings there is no matrix of the head.

        Source: the modules of OLMo-core's `Transformer` in the order they register parameters, and its `apply_tp`.
        Matrices that put out heads or features of the feed-forward are split by rows, those that take them by columns,
        embeddings and head by vocabulary. Norms are whole on every tensor rank.
        """
        d_model, d_ff, q_width, kv_width = self.d_model, self.d_ff, self.q_width, self.kv_width
        norms = {"none": None, "head": (self.head_dim, self.head_dim), "full": (q_width, kv_width)}[self.qk_norm]
        block: list[tuple[str, tuple[int, ...], int | None]] = [
            (f"attention.w_{one}.{kind}", size, 0)
            for one, width in (("q", q_width), ("k", kv_width), ("v", kv_width))
            for kind, size in (("weight", (width, d_model)), ("bias", (width,)))
            if kind == "weight" or FAMILIES[self.family].qkv_bias
        ]
        block += [("attention.w_out.weight", (d_model, q_width), 1)]
        if norms is not None:
            block += [("attention.q_norm.weight", (norms[0],), None), ("attention.k_norm.weight", (norms[1],), None)]
        block += [
            ("attention_norm.weight", (d_model,), None),
            ("feed_forward.w1.weight", (d_ff, d_model), 0),
            ("feed_forward.w2.weight", (d_model, d_ff), 1),
            ("feed_forward.w3.weight", (d_ff, d_model), 0),
            ("feed_forward_norm.weight", (d_model,), None),
        ]
        vocabulary = (self.vocab_size, d_model)
        parameters = [ParameterShape(name="embeddings.weight", shape=vocabulary, tensor_axis=0)]
        parameters += [
            ParameterShape(name=f"blocks.{layer}.{name}", shape=size, layer=layer, tensor_axis=axis)
            for layer in range(self.num_layers)
            for name, size, axis in block
        ]
        parameters.append(ParameterShape(name="lm_head.norm.weight", shape=(d_model,)))
        if not self.is_tied:
            words = (1, d_model) if self.scores else vocabulary
            parameters.append(ParameterShape(name="lm_head.w_out.weight", shape=words, tensor_axis=0))
        return tuple(parameters)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """FSDP's units, in the order in which a forward pass gathers them.

        Source: `Transformer.apply_fsdp` of OLMo-core with the wrapping strategy "blocks". The root unit is what is
        left: the last norm and the head's matrix, and the embeddings where they are tied to it; else they are a unit.
        """
        embeddings, *rest = self.parameters
        root = tuple(parameter for parameter in rest if parameter.layer is None)
        if self.is_tied:
            first = [Unit(name="root", parameters=(embeddings, *root))]
        else:
            first = [Unit(name="root", parameters=root), Unit(name="embeddings", parameters=(embeddings,))]
        blocks = groupby((parameter for parameter in rest if parameter.layer is not None), lambda each: each.layer)
        return (*first, *(Unit(name=f"blocks.{layer}", parameters=tuple(block)) for layer, block in blocks))

    @property
    def num_params(self) -> int:
        return sum(parameter.num_params for parameter in self.parameters)

    @property
    def is_olmo(self) -> bool:
        """Whether blocks normalise what a sublayer puts out, not what it is given, and do so in float32 throughout."""
        return FAMILIES[self.family].norm_after

    @property
    def q_width(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads together; as many for the values."""
        return self.num_kv_heads * self.head_dim


def read_config(file: Path) -> ModelShape:
    """The shape that a Hugging Face config.json describes.

    Raises:
        InputError: the file cannot be read, a field is missing or impossible, or the family is not supported.
    """
    fields = read_object(file)
    return shape_of_fields(fields, name=str(file.parent if file.name == "config.json" else file), where=str(file))


def shape_of_fields(fields: dict[str, Any], *, name: str, where: str) -> ModelShape:
    """`read_config` for the fields of a config.json; `where` stands in errors."""
    family = family_of(fields.get("model_type"), where)

    def count(field: str, default: int | None = None) -> int:
        value = default if fields.get(field) is None else fields[field]
        return check_size(field, value, SIZES.get(field, MAX_SIZE), where)

    num_layers, num_heads, d_model = count("num_hidden_layers"), count("num_attention_heads"), count("hidden_size")
    num_kv_heads = count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise InputError(
            f"{where}: num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}"
        )
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    return ModelShape(
        name=name,
        family=fields["model_type"],
        d_model=d_model,
        d_ff=count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=count("head_dim", family.default_head_dim or d_model // num_heads),
        vocab_size=count("vocab_size"),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        windows=_windows(fields, family, num_layers, where),
        checkpoint_bytes_per_param=BYTES_OF_DTYPE.get(dtype, 4),
    )


def _windows(fields: dict[str, Any], family: Family, num_layers: int, where: str) -> tuple[int | None, ...]:
    window = fields.get("sliding_window")
    if window is None or not family.has_windows:
        return (None,) * num_layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise InputError(f"{where}: sliding_window = {window!r}; a window is a whole number of at least 1")
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return family.default_windows(num_layers, window)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise InputError(f"{where}: layer_types is no list of num_hidden_layers = {num_layers} entries")
    return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)

"""The shapes of a model's parameters from its config.json alone, without torch and without weights.

Public models have theirs in public_models.json, by their names on the Hugging Face hub, so that a plan downloads
nothing: of the config.json that each was released with, what decides its shape. All are taken to be stored in 16 bits,
as the tuned ones are; for another dtype, or another shape, give the folder or its config.json.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from open_instruct.data.files.foreign_json import read_object
from open_instruct.errors import InputError
from open_instruct.families import FAMILIES, Family, QKNorm, family_of
from open_instruct.models.hf.hf_config import MAX_POSITIONS, MAX_SIZE, SIZES, check_size
from open_instruct.models.hf.names import ADAPTER, EMBEDDINGS, LM_HEAD, is_of_adapter

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}

# `models.nf4.BLOCK`, which cannot be imported without torch; a test holds the two equal.
BLOCK = 64

SLIDING = "sliding_attention"

# Words of a name that say how a model was trained or when, not how large it is.
_VARIANT = re.compile(
    r"-(?:meta|base|pt|hf|sft|dpo|rlvr\d?|instruct|think|chat|rl|zero|math|code|if|general|mix|\d{4})(?=-)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter by OLMo-core's name.

    Example: the gate of a feed-forward, `w1` of layer 3, whose rows are split::

        ParameterShape(name="blocks.3.feed_forward.w1.weight", shape=(11008, 4096), layer=3, tensor_axis=0)
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None  # None outside the blocks
    tensor_axis: int | None = None  # the axis that tensor parallelism splits; None: every tensor rank has all of it
    row_of: tuple[int, int] | None = None  # it is this row of a stack of so many
    is_trained: bool = True  # else it has no gradient, and stays in the dtype that is computed in
    in_4_bits: bool = False  # two to a byte, with a scale in that dtype for every 64

    @property
    def num_params(self) -> int:
        return prod(self.shape)

    def bytes_of(self, num_values: int, bytes_each: int) -> int:
        """Bytes of so many of its values, of whole rows, in a dtype of `bytes_each`."""
        return num_values // 2 + num_values // BLOCK * bytes_each if self.in_4_bits else num_values * bytes_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside the frozen matrices of a model: each a product of `rank` columns and `rank` rows.

    Example: `Adapters(rank=16, modules=("attention.w_q", "attention.w_v"))`, modules of a block by OLMo-core's names.
    """

    rank: int
    modules: tuple[str, ...]
    drops: bool = False  # dropout leaves out some of their inputs while training
    in_4_bits: bool = False  # the matrices of the blocks are, these and others


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The parameters that FSDP gathers and frees together, and how many units are like this one."""

    name: str
    parameters: tuple[ParameterShape, ...]
    count: int = 1

    @property
    def trained(self) -> tuple[ParameterShape, ...]:
        """The parameters with gradients."""
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a model, which decides its size and its computation."""

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
    windows: tuple[int | None, ...]  # of each layer: the tokens that a query sees, itself among them; None: all before
    checkpoint_bytes_per_param: int = 2
    scores: bool = False  # its head has one row
    num_experts: int = 0  # of each layer, d_ff wide each; 0: the feed-forward is dense
    experts_per_token: int = 1
    adapters: Adapters | None = None

    @cached_property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters, in the order of the real model. With tied embeddings there is no matrix of the head.

        Source: the modules of OLMo-core's `Transformer` in the order they register parameters, and its `apply_tp`.
        Matrices that put out heads or features of the feed-forward are split by rows, those that take them by columns,
        embeddings and head by vocabulary. Norms are whole on every tensor rank. Of an adapter the half that meets the
        split side of its matrix is split (`models/lora/adapters.py`).
        """

        def parameter(name: str, size: tuple[int, ...], axis: int | None, layer: int | None = None) -> ParameterShape:
            is_trained = self.adapters is None or is_of_adapter(name) or (self.scores and name == LM_HEAD)
            in_4_bits = self.in_4_bits and layer is not None and len(size) == 2 and not is_trained
            return ParameterShape(
                name=name, shape=size, layer=layer, tensor_axis=axis, is_trained=is_trained, in_4_bits=in_4_bits
            )

        block = list(self._block())
        parameters = [parameter(EMBEDDINGS, (self.vocab_size, self.d_model), 0)]
        for layer in range(self.num_layers):
            parameters += [parameter(f"blocks.{layer}.{name}", size, axis, layer) for name, size, axis in block]
        parameters.append(parameter("lm_head.norm.weight", (self.d_model,), None))
        if not self.is_tied:
            parameters.append(parameter(LM_HEAD, (1 if self.scores else self.vocab_size, self.d_model), 0))
        return tuple(parameters)

    def _block(self) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Names within a block, sizes and tensor axes."""
        d_model, q_width, kv_width = self.d_model, self.q_width, self.kv_width
        norm_widths = {"none": (), "head": (self.head_dim, self.head_dim), "full": (q_width, kv_width)}[self.qk_norm]
        modules: dict[str, tuple[tuple[int, ...], int | None]] = {
            "attention.w_q": ((q_width, d_model), 0),
            "attention.w_k": ((kv_width, d_model), 0),
            "attention.w_v": ((kv_width, d_model), 0),
            "attention.w_out": ((d_model, q_width), 1),
            **{f"attention.{one}_norm": ((width,), None) for one, width in zip("qk", norm_widths, strict=False)},
            "attention_norm": ((d_model,), None),
            **self._feed_forward(),
            "feed_forward_norm": ((d_model,), None),
        }
        for module, (size, axis) in modules.items():
            yield module if len(size) == 3 else f"{module}.weight", size, axis
            if self.traits.qkv_bias and axis == 0 and module.startswith("attention."):
                yield f"{module}.bias", size[:1], axis
            if self.adapters is not None and module in self.adapters.modules:
                yield f"{module}.{ADAPTER[0]}", (self.adapters.rank, size[1]), axis or None
                yield f"{module}.{ADAPTER[1]}", (size[0], self.adapters.rank), None if axis else axis

    def _feed_forward(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        d_model, d_ff, num = self.d_model, self.d_ff, self.num_experts
        sizes = {"w1": (d_ff, d_model), "w2": (d_model, d_ff), "w3": (d_ff, d_model)}
        if num:
            stacks = {f"feed_forward.experts.{each}": ((num, *sizes[each]), None) for each in ("w1", "w3", "w2")}
            return {"feed_forward.router": ((num, d_model), None), **stacks}
        return {f"feed_forward.{each}": (size, 1 if each == "w2" else 0) for each, size in sizes.items()}

    def met(self, parameter: ParameterShape) -> int:
        """The numbers of a matrix that one token is multiplied with: of experts, those of a few."""
        return parameter.num_params * self.experts_per_token // (parameter.shape[0] if len(parameter.shape) == 3 else 1)

    @cached_property
    def units(self) -> tuple[Unit, Unit, Unit]:
        """FSDP's root, its embeddings, and one of its blocks, in the order in which a forward pass gathers them.

        Source: `Transformer.apply_fsdp` of OLMo-core with the wrapping strategy "blocks". The root unit is what is
        left: the last norm and the head's matrix, and the embeddings where they are tied to it; else they are a unit.
        """
        embeddings, *rest = self.parameters
        root = tuple(parameter for parameter in rest if parameter.layer is None)
        return (
            Unit(name="root", parameters=(embeddings, *root) if self.is_tied else root),
            Unit(name="embeddings", parameters=() if self.is_tied else (embeddings,)),
            Unit(name="blocks", parameters=tuple(each for each in rest if each.layer == 0), count=self.num_layers),
        )

    @property
    def in_4_bits(self) -> bool:
        return self.adapters is not None and self.adapters.in_4_bits

    @property
    def num_params(self) -> int:
        """The number of parameters of the model itself, without adapters."""
        return sum(each.num_params for each in self.parameters if not is_of_adapter(each.name))

    @property
    def first_halves(self) -> list[ParameterShape]:
        """The first halves of the adapters, which are gathered whole when adapters are merged."""
        return [each for each in self.parameters if each.name.endswith(ADAPTER[0])]

    @property
    def num_trained(self) -> int:
        """The number of parameters with gradients."""
        return sum(each.num_params for each in self.parameters if each.is_trained)

    @property
    def traits(self) -> Family:
        """The facts of the model's family, such as where its norms stand."""
        return FAMILIES[self.family]

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

    num_layers = count("num_hidden_layers")
    num_heads = count("num_attention_heads")
    d_model = count("hidden_size")
    num_kv_heads = count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise InputError(
            f"{where}: num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}"
        )
    if family.expert_size is not None:
        count("decoder_sparse_step", 1)
        if not isinstance(dense := fields.get("mlp_only_layers") or [], list):
            raise InputError(f"{where}: mlp_only_layers = {dense!r}; a list of the numbers of layers is needed")
    sparse = [family.is_sparse(SimpleNamespace(**fields), layer) for layer in range(num_layers)]
    if any(sparse) and not all(sparse):
        raise InputError(
            f"{where}: mlp_only_layers or decoder_sparse_step leave layers dense; a plan takes all for alike"
        )
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    return ModelShape(
        name=name,
        family=fields["model_type"],
        d_model=d_model,
        d_ff=count(family.expert_size if sparse[0] and family.expert_size else "intermediate_size"),
        num_experts=count("num_experts", fields.get("num_local_experts")) if sparse[0] else 0,
        experts_per_token=count("num_experts_per_tok") if sparse[0] else 1,
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
    window, layer_types = fields.get("sliding_window"), fields.get("layer_types")
    if window is None or not family.has_windows:
        return (None,) * num_layers
    check_size("sliding_window", window, MAX_POSITIONS, where)
    if layer_types is None:
        return family.default_windows(num_layers, window)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise InputError(f"{where}: layer_types is no list of num_hidden_layers = {num_layers} entries")
    return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)


def model_shape(name_or_path: str) -> ModelShape:
    """The shape of a model.

    Args:
        name_or_path: a folder with config.json, a config.json, or the name of a public model, with or without its
            organisation, or of a tuned variant; a name on the hub that is not among them is not fetched.

    Raises:
        InputError: there is no such model; a field is missing, or the family is not supported.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a name that no file can have, or of a user that is not there
        path = Path(name_or_path).expanduser()
        if path.exists():
            return read_config(path / "config.json" if path.is_dir() else path)
    for public, fields in public_models().items():
        if _size_of(public) == _size_of(name_or_path):
            return shape_of_fields(fields, name=public, where=public)
    known = {name.rpartition("/")[2].lower(): name for name in public_models()}
    near = difflib.get_close_matches(name_or_path.rpartition("/")[2].lower(), known, n=3, cutoff=0.5)
    names = f"like {', '.join(known[name] for name in near)}" if near else f"such as {next(iter(public_models()))}"
    raise InputError(
        f"{name_or_path}: no such folder or config.json, and no model whose shape is built in; give a folder, a "
        f"config.json, or a name {names}"
    )


def _size_of(name: str) -> str:
    """`-olmo-3-7b-` of "allenai/Olmo-3-7B-Think-SFT" and of "Olmo-3-1025-7B"."""
    return _VARIANT.sub("", f"-{name.rpartition('/')[2].lower()}-")


@cache
def public_models() -> Any:
    """The fields of each by its name."""
    return json.loads(Path(__file__).with_name("public_models.json").read_text("utf-8"))

"""The shapes of a model's parameters from its config.json alone, without torch and without weights.

Public models have theirs in public_models.json, by their names on the Hugging Face hub, so that a
plan downloads nothing: of the config.json that each was released with, what decides its shape. All
are taken to be stored in 16 bits, as the tuned ones are; for another dtype, or another shape, give
the folder or its config.json.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from open_instruct.config.lora import BLOCK, MATRICES_IN_4_BITS
from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES, LINEAR, SLIDING, Family, family_of
from open_instruct.data.files.foreign_json import read_object
from open_instruct.models.delta_rule.shape import DeltaShape, delta_shape
from open_instruct.models.hf.config_values import PART_TURNED, check_multiple, check_number, size_of
from open_instruct.models.hf.head_kinds import LM_HEAD, LM_HEAD_BIAS
from open_instruct.models.hf.names import ADAPTER, EMBEDDINGS, is_of_adapter, is_stack
from open_instruct.models.hf.supported import check_supported

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


# Words of a name that say how a model was trained or when, not how large it is.
_VARIANT = re.compile(
    r"-(?:meta|base|pt|hf|sft|dpo|rlvr\d?|instruct|think|chat|rl|zero|math|code|if|general|mix|\d{4})(?=-)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter by OLMo-core's name.

    Example: the gate of a feed-forward, `w1` of layer 3, whose rows are split::

        ParameterShape(name="blocks.3.feed_forward.w1.weight", shape=(11008, 4096), layer=3,
                       tensor_axis=0)
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None  # None outside the blocks
    # The axis that tensor parallelism splits; None: every tensor rank has all of it.
    tensor_axis: int | None = None
    row_of: tuple[int, int] | None = None  # it is this row of a stack of so many
    is_trained: bool = True  # else it has no gradient, and stays in the dtype that is computed in
    in_4_bits: bool = False  # two to a byte, with a scale in that dtype for every 64

    @property
    def num_params(self) -> int:
        return prod(self.shape)

    def bytes_of(self, num_values: int, bytes_each: int) -> tuple[int, ...]:
        """Bytes of each tensor of so many of its values, of whole rows, in a dtype of
        `bytes_each`.
        """
        return (
            (num_values // 2, num_values // BLOCK * bytes_each)
            if self.in_4_bits
            else (num_values * bytes_each,)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside the frozen matrices of a model: each a product of `rank` columns and
    `rank` rows.

    Example: `Adapters(rank=16, modules=("attention.w_q", "attention.w_v"))`, modules of a block by
    OLMo-core's names.
    """

    rank: int
    modules: tuple[str, ...]
    drops: bool = False  # dropout leaves out some of their inputs while training
    in_4_bits: bool = False  # the matrices of the blocks are, these and others


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer of a model has, where layers differ.

    Example: the layers of OLMo 3 without a window are `LayerShape(d_ff=11008)`, the others have
    `window=4096`.
    """

    d_ff: int  # of its feed-forward, or of each of its experts
    num_experts: int = 0  # 0: the feed-forward is dense
    window: int | None = None  # the tokens that a query sees, itself among them; None: all before
    delta: DeltaShape | None = None  # in the place of attention

    @property
    def kind(self) -> "LayerShape":
        """What decides its parameters and its memory: not the window."""
        return self if self.window is None else replace(self, window=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The parameters that FSDP gathers and frees together, and how many units are like this one."""

    name: str
    parameters: tuple[ParameterShape, ...]
    count: int = 1
    kind: LayerShape | None = None  # of a block

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
    layers: tuple[LayerShape, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    turned_dim: int  # features of a head that RoPE turns
    vocab_size: int
    is_tied: bool
    checkpoint_bytes_per_param: int = 2
    scores: int = 0  # rows of its head where that is not the vocabulary's
    experts_per_token: int = 1
    is_balanced: bool = False  # a loss of the experts' loads is learned beside
    adapters: Adapters | None = None

    @property
    def num_outputs(self) -> int:
        """Numbers that the head puts out for a position: a logit for each word, one score, or two
        classes'.
        """
        return self.scores or self.vocab_size

    @cached_property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters, in the order of the real model. With tied embeddings there is no matrix
        of the head.

        Source: the modules of OLMo-core's `Transformer` in the order they register parameters, and
        its `apply_tp`. Matrices that put out heads or features of the feed-forward are split by
        rows, those that take them by columns, embeddings and head by vocabulary. Norms are whole on
        every tensor rank. Of an adapter the half that meets the split side of its matrix is split
        (`models/lora/adapters.py`).
        """

        def parameter(
            name: str, size: tuple[int, ...], axis: int | None, layer: int | None = None
        ) -> ParameterShape:
            is_of_head = name in (LM_HEAD, LM_HEAD_BIAS)
            is_trained = (
                self.adapters is None or is_of_adapter(name) or (self.scores > 0 and is_of_head)
            )
            in_4_bits = self.in_4_bits and name.endswith(MATRICES_IN_4_BITS)
            return ParameterShape(
                name=name,
                shape=size,
                layer=layer,
                tensor_axis=axis,
                is_trained=is_trained,
                in_4_bits=in_4_bits,
            )

        parameters = [parameter(EMBEDDINGS, (self.vocab_size, self.d_model), 0)]
        for number, layer in enumerate(self.layers):
            for name, size, axis in self._block(layer):
                parameters.append(parameter(f"blocks.{number}.{name}", size, axis, number))
        parameters.append(parameter("lm_head.norm.weight", (self.d_model,), None))
        if not self.is_tied:
            parameters.append(
                parameter(LM_HEAD, (self.num_outputs, self.d_model), None if self.scores else 0)
            )
        if self.scores > 1:
            parameters.append(parameter(LM_HEAD_BIAS, (self.scores,), None))
        return tuple(parameters)

    def _block(self, layer: LayerShape) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Names within a block, sizes and tensor axes."""
        parameters: dict[str, tuple[tuple[int, ...], int | None]] = {
            **(
                self._attention()
                if layer.delta is None
                else _remembering(layer.delta, self.d_model)
            ),
            "attention_norm.weight": ((self.d_model,), None),
            **self._feed_forward(layer),
            "feed_forward_norm.weight": ((self.d_model,), None),
        }
        for name, (size, axis) in parameters.items():
            module = name.removesuffix(".weight")
            yield name, size, axis
            if self.traits.qkv_bias and axis == 0 and module.startswith("attention."):
                yield f"{module}.bias", size[:1], axis
            if self.adapters is not None and module in self.adapters.modules:
                yield f"{module}.{ADAPTER[0]}", (self.adapters.rank, size[1]), axis or None
                yield (
                    f"{module}.{ADAPTER[1]}",
                    (size[0], self.adapters.rank),
                    None if axis else axis,
                )

    def _attention(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        d_model, q_width, kv_width = self.d_model, self.q_width, self.kv_width
        widths = {"none": (), "head": (self.head_dim, self.head_dim), "full": (q_width, kv_width)}[
            self.traits.qk_norm
        ]
        return {
            "attention.w_q.weight": (
                (q_width * (2 if self.traits.gates_attention else 1), d_model),
                0,
            ),
            "attention.w_k.weight": ((kv_width, d_model), 0),
            "attention.w_v.weight": ((kv_width, d_model), 0),
            "attention.w_out.weight": ((d_model, q_width), 1),
            **{
                f"attention.{one}_norm.weight": ((width,), None)
                for one, width in zip("qk", widths, strict=False)
            },
        }

    def _feed_forward(self, layer: LayerShape) -> dict[str, tuple[tuple[int, ...], int | None]]:
        d_model, d_ff, num = self.d_model, layer.d_ff, layer.num_experts
        sizes = {"w1": (d_ff, d_model), "w2": (d_model, d_ff), "w3": (d_ff, d_model)}
        if num:
            stacks = {
                f"feed_forward.experts.{each}": ((num, *sizes[each]), None)
                for each in ("w1", "w3", "w2")
            }
            return {"feed_forward.router.weight": ((num, d_model), None), **stacks}
        return {
            f"feed_forward.{each}.weight": (size, 1 if each == "w2" else 0)
            for each, size in sizes.items()
        }

    def active_params(self, parameter: ParameterShape) -> int:
        """Values of a matrix or stack of experts that one token is multiplied with."""
        num_values = parameter.num_params * self.experts_per_token
        return num_values // parameter.shape[0] if is_stack(parameter.name) else num_values

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """FSDP's root, its embeddings, and a block of each kind, in the order in which a forward
        pass gathers them.

        Source: `Transformer.apply_fsdp` of OLMo-core with the wrapping strategy "blocks". The root
        unit is what is left: the last norm and the head's matrix, and the embeddings where they are
        tied to it; else they are a unit.
        """
        embeddings, *rest = self.parameters
        root = tuple(parameter for parameter in rest if parameter.layer is None)
        kinds = [layer.kind for layer in self.layers]
        blocks = []
        for kind in dict.fromkeys(kinds):
            first = kinds.index(kind)
            parameters = tuple(each for each in rest if each.layer == first)
            blocks.append(
                Unit(
                    name=f"blocks as {first}",
                    parameters=parameters,
                    count=kinds.count(kind),
                    kind=kind,
                )
            )
        return (
            Unit(name="root", parameters=(embeddings, *root) if self.is_tied else root),
            Unit(name="embeddings", parameters=() if self.is_tied else (embeddings,)),
            *blocks,
        )

    @property
    def in_4_bits(self) -> bool:
        return self.adapters is not None and self.adapters.in_4_bits

    @cached_property
    def in_blocks(self) -> tuple[ParameterShape, ...]:
        """The parameters of all blocks."""
        return tuple(each for each in self.parameters if each.layer is not None)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each attention layer; None is one without."""
        return tuple(layer.window for layer in self.layers if layer.delta is None)

    @cached_property
    def num_experts(self) -> int:
        """The number of experts in a layer that has them."""
        return max(layer.num_experts for layer in self.layers)

    @cached_property
    def num_delta_heads(self) -> int:
        """Key heads of the layers of the gated delta rule; 0 where there are none."""
        return max(layer.delta.num_key_heads if layer.delta else 0 for layer in self.layers)

    @cached_property
    def num_params_of_largest(self) -> int:
        """The number of values of the largest parameter."""
        return max(each.num_params for each in self.parameters)

    @cached_property
    def num_params(self) -> int:
        """The number of parameters of the model itself, without adapters."""
        return sum(each.num_params for each in self.parameters if not is_of_adapter(each.name))

    @cached_property
    def first_halves(self) -> tuple[ParameterShape, ...]:
        """The first halves of the adapters, which are gathered whole when adapters are merged."""
        return tuple(each for each in self.parameters if each.name.endswith(ADAPTER[0]))

    @cached_property
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


def _remembering(delta: DeltaShape, d_model: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    axes = {"o_norm.weight": None, f"{delta.output}.weight": 1}
    return {
        f"attention.{name}": (size, axes.get(name, 0))
        for name, size in delta.tensors(d_model).items()
    }


def shape_of_fields(fields: dict[str, Any], *, name: str, where: str) -> ModelShape:
    """The shape that the fields of a Hugging Face config.json describe; `where` stands in errors.

    Raises:
        InputError: a field is missing or impossible, or the family is not supported.
    """
    check_supported(fields, where)
    family = family_of(fields.get("model_type"), where)
    count = partial(size_of, fields, where)
    num_heads = count("num_attention_heads")
    d_model = count("hidden_size")
    num_kv_heads = count("num_key_value_heads", num_heads)
    check_multiple(where, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    head_dim = count("head_dim", family.default_head_dim or d_model // num_heads)
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix(
        "torch."
    )
    return ModelShape(
        name=name,
        family=fields["model_type"],
        d_model=d_model,
        layers=tuple(_layers(fields, family, where)),
        is_balanced=bool(fields.get("output_router_logits")),
        experts_per_token=1 if family.expert_size is None else count("num_experts_per_tok"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        turned_dim=int(head_dim * _turned_share(fields, family, where)),
        vocab_size=count("vocab_size"),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        checkpoint_bytes_per_param=BYTES_OF_DTYPE.get(dtype, 4),
    )


def _layers(fields: dict[str, Any], family: Family, where: str) -> Iterator[LayerShape]:
    count = partial(size_of, fields, where)
    window = (
        count("sliding_window")
        if family.has_windows and fields.get("sliding_window") is not None
        else None
    )
    delta = delta_shape(fields, where, is_fused=family.delta == "fused") if family.delta else None
    count("decoder_sparse_step", 1)
    if not isinstance(dense := fields.get("mlp_only_layers") or [], list):
        raise InputError(
            f"{where}: mlp_only_layers = {dense!r}; a list of the numbers of layers is needed",
            kind="bad_model",
        )
    layer_types = fields.get("layer_types")
    if layer_types is None and family.delta is not None:
        layer_types = []  # refused, as transformers has rules of its own for what is not said
    for layer, layer_type in enumerate(
        family.layer_types(layer_types, count("num_hidden_layers"), where)
    ):
        expert_size = (
            family.expert_size if family.is_sparse(SimpleNamespace(**fields), layer) else None
        )
        yield LayerShape(
            d_ff=count(expert_size or "intermediate_size"),
            num_experts=count("num_experts", fields.get("num_local_experts")) if expert_size else 0,
            window=window if layer_type == SLIDING else None,
            delta=delta if layer_type == LINEAR else None,
        )


def _turned_share(fields: dict[str, Any], family: Family, where: str) -> float:
    """The share of a head that RoPE turns."""
    rope = {
        "rope_theta": fields.get("rope_theta", 1),
        PART_TURNED: fields.get(PART_TURNED, family.turned_share),
    }
    if isinstance(given := fields.get("rope_parameters"), dict):
        rope |= given
    if family.may_not_turn and rope["rope_theta"] is None:
        return 0.0
    return (
        1.0 if family.turned_share is None else check_number(PART_TURNED, rope[PART_TURNED], where)
    )


def model_shape(name_or_path: str) -> ModelShape:
    """The shape of a model.

    Args:
        name_or_path: a folder with config.json, a config.json, or the name of a public model, with
            or without its organisation, or of a tuned variant; a name on the hub that is not among
            them is not fetched.

    Raises:
        InputError: there is no such model; a field is missing, or the family is not supported.
    """
    # A name that no file can have, or of a user that is not there.
    with contextlib.suppress(OSError, RuntimeError):
        path = Path(name_or_path).expanduser()
        if path.exists():
            file = path / "config.json" if path.is_dir() else path
            name = str(file.parent if file.name == "config.json" else file)
            return shape_of_fields(read_object(file), name=name, where=str(file))
    for public, fields in public_models().items():
        if _size_of(public) == _size_of(name_or_path):
            return shape_of_fields(fields, name=public, where=public)
    known = {name.rpartition("/")[2].lower(): name for name in public_models()}
    near = (
        difflib.get_close_matches(name_or_path.rpartition("/")[2].lower(), known, n=3, cutoff=0.5)
        or [*known][:1]
    )
    raise InputError(
        f"{name_or_path}: no such folder or config.json, and no model whose shape is built in; "
        "give a folder, a config.json, or a name such as "
        f"{', '.join(known[name] for name in near)}",
        kind="bad_model",
    )


def _size_of(name: str) -> str:
    """`-olmo-3-7b-` of "allenai/Olmo-3-7B-Think-SFT" and of "Olmo-3-1025-7B"."""
    return _VARIANT.sub("", f"-{name.rpartition('/')[2].lower()}-")


@cache
def public_models() -> Any:
    """The fields of each by its name."""
    return json.loads(Path(__file__).with_name("public_models.json").read_text("utf-8"))

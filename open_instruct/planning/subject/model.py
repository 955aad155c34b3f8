"""The shape of a model: its parameters, its layers, and the units that FSDP gathers together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from open_instruct.config.lora import BLOCK, MATRICES_IN_4_BITS
from open_instruct.core.families import FAMILIES, Family
from open_instruct.models.delta_rule.shape import DeltaShape
from open_instruct.models.hf.head_kinds import LM_HEAD, LM_HEAD_BIAS
from open_instruct.models.hf.names import ADAPTER, EMBEDDINGS, is_adapter_name, is_expert_stack

# Size and tensor axis of parameters by name.
Parameters = dict[str, tuple[tuple[int, ...], int | None]]


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
    stack_place: tuple[int, int] | None = None  # its index in a stack of matrices, and their number
    is_trained: bool = True  # else it has no gradient, and stays in the dtype that is computed in
    in_4_bits: bool = False  # two to a byte, with a scale in that dtype for every 64

    @property
    def num_params(self) -> int:
        return prod(self.shape)

    def tensor_bytes(self, num_values: int, bytes_each: int) -> tuple[int, ...]:
        """Bytes of each tensor that holds `num_values`, in whole rows, of `bytes_each` bytes."""
        if self.in_4_bits:
            return num_values // 2, num_values // BLOCK * bytes_each
        return (num_values * bytes_each,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside frozen matrices: each a product of `rank` columns and `rank` rows.

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
        if self.window is None:
            return self
        return replace(self, window=None)


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
        """The head's outputs for a position: logits of the vocabulary, a score, or two classes."""
        return self.scores or self.vocab_size

    @cached_property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters, in the order of the real model; a tied head has no matrix of its own.

        Source: the modules of OLMo-core's `Transformer` in the order they register parameters, and
        its `apply_tp`. Matrices that put out heads or features of the feed-forward are split by
        rows, those that take them by columns, embeddings and head by vocabulary. Norms are whole on
        every tensor rank. Of an adapter the half that meets the split side of its matrix is split
        (`models/lora/adapters.py`).
        """
        parameters = [self._parameter(EMBEDDINGS, (self.vocab_size, self.d_model), 0)]
        for number, layer in enumerate(self.layers):
            for name, size, axis in self._block(layer):
                whole_name = f"blocks.{number}.{name}"
                parameters.append(self._parameter(whole_name, size, axis, layer=number))
        parameters.append(self._parameter("lm_head.norm.weight", (self.d_model,), None))
        if not self.is_tied:
            axis = None if self.scores else 0
            parameters.append(self._parameter(LM_HEAD, (self.num_outputs, self.d_model), axis))
        if self.scores > 1:
            parameters.append(self._parameter(LM_HEAD_BIAS, (self.scores,), None))
        return tuple(parameters)

    def _parameter(
        self,
        name: str,
        size: tuple[int, ...],
        axis: int | None,
        *,
        layer: int | None = None,
    ) -> ParameterShape:
        """A parameter by its whole name; it is trained unless adapters are trained instead."""
        is_of_new_head = self.scores > 0 and name in (LM_HEAD, LM_HEAD_BIAS)
        return ParameterShape(
            name=name,
            shape=size,
            layer=layer,
            tensor_axis=axis,
            is_trained=self.adapters is None or is_adapter_name(name) or is_of_new_head,
            in_4_bits=self.in_4_bits and name.endswith(MATRICES_IN_4_BITS),
        )

    def _block(self, layer: LayerShape) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Names within a block, sizes and tensor axes."""
        if layer.delta is None:
            parameters = self._attention()
        else:
            parameters = _delta_rule(layer.delta, self.d_model)
        parameters["attention_norm.weight"] = ((self.d_model,), None)
        parameters |= self._feed_forward(layer)
        parameters["feed_forward_norm.weight"] = ((self.d_model,), None)
        for name, (size, axis) in parameters.items():
            module = name.removesuffix(".weight")
            yield name, size, axis
            if self.traits.qkv_bias and axis == 0 and module.startswith("attention."):
                yield f"{module}.bias", size[:1], axis
            if self.adapters is not None and module in self.adapters.modules:
                rank = self.adapters.rank
                # The half that meets the split side of the matrix is split as it is.
                yield f"{module}.{ADAPTER[0]}", (rank, size[1]), 1 if axis == 1 else None
                yield f"{module}.{ADAPTER[1]}", (size[0], rank), 0 if axis == 0 else None

    def _attention(self) -> Parameters:
        d_model = self.d_model
        q_width = self.q_width
        kv_width = self.kv_width
        num_halves = 2 if self.traits.gates_attention else 1
        parameters: Parameters = {
            "attention.w_q.weight": ((num_halves * q_width, d_model), 0),
            "attention.w_k.weight": ((kv_width, d_model), 0),
            "attention.w_v.weight": ((kv_width, d_model), 0),
            "attention.w_out.weight": ((d_model, q_width), 1),
        }
        if self.traits.qk_norm == "head":
            parameters["attention.q_norm.weight"] = ((self.head_dim,), None)
            parameters["attention.k_norm.weight"] = ((self.head_dim,), None)
        elif self.traits.qk_norm == "full":
            parameters["attention.q_norm.weight"] = ((q_width,), None)
            parameters["attention.k_norm.weight"] = ((kv_width,), None)
        return parameters

    def _feed_forward(self, layer: LayerShape) -> Parameters:
        inner = (layer.d_ff, self.d_model)
        outer = (self.d_model, layer.d_ff)
        num = layer.num_experts
        if num > 0:
            return {
                "feed_forward.router.weight": ((num, self.d_model), None),
                "feed_forward.experts.w1": ((num, *inner), None),
                "feed_forward.experts.w3": ((num, *inner), None),
                "feed_forward.experts.w2": ((num, *outer), None),
            }
        return {
            "feed_forward.w1.weight": (inner, 0),
            "feed_forward.w2.weight": (outer, 1),
            "feed_forward.w3.weight": (inner, 0),
        }

    def active_params(self, parameter: ParameterShape) -> int:
        """Values of a matrix or stack of experts that one token is multiplied with."""
        if not is_expert_stack(parameter.name):
            return parameter.num_params
        return parameter.num_params * self.experts_per_token // parameter.shape[0]

    def active_features(self, layer: LayerShape) -> int:
        """Features of a layer's feed-forward that one token has, of all its experts together."""
        if layer.num_experts > 0:
            return layer.d_ff * self.experts_per_token
        return layer.d_ff

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """FSDP's root, its embeddings, and a block of each kind, as a forward pass gathers them.

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
            block = Unit(
                name=f"blocks as {first}",
                parameters=tuple(each for each in rest if each.layer == first),
                count=kinds.count(kind),
                kind=kind,
            )
            blocks.append(block)
        looked_up = [embeddings]
        if self.is_tied:
            root = (embeddings, *root)
            looked_up = []
        return (
            Unit(name="root", parameters=root),
            Unit(name="embeddings", parameters=tuple(looked_up)),
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
        counts = [layer.delta.num_key_heads for layer in self.layers if layer.delta is not None]
        return max(counts, default=0)

    @cached_property
    def num_params_of_largest(self) -> int:
        """The number of values of the largest parameter."""
        return max(each.num_params for each in self.parameters)

    @cached_property
    def num_params(self) -> int:
        """The number of parameters of the model itself, without adapters."""
        return sum(each.num_params for each in self.parameters if not is_adapter_name(each.name))

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
        """Features of all key heads together, and of all value heads together."""
        return self.num_kv_heads * self.head_dim


def _delta_rule(delta: DeltaShape, d_model: int) -> Parameters:
    """The parameters of a layer of the gated delta rule, which stands in the place of attention."""
    axes = {"o_norm.weight": None, f"{delta.output}.weight": 1}
    return {
        f"attention.{name}": (size, axes.get(name, 0))
        for name, size in delta.tensors(d_model).items()
    }

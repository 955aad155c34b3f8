"""Names of parameters: the one map between OLMo-core's and Hugging Face's.

The patterns of flags that name modules are matched here too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from open_instruct.core.families import LINEAR, MAX_EXPERTS, Family, find_family
from open_instruct.models.hf.head_kinds import HEAD_TENSORS, LM_HEAD, Head

EMBEDDINGS = "embeddings.weight"
HF_LM_HEAD = "lm_head.weight"
ADAPTER = ("lora_A", "lora_B")
# The two parameters of a matrix in 4 bits, whose own name ends with .weight.
CODES = ".codes"
SCALES = ".scales"

# Buffers that old checkpoints carry and that every reader computes for itself.
_HARMLESS_EXTRA = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)$")
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")

_MODEL = {
    EMBEDDINGS: "model.embed_tokens.weight",
    "lm_head.norm.weight": "model.norm.weight",
    LM_HEAD: HF_LM_HEAD,
}
_ATTENTION = {
    "attention.w_q.weight": "self_attn.q_proj.weight",
    "attention.w_k.weight": "self_attn.k_proj.weight",
    "attention.w_v.weight": "self_attn.v_proj.weight",
    "attention.w_out.weight": "self_attn.o_proj.weight",
}
_DENSE = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_EXPERTS = {
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
# As transformers 5 has experts in memory: all of a layer in one tensor, gates above what they
# multiply.
_PACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_QK_NORM = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_QKV_BIAS = {f"attention.w_{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"}
# OLMo normalises the output of a sublayer, other families its input; so "post_attention" names
# different norms.
_NORM_AFTER = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "post_feedforward_layernorm.weight",
}
_NORM_BEFORE = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
# Layers of the gated delta rule: with a matrix for each of queries, keys and values, or with one
# for all.
_DELTA = {f"attention.{name}": f"linear_attn.{name}" for name in ("A_log", "dt_bias")}
_DELTA_APART = {
    **{f"attention.w_{one}.weight": f"linear_attn.{one}_proj.weight" for one in "qkvabg"},
    **{f"attention.{one}_conv1d.weight": f"linear_attn.{one}_conv1d.weight" for one in "qkv"},
    "attention.o_norm.weight": "linear_attn.o_norm.weight",
    "attention.w_out.weight": "linear_attn.o_proj.weight",
}
_DELTA_FUSED = {
    **{
        f"attention.w_{one}.weight": f"linear_attn.in_proj_{one}.weight"
        for one in ("qkv", "a", "b")
    },
    "attention.w_g.weight": "linear_attn.in_proj_z.weight",
    "attention.qkv_conv1d.weight": "linear_attn.conv1d.weight",
    "attention.o_norm.weight": "linear_attn.norm.weight",
    "attention.w_output.weight": "linear_attn.out_proj.weight",
}
# As transformers saves the norms of Olmo-Hybrid; it reads the usual names too, and engines no
# others.
_SAVED_AS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of activation checkpointing, compile and FSDP."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_adapter_name(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return name.rpartition(".")[2] in ADAPTER


def is_expert_stack(name: str) -> bool:
    """Whether a parameter is a matrix of each expert of a layer."""
    return ".experts." in name


def matches_module(patterns: Iterable[str], name: str) -> bool:
    """Whether one of `patterns`, a shell's pattern for each part between dots, names the module.

    Example: "blocks.*.attention" is "blocks.3.attention", and not "blocks.3.attention.w_q".
    """
    parts = name.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            return True
    return False


def is_harmless_extra(hf_name: str) -> bool:
    """Whether a file may hold this name although no parameter wants it (recomputed buffers)."""
    return _HARMLESS_EXTRA.search(hf_name) is not None


def _name_block(family: Family, *, is_delta: bool, num_experts: int) -> dict[str, str]:
    """The names of one layer's tensors: OLMo-core's, each with Hugging Face's."""
    mlp = _name_experts(num_experts) if num_experts else _DENSE
    if is_delta:
        matrices = _DELTA_FUSED if family.delta == "fused" else _DELTA_APART
        return _DELTA | matrices | mlp | _NORM_BEFORE
    norms = _NORM_AFTER if family.norm_after else _NORM_BEFORE
    block = _ATTENTION | mlp | norms
    if family.qk_norm != "none":
        block |= _QK_NORM
    if family.qkv_bias:
        block |= _QKV_BIAS
    return block


def _name_experts(num_experts: int) -> dict[str, str]:
    names = {"feed_forward.router.weight": "mlp.gate.weight"}
    for ours, theirs in _EXPERTS.items():
        for expert in range(num_experts):
            hf_name = f"mlp.experts.{expert}.{theirs}.weight"
            names[f"feed_forward.experts.{ours}.{expert}"] = hf_name
    return names


def unpack_tensor(stored: str, shape: Sequence[int]) -> dict[str, tuple[Any, ...]]:
    """The names that a tensor of a file has here, each with its place in the tensor.

    A tensor that packs experts' matrices has a name for each of them, any other its usual name
    alone. So has one that cannot be divided into matrices, or only into more than any model has:
    no model wants a tensor of its name.

    Example: `unpack_tensor("model.layers.0.mlp.experts.down_proj", (2, 64, 32))` is
    `{"model.layers.0.mlp.experts.0.down_proj.weight": (0, slice(0, 64)), ...}`.
    """
    # Below `language_model` a model that also sees pictures has its text part.
    names = stored.replace("model.language_model.", "model.", 1).split(".")
    hf_name = ".".join(_SAVED_AS.get(name, name) for name in names)
    prefix, _, packed = hf_name.rpartition(".")
    parts = _PACKED.get(packed, ())
    if not prefix.endswith(".mlp.experts") or len(shape) != 3 or not parts:
        return {hf_name: ()}
    if shape[0] > MAX_EXPERTS or not all(shape) or shape[1] % len(parts):
        return {hf_name: ()}
    num_rows = shape[1] // len(parts)
    places: dict[str, tuple[Any, ...]] = {}
    for expert in range(shape[0]):
        for number, part in enumerate(parts):
            rows = slice(number * num_rows, (number + 1) * num_rows)
            places[f"{prefix}.{expert}.{part}.weight"] = (expert, rows)
    return places


def split_as_in_files(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Split the tensors of a model of transformers as files have them.

    Experts and convolutions are one by one in files.
    Its own `revert_weight_conversion` cuts the convolutions of Olmo-Hybrid into three of one size,
    which they are not.
    """
    stored: dict[str, Any] = {}
    for name, tensor in tensors.items():
        matrices = [tensors.get(name.replace("conv1d", f"{one}_proj")) for one in "qkv"]
        sizes = [len(matrix) for matrix in matrices if matrix is not None]
        if name.endswith("linear_attn.conv1d.weight") and sizes:
            for one, part in zip("qkv", tensor.split(sizes), strict=True):
                stored[name.replace("conv1d", f"{one}_conv1d")] = part
            continue
        for file_name, place in unpack_tensor(name, tensor.shape).items():
            stored[file_name] = tensor[place]
    return stored


class TensorNames:
    """Both names of every tensor of one model, one to one, in layer order.

    A tensor is a parameter, or one expert's matrix of a stack of them: matrix 5 of
    `blocks.3.feed_forward.experts.w1` is `blocks.3.feed_forward.experts.w1.5`. Whoever asks
    `find_local_shards` for the parameters of a model finds them as these.

    With tied embeddings the head is the embedding matrix: it has no pair, and a file may leave
    `lm_head.weight` out or hold a copy equal to the embeddings. A head that gives scores is tied to
    nothing.

    Example::

        names = TensorNames(hf_config)
        names.hf_name("blocks.3.attention.w_q.weight")    # 'model.layers.3.self_attn.q_proj.weight'
    """

    def __init__(self, hf_config: Any, *, head: Head = "vocabulary") -> None:
        family = find_family(hf_config.model_type)
        self.hf_config = hf_config
        self.head = head
        self.tied = head == "vocabulary" and bool(hf_config.tie_word_embeddings)
        layer_types = getattr(hf_config, "layer_types", None)
        layer_types = layer_types or [None] * hf_config.num_hidden_layers
        pairs = {EMBEDDINGS: _MODEL[EMBEDDINGS]}
        for layer, layer_type in enumerate(layer_types):
            num_experts = hf_config.num_experts if family.is_sparse(hf_config, layer) else 0
            block = _name_block(family, is_delta=layer_type == LINEAR, num_experts=num_experts)
            for ours, theirs in block.items():
                pairs[f"blocks.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
        pairs |= _MODEL
        if self.tied:
            del pairs[LM_HEAD]
        self._hf_of = {**pairs, **HEAD_TENSORS.get(head, {})}

    def hf_name(self, olmo_core_name: str) -> str:
        """Raises KeyError for a name that is no parameter of the model."""
        return self._hf_of[clean_name(olmo_core_name)]

    @property
    def olmo_core_names(self) -> tuple[str, ...]:
        return tuple(self._hf_of)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Pairs (OLMo-core name, HF name)."""
        return iter(self._hf_of.items())

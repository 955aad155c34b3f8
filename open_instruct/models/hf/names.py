"""Names of parameters and modules: the one map between OLMo-core's and Hugging Face's, and the patterns of flags."""

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

from open_instruct.families import LINEAR, Family, family_of

EMBEDDINGS = "embeddings.weight"
LM_HEAD = "lm_head.w_out.weight"
HF_LM_HEAD = "lm_head.weight"
HF_SCORE = "score.weight"
ADAPTER = ("lora_A", "lora_B")

# The output of a model at a position: logits over the vocabulary, or one number.
Head = Literal["vocabulary", "score"]

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
_FEED_FORWARD = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_QK_NORM = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_QKV_BIAS = {f"attention.w_{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"}
# OLMo normalises the output of a sublayer, other families its input; so "post_attention" names different norms.
_NORM_AFTER = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "post_feedforward_layernorm.weight",
}
_NORM_BEFORE = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
# Layers of the gated delta rule: with a matrix for each of queries, keys and values, or with one for all.
_DELTA = {f"attention.{name}": f"linear_attn.{name}" for name in ("A_log", "dt_bias")}
_DELTA_APART = {
    **{f"attention.w_{one}.weight": f"linear_attn.{one}_proj.weight" for one in "qkvabg"},
    **{f"attention.{one}_conv1d.weight": f"linear_attn.{one}_conv1d.weight" for one in "qkv"},
    "attention.o_norm.weight": "linear_attn.o_norm.weight",
    "attention.w_out.weight": "linear_attn.o_proj.weight",
}
_DELTA_FUSED = {
    **{f"attention.w_{one}.weight": f"linear_attn.in_proj_{one}.weight" for one in ("qkv", "a", "b")},
    "attention.w_g.weight": "linear_attn.in_proj_z.weight",
    "attention.qkv_conv1d.weight": "linear_attn.conv1d.weight",
    "attention.o_norm.weight": "linear_attn.norm.weight",
    "attention.w_output.weight": "linear_attn.out_proj.weight",
}
# As transformers saves the norms of Olmo-Hybrid; it reads the usual names too, and engines no others.
_SAVED_AS = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}


def clean_name(name: str) -> str:
    """A parameter's own name, without the prefixes of activation checkpointing, compile and FSDP."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_of_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return name.rpartition(".")[2] in ADAPTER


def names_module(patterns: Iterable[str], name: str) -> bool:
    """Whether one of `patterns` names the module: a shell's pattern for each part between dots, so a * stops at dots.

    Example: "blocks.*.attention" is "blocks.3.attention", and not "blocks.3.attention.w_q".
    """
    parts = name.split(".")
    return any(
        len(pattern.split(".")) == len(parts) and all(map(fnmatchcase, parts, pattern.split(".")))
        for pattern in patterns
    )


def is_harmless_extra(hf_name: str) -> bool:
    """Whether a file may hold this name although no parameter wants it (recomputed buffers)."""
    return _HARMLESS_EXTRA.search(hf_name) is not None


def usual_name(hf_name: str) -> str:
    """The name that a tensor of a file has here."""
    # The second is where the text part of a model that sees has its tensors.
    parts = hf_name.replace("model.language_model.", "model.", 1).split(".")
    return ".".join(_SAVED_AS.get(part, part) for part in parts)


def _block(family: Family, *, is_delta: bool) -> dict[str, str]:
    if is_delta:
        assert family.delta is not None
        own = _DELTA | (_DELTA_FUSED if family.delta.is_fused else _DELTA_APART)
        return own | _FEED_FORWARD | _NORM_BEFORE
    block = _ATTENTION | _FEED_FORWARD | (_NORM_AFTER if family.norm_after else _NORM_BEFORE)
    if family.qk_norm != "none":
        block |= _QK_NORM
    return block | _QKV_BIAS if family.qkv_bias else block


class TensorNames:
    """Both names of every parameter of one model, one to one, in layer order.

    With tied embeddings the head is the embedding matrix: it has no pair, and a file may leave
    `lm_head.weight` out or hold a copy equal to the embeddings. A head that gives a score is tied to nothing.

    Example::

        names = TensorNames(hf_config)
        names.hf_name("blocks.3.attention.w_q.weight")    # 'model.layers.3.self_attn.q_proj.weight'
    """

    def __init__(self, hf_config: Any, *, head: Head = "vocabulary") -> None:
        family = family_of(hf_config.model_type)
        self.hf_config = hf_config
        self.head = head
        self.tied = head == "vocabulary" and bool(hf_config.tie_word_embeddings)
        layer_types = getattr(hf_config, "layer_types", None) or [None] * hf_config.num_hidden_layers
        pairs = {EMBEDDINGS: _MODEL[EMBEDDINGS]}
        for layer, layer_type in enumerate(layer_types):
            block = _block(family, is_delta=layer_type == LINEAR)
            pairs |= {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in block.items()}
        pairs |= {ours: theirs for ours, theirs in _MODEL.items() if not (self.tied and ours == LM_HEAD)}
        if head == "score":
            pairs[LM_HEAD] = HF_SCORE
        self._hf_of = pairs

    def hf_name(self, olmo_core_name: str) -> str:
        """Raises KeyError for a name that is no parameter of the model."""
        return self._hf_of[clean_name(olmo_core_name)]

    @property
    def olmo_core_names(self) -> tuple[str, ...]:
        return tuple(self._hf_of)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Pairs (OLMo-core name, HF name)."""
        return iter(self._hf_of.items())

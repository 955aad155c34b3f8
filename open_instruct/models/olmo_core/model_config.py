"""Reads the model of an OLMo-core config.json as the fields of a Hugging Face config.json.

The families that both have are OLMo 2 and OLMo 3, and models without windows whose norms stand
before their layers, as Llama's and Qwen 3's do. What neither has, and what changes the result, is
refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES, FULL, SLIDING, QKNorm, find_model_type
from open_instruct.models.hf.config_values import check_number, check_size
from open_instruct.models.hf.rope import NAME as ROPE_PARAMETERS
from open_instruct.models.olmo_core.config_section import ConfigSection, merge
from open_instruct.models.olmo_core.rope_config import read_rope_config

# How OLMo-core spells a norm that is multiplied before rounding, and after it.
IN_FLOAT32 = ("rms", "fused_rms", "cute_rms")
AFTER_ROUNDING = "qwen_rms"
BLOCK_NAMES = {"default": False, "reordered_norm": True}  # whether norms stand after the layers
DEFAULT_EPS = 1e-5
DEFAULT_STD = 0.02
FALLBACK_POSITIONS = 2**16  # of a file that names no length; nothing is computed with it
# They say how the model is initialised, split, compiled or stored.
NOT_COMPUTED_WITH = (
    *("dtype", "init_method", "init_seed", "init_std", "embedding_init_std", "freeze_params"),
    *("compile", "dp_config", "tp_config", "cp_config", "ac_config", "float8_config"),
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class OLMoCoreTokenizer:
    """What a config.json says of the tokenizer: its size, its ids, and the name it is found by."""

    vocab_size: int
    identifier: str | None
    token_ids: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OLMoCoreConfig:
    """An OLMo-core config.json.

    :param fields: of the Hugging Face config.json of the same model.
    :param init_method: how OLMo-core would draw its weights.
    :param notes: what computes otherwise in 16 bits than OLMo-core does.
    """

    fields: Mapping[str, Any]
    tokenizer: OLMoCoreTokenizer | None
    init_method: str = "normal"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer; all of a model are alike but for their windows, and the RoPE that goes with it."""

    norm_after: bool
    qk_norm: QKNorm
    norm_name: str
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rope_in_float32: bool


def is_olmo_core_config(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is OLMo-core's: of an experiment, or of a model alone."""
    if "model_type" in fields:
        return False
    return isinstance(fields.get("model"), dict) or {"d_model", "block"} <= fields.keys()


def read_olmo_core_config(fields: Mapping[str, Any], where: str) -> OLMoCoreConfig:
    """Read the fields of an OLMo-core config.json.

    Raises:
        InputError: a field that changes the forward pass is not supported, or fields contradict
            each other; the message names the field, its value and what is supported.
    """
    model_fields = fields.get("model", fields)
    model = ConfigSection(model_fields, f"{where}: model")
    tokenizer = _read_tokenizer(merge(fields, "tokenizer"), where)
    num_layers = check_size("n_layers", model.take("n_layers"), model.where, 1000)
    d_model = model.take_size("d_model")
    vocab_size = model.take_size("vocab_size")
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{model.where}: vocab_size = {vocab_size} is less than the tokenizer's, "
            f"{tokenizer.vocab_size}: they do not belong together",
            kind="bad_model",
        )
    model.require("name", "default", default="default")
    model.require("embed_scale", 1, None)
    model.require("embedding_norm", None)
    is_tied = bool(model.take("tie_word_embeddings", False))
    blocks = _find_blocks(model, num_layers)
    layers = []
    windows: list[int | None] = []
    ropes: dict[str, dict[str, Any]] = {}
    for number, block_fields in enumerate(blocks):
        block = ConfigSection(block_fields, f"{model.where}.block (layer {number})")
        layer, window, rope = _read_block(block, d_model, number, num_layers)
        layers.append(layer)
        windows.append(window)
        layer_type = FULL if window is None else SLIDING
        if ropes.setdefault(layer_type, rope) != rope:
            block.refuse("another RoPE than a layer of the same kind before it", "give all one")
    _check_alike(layers, windows, model)
    head = model.open_needed("lm_head")
    head.require("name", "default", default="default")
    head.require("bias", False, default=True)
    _check_norm(head.open_needed("layer_norm"), layers[0])
    head.pass_over("dtype", "loss_implementation")
    head.finish()
    model.pass_over(*NOT_COMPUTED_WITH)
    model.finish()
    read = {
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": _find_positions(fields, ropes),
        "initializer_range": model.take("init_std", DEFAULT_STD),
        **_layer_fields(layers[0], windows, ropes, model),
        **(tokenizer.token_ids if tokenizer is not None else {}),
    }
    return OLMoCoreConfig(
        fields=read,
        tokenizer=tokenizer,
        init_method=_find_init_method(model),
        notes=_find_notes(layers[0], read["model_type"], where),
    )


def _find_init_method(model: ConfigSection) -> str:
    """How OLMo-core would draw the weights, with what makes it another than its usual way."""
    method = str(model.take("init_method", "normal"))
    std = model.take("embedding_init_std")
    if std not in (None, model.take("init_std", DEFAULT_STD)):
        method += f" with embedding_init_std {std}"
    return method


def _read_tokenizer(fields: Any, where: str) -> OLMoCoreTokenizer | None:
    if fields is None:
        return None
    section = ConfigSection(fields, f"{where}: tokenizer")
    identifier = section.take("identifier")
    token_ids = {}
    for name in TOKEN_IDS:
        token_id = section.take(name)
        if token_id is None:
            continue
        if type(token_id) is not int or token_id < 0:
            raise InputError(f"{section.where}.{name} = {token_id!r} is no id", kind="bad_model")
        token_ids[name] = token_id
    return OLMoCoreTokenizer(
        vocab_size=section.take_size("vocab_size"),
        identifier=None if identifier is None else str(identifier),
        token_ids=token_ids,
    )


def _find_blocks(model: ConfigSection, num_layers: int) -> list[Any]:
    """The fields of the block of each layer: one for all, or several by a pattern of names."""
    block = model.take("block")
    pattern = model.take("block_pattern")
    overrides = model.take("block_overrides") or {}
    blocks = [block] * num_layers
    if pattern is not None:
        if not isinstance(block, dict) or not isinstance(pattern, list) or not pattern:
            model.refuse("block_pattern without blocks by name", "give each name of it a block")
        unknown = sorted(set(map(str, pattern)) - block.keys())
        if unknown:
            model.refuse(f"block_pattern with {unknown[0]!r}", "give each name of it a block")
        blocks = [block[str(pattern[number % len(pattern)])] for number in range(num_layers)]
    for number, other in overrides.items():
        if not str(number).isdecimal() or int(number) >= num_layers:
            model.refuse(f"block_overrides of layer {number!r}", f"there are {num_layers} layers")
        blocks[int(number)] = other
    return blocks


def _read_block(
    block: ConfigSection, d_model: int, number: int, num_layers: int
) -> tuple[_Layer, int | None, dict[str, Any]]:
    """A layer, its window, and its RoPE's parameters."""
    if "feed_forward_moe" in block:
        block.refuse("feed_forward_moe (a mixture of experts of OLMo-core's)", "use a dense model")
    block.require("name", *BLOCK_NAMES, default="default")
    norm_after = BLOCK_NAMES[block.take("name", "default")]
    block.require("dropout", 0, None)
    block.require("attention_residual_alpha", 1, None)
    block.require("feed_forward_residual_alpha", 1, None)
    norm = block.open_needed("layer_norm")
    norm_name = norm.take("name", "default")
    eps = check_number("layer_norm.eps", norm.take("eps", DEFAULT_EPS), block.where)
    _finish_norm(norm)
    mixer = block.open("sequence_mixer") or block.open_needed("attention")
    if mixer.class_name not in (None, "AttentionConfig"):
        block.refuse(f"a layer of {mixer.class_name}", "only layers of AttentionConfig are")
    num_heads = mixer.take_size("n_heads", 16)
    head_dim = mixer.take_size("head_dim", d_model // num_heads)
    rope, rope_in_float32 = read_rope_config(mixer.open_needed("rope"), head_dim)
    feed_forward = block.open_needed("feed_forward")
    layer = _Layer(
        norm_after=norm_after,
        qk_norm=_read_qk_norm(mixer, norm_name, eps),
        norm_name=norm_name,
        eps=eps,
        num_heads=num_heads,
        num_kv_heads=mixer.take_size("n_kv_heads", num_heads),
        head_dim=head_dim,
        hidden_size=_read_feed_forward(feed_forward),
        rope_in_float32=rope_in_float32,
    )
    window = _find_window(mixer, number, num_layers)
    mixer.require("name", "default", default="default")
    mixer.require("bias", False, default=True)
    mixer.require("dropout", 0, None)
    mixer.require("clip_qkv", None)
    mixer.require("gate", None)
    mixer.pass_over("use_flash", "backend", "dtype", "use_recompute_qkv_prep")
    mixer.finish()
    block.finish()
    return layer, window, rope


def _read_qk_norm(mixer: ConfigSection, norm_name: str, eps: float) -> QKNorm:
    norm = mixer.open("qk_norm")
    is_by_head = mixer.take("use_head_qk_norm", False)
    if norm is None:
        return "none"
    norm.require("name", norm_name, default="default")
    norm.require("eps", eps, default=DEFAULT_EPS)
    _finish_norm(norm)
    return "head" if is_by_head else "full"


def _check_norm(norm: ConfigSection, layer: _Layer) -> None:
    norm.require("name", layer.norm_name, default="default")
    norm.require("eps", layer.eps, default=DEFAULT_EPS)
    _finish_norm(norm)


def _finish_norm(norm: ConfigSection) -> None:
    norm.require("name", *IN_FLOAT32, AFTER_ROUNDING, default="default")
    norm.require("bias", False, default=True)
    norm.require("elementwise_affine", True, None)
    norm.require("full_precision", True, None)
    norm.pass_over("eps", "dtype")
    norm.finish()


def _read_feed_forward(section: ConfigSection) -> int:
    section.require("name", "default", default="default")
    section.require("bias", False, default=True)
    section.require("activation", "silu", default="silu")
    section.pass_over("dtype")
    hidden_size = section.take_size("hidden_size")
    section.finish()
    return hidden_size


def _find_window(mixer: ConfigSection, number: int, num_layers: int) -> int | None:
    """The window of a layer by the pattern that OLMo-core repeats; None where it sees all."""
    section = mixer.open("sliding_window")
    if section is None:
        return None
    pattern = section.take("pattern")
    spares_first = section.take("force_full_attention_on_first_layer", True)
    spares_last = section.take("force_full_attention_on_last_layer", True)
    section.finish()
    if not isinstance(pattern, list) or not pattern:
        section.refuse(f"pattern = {pattern!r}", "a list of windows is")
    if (spares_first and number == 0) or (spares_last and number == num_layers - 1):
        return None
    size = pattern[(number - int(bool(spares_first))) % len(pattern)]
    if size == -1:
        return None
    return check_size("pattern", size, section.where, 2**31)


def _check_alike(layers: list[_Layer], windows: list[int | None], model: ConfigSection) -> None:
    for number, layer in enumerate(layers):
        if layer != layers[0]:
            model.refuse(f"layer {number} of another kind or size than layer 0", "all are alike")
    sizes = {size for size in windows if size is not None}
    if len(sizes) > 1:
        model.refuse(f"windows of several sizes, {sorted(sizes)}", "all windows are of one size")


def _layer_fields(
    layer: _Layer,
    windows: list[int | None],
    ropes: Mapping[str, Mapping[str, Any]],
    model: ConfigSection,
) -> dict[str, Any]:
    sizes = [size for size in windows if size is not None]
    model_type = find_model_type(
        norm_after=layer.norm_after, qk_norm=layer.qk_norm, has_windows=bool(sizes)
    )
    if model_type is None:
        place = "after" if layer.norm_after else "before"
        spans = {"none": "no norm of", "head": "a norm by head of", "full": "a norm of all"}
        model.refuse(
            f"norms {place} the layers with {spans[layer.qk_norm]} queries and keys and "
            f"{'some' if sizes else 'no'} windows",
            "no family has that",
        )
    family = FAMILIES[model_type]
    full = ropes.get(FULL)
    fields: dict[str, Any] = {
        "model_type": model_type,
        "intermediate_size": layer.hidden_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "float32",
        ROPE_PARAMETERS: full,
    }
    if family.default_head_dim or layer.head_dim * layer.num_heads != model.take("d_model"):
        fields["head_dim"] = layer.head_dim
    if sizes:
        fields["sliding_window"] = sizes[0]
        fields["layer_types"] = [FULL if size is None else SLIDING for size in windows]
        fields[ROPE_PARAMETERS] = {FULL: full or ropes[SLIDING], SLIDING: ropes[SLIDING]}
    return fields


def _find_positions(fields: Mapping[str, Any], ropes: Mapping[str, Mapping[str, Any]]) -> int:
    """The longest text that the model was made for, by what its file says of it."""
    train_module = fields.get("train_module")
    lengths = [merge(fields, "sequence_length")]
    if isinstance(train_module, Mapping):
        lengths.append(train_module.get("max_sequence_length"))
    for rope in ropes.values():
        length = rope.get("original_max_position_embeddings")
        if length is not None:
            lengths.append(math.floor(length * rope["factor"]))
    known = [length for length in lengths if type(length) is int and length > 0]
    return max(known, default=FALLBACK_POSITIONS)


def _find_notes(layer: _Layer, model_type: str, where: str) -> tuple[str, ...]:
    family = FAMILIES[model_type]
    is_norm_in_float32 = layer.norm_name in IN_FLOAT32
    if (is_norm_in_float32, layer.rope_in_float32) == (family.in_float32, family.in_float32):
        return ()
    return (
        f"{where}: its norms ({layer.norm_name}) or RoPE are rounded at another place than "
        f"{family.name}'s, as which it is read: logits in 16 bits differ by a rounding, in float32 "
        "they do not",
    )

"""Reads the shape of a model from its config.json alone, without torch and without weights.

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
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.families import LINEAR, SLIDING, Family, find_family
from open_instruct.data.files.foreign_json import read_object
from open_instruct.models.delta_rule.shape import read_delta_shape
from open_instruct.models.hf.config_values import (
    PART_TURNED,
    check_multiple,
    check_number,
    read_size,
)
from open_instruct.models.hf.supported import check_supported
from open_instruct.models.olmo_core.model_config import (
    is_olmo_core_config,
    read_olmo_core_config,
)
from open_instruct.planning.subject.model import LayerShape, ModelShape

BYTES_OF_DTYPE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}

# Words of a name that say how a model was trained or when, not how large it is.
_VARIANT = re.compile(
    r"-(?:meta|base|pt|hf|sft|dpo|rlvr\d?|instruct|think|chat|rl|zero|math|code|if|general|mix|\d{4})(?=-)"
)


def shape_from_fields(fields: dict[str, Any], *, name: str, where: str) -> ModelShape:
    """The shape that the fields of a Hugging Face config.json describe; `where` stands in errors.

    Raises:
        InputError: a field is missing or impossible, or the family is not supported.
    """
    check_supported(fields, where)
    family = find_family(fields.get("model_type"), where)
    count = partial(read_size, fields, where)
    num_heads = count("num_attention_heads")
    d_model = count("hidden_size")
    num_kv_heads = count("num_key_value_heads", num_heads)
    check_multiple(where, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    head_dim = count("head_dim", family.default_head_dim or d_model // num_heads)
    experts_per_token = 1
    if family.expert_size is not None:
        experts_per_token = count("num_experts_per_tok")
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    return ModelShape(
        name=name,
        family=fields["model_type"],
        d_model=d_model,
        layers=tuple(_layers(fields, family, where)),
        is_balanced=bool(fields.get("output_router_logits")),
        experts_per_token=experts_per_token,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        turned_dim=int(head_dim * _turned_share(fields, family, where)),
        vocab_size=count("vocab_size"),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        checkpoint_bytes_per_param=BYTES_OF_DTYPE.get(str(dtype).removeprefix("torch."), 4),
    )


def _layers(fields: dict[str, Any], family: Family, where: str) -> Iterator[LayerShape]:
    count = partial(read_size, fields, where)
    window = None
    if family.has_windows and fields.get("sliding_window") is not None:
        window = count("sliding_window")
    delta = None
    if family.delta:
        delta = read_delta_shape(fields, where, is_fused=family.delta == "fused")
    count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise InputError(
            f"{where}: mlp_only_layers = {dense!r}; a list of the numbers of layers is needed",
            kind="bad_model",
        )
    layer_types = fields.get("layer_types")
    if layer_types is None and family.delta is not None:
        layer_types = []  # refused: without the field, transformers has rules of its own
    layer_types = family.layer_types(layer_types, count("num_hidden_layers"), where)
    for number, layer_type in enumerate(layer_types):
        if family.expert_size and family.is_sparse(SimpleNamespace(**fields), number):
            d_ff = count(family.expert_size)
            num_experts = count("num_experts", fields.get("num_local_experts"))
        else:
            d_ff = count("intermediate_size")
            num_experts = 0
        yield LayerShape(
            d_ff=d_ff,
            num_experts=num_experts,
            window=window if layer_type == SLIDING else None,
            delta=delta if layer_type == LINEAR else None,
        )


def _turned_share(fields: dict[str, Any], family: Family, where: str) -> float:
    """The share of a head that RoPE turns."""
    rope = {
        "rope_theta": fields.get("rope_theta", 1),
        PART_TURNED: fields.get(PART_TURNED, family.turned_share),
    }
    parameters = fields.get("rope_parameters")
    if isinstance(parameters, dict):
        rope |= parameters
    if family.may_not_turn and rope["rope_theta"] is None:
        return 0.0
    if family.turned_share is None:
        return 1.0
    return check_number(PART_TURNED, rope[PART_TURNED], where)


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
            return _read_shape(path)
    for public, fields in public_models().items():
        if _strip_variant(public) == _strip_variant(name_or_path):
            return shape_from_fields(fields, name=public, where=public)
    models = {_short_name(name): name for name in public_models()}
    near = difflib.get_close_matches(_short_name(name_or_path), models, n=3, cutoff=0.5)
    if not near:
        near = [*models][:1]
    raise InputError(
        f"{name_or_path}: no such folder or config.json, and no model whose shape is built in; "
        "give a folder, a config.json, or a name such as "
        f"{', '.join(models[name] for name in near)}",
        kind="bad_model",
    )


def _read_shape(path: Path) -> ModelShape:
    """The shape of a config.json, or of the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    folder_or_file = file.parent if file.name == "config.json" else file
    fields = read_object(file)
    if is_olmo_core_config(fields):
        fields = dict(read_olmo_core_config(fields, str(file)).fields)
    return shape_from_fields(fields, name=str(folder_or_file), where=str(file))


def _short_name(name: str) -> str:
    """The name of a model without its organisation, in small letters."""
    return name.rpartition("/")[2].lower()


def _strip_variant(name: str) -> str:
    """`-olmo-3-7b-` of "allenai/Olmo-3-7B-Think-SFT" and of "Olmo-3-1025-7B"."""
    return _VARIANT.sub("", f"-{_short_name(name)}-")


@cache
def public_models() -> Any:
    """The fields of each by its name."""
    return json.loads(Path(__file__).with_name("public_models.json").read_text("utf-8"))

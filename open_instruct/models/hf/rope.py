"""Reads and writes RoPE's numbers in a config.json, in each spelling that transformers has had.

Up to version 4: `rope_theta` and `rope_scaling` at the top. From version 5: `rope_parameters`, one
object for all layers, or (OLMo 3) one for each layer type. 5.0 to 5.8 wrote one object of OLMo 3
too, which newer ones read as none: its layers without a window have what the object says, those
with a window its theta alone, as OLMo 3 was trained.
"""

from collections.abc import Mapping
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.families import FULL, LINEAR, SLIDING, Family
from open_instruct.models.hf.config_values import FIELDS, PART_TURNED, check_number

NAME = "rope_parameters"
THETA = "rope_theta"
SCALING = "rope_scaling"
ROPE_NUMBERS: dict[str, list[str]] = FIELDS["rope"]
MAX_POSITIONS = "original_max_position_embeddings"
LAYER_TYPES = (FULL, SLIDING, LINEAR)


def read_rope(fields: Mapping[str, Any], family: Family, where: str) -> dict[str, dict[str, Any]]:
    """Read the parameters of RoPE by the type of layers.

    The types are `full_attention`, and `sliding_attention` in families with windows. A theta that
    the file does not give is not among them: the family's class has its own.

    Raises:
        InputError: they contradict each other, or are no objects.
    """
    parameters = fields.get(NAME)
    scaling = fields.get(SCALING)
    theta = fields.get(THETA)
    for name, value in ((NAME, parameters), (SCALING, scaling)):
        if value is not None and not isinstance(value, dict):
            raise InputError(
                f"{where}: {name} = {value!r}; an object with rope_theta is needed",
                kind="bad_model",
            )
    parameters = parameters or {}
    nested = [name for name in LAYER_TYPES if name in parameters]
    others = sorted(parameters.keys() - set(LAYER_TYPES))
    if nested and others:
        raise InputError(
            f"{where}: {NAME} has {others[0]!r} beside {nested[0]!r}, and of which layers it is "
            "cannot be told: give it within each type of layers",
            kind="bad_model",
        )
    by_type = parameters if nested else {FULL: parameters}
    full_name = f"{NAME}.{FULL}" if nested else NAME
    full = _merge_top_fields(by_type.get(FULL), scaling, theta, full_name, where)
    if not family.has_windows:
        return {FULL: full}
    sliding = by_type.get(SLIDING)
    if not sliding:
        sliding = {"rope_type": "default"}
        if THETA in full:
            sliding[THETA] = full[THETA]
    sliding = _merge_top_fields(sliding, None, theta, f"{NAME}.{SLIDING}", where)
    return {FULL: full, SLIDING: sliding}


def _merge_top_fields(
    own: Any,
    scaling: Mapping[str, Any] | None,
    theta: Any,
    name: str,
    where: str,
) -> dict[str, Any]:
    """The parameters of one type of layers, with those at the top of the file.

    :raises InputError: the two contradict each other.
    """
    if own is not None and not isinstance(own, dict):
        raise InputError(
            f"{where}: {name} = {own!r}; an object with rope_theta is needed", kind="bad_model"
        )
    parameters = _rename_type(own or {})
    top_theta = {} if theta is None else {THETA: theta}
    for place, values in ((SCALING, _rename_type(scaling or {})), (THETA, top_theta)):
        for field, value in values.items():
            if parameters.get(field, value) != value:
                raise InputError(
                    f"{where}: {field} = {value!r} by {place}, and {parameters[field]!r} by "
                    f"{name}: readers take one or the other; remove the one that the model was "
                    "not trained with",
                    kind="bad_model",
                )
        parameters = values | parameters
    return parameters


def _rename_type(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `type` to `rope_type`, as it is called now, and leave out fields of null."""
    stated = {
        name: value for name, value in parameters.items() if value is not None or name == THETA
    }
    rope_type = stated.pop("type", None)
    if rope_type is None:
        return stated
    return {"rope_type": rope_type} | stated


def normalize_rope_fields(fields: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Spell RoPE in the fields of a config.json so that transformers 5 reads it rightly.

    It loses a theta at the top on layers with windows, and one object for all layers.
    """
    if not family.has_windows or not any(fields.get(name) for name in (NAME, THETA, SCALING)):
        return dict(fields)
    others = {name: value for name, value in fields.items() if name not in (THETA, SCALING)}
    return others | {NAME: read_rope(fields, family, where)}


def export_rope_fields(
    fields: Mapping[str, Any], family: Family, rope: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Spell RoPE in the fields of an exported config.json for transformers 4 and 5 and vLLM alike.

    Version 5 reads `rope_parameters`; version 4 reads `rope_theta` and `rope_scaling`, and has no
    other theta for layers with windows.

    Args:
        rope: the parameters of each layer type, as `read_rope` gives them, thetas among them.
    """
    full = rope[FULL]
    parameters = dict(rope) if family.has_windows else dict(full)
    thetas = {each.get(THETA) for each in rope.values()}
    exported = {name: value for name, value in fields.items() if name not in (THETA, SCALING)}
    exported[NAME] = parameters
    if len(thetas) > 1 or full.get(THETA) is None:
        return exported
    exported[THETA] = full[THETA]
    scaling = {name: value for name, value in full.items() if name not in (THETA, PART_TURNED)}
    if scaling.get("rope_type", "default") != "default":
        exported[SCALING] = scaling
    return exported


def check_rope_scaling(
    parameters: Mapping[str, Any],
    name: str,
    family: Family,
    *,
    where: str = "config.json",
    is_whole: bool = True,
) -> dict[str, Any] | None:
    """Check the numbers that scaled frequencies are computed from; None for RoPE without scaling.

    Args:
        name: of the object, for messages.
        is_whole: whether transformers has filled in what a file may leave out.

    Raises:
        InputError: the type of RoPE, or a number of it, is not supported.
    """
    rope_type = parameters.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in ROPE_NUMBERS:
        supported = ", ".join(map(repr, ROPE_NUMBERS))
        raise InputError(
            f"{where}: {name}.rope_type = {rope_type!r} is not supported; supported: {supported}",
            kind="unsupported_model",
        )
    neutral = {
        "rope_type": (rope_type,),
        "type": (rope_type,),
        PART_TURNED: (1,),
        "truncate": (True,),
    }
    read_elsewhere = {THETA}
    if family.turned_share:
        read_elsewhere |= {PART_TURNED, *FIELDS["rope_of_pictures"]}
    for field, value in parameters.items():
        known = field in read_elsewhere or field in ROPE_NUMBERS[rope_type]
        if not known and value is not None and value not in neutral.get(field, ()):
            raise InputError(
                f"{where}: {name}.{field} = {value!r} is not supported with rope_type "
                f"{rope_type!r}",
                kind="unsupported_model",
            )
    if rope_type == "default":
        return None
    used: dict[str, Any] = {"rope_type": rope_type, THETA: parameters.get(THETA)}
    optional = set(FIELDS["rope_optional"])
    if not is_whole:
        optional.add(MAX_POSITIONS)
    for field in ROPE_NUMBERS[rope_type]:
        value = parameters.get(field)
        if value is not None or field not in optional:
            above = 1 if field == MAX_POSITIONS else 0
            used[field] = check_number(f"{name}.{field}", value, where, above=above)
    if rope_type == "llama3":
        check_number(
            f"{name}.high_freq_factor",
            used["high_freq_factor"],
            where,
            above=used["low_freq_factor"],
        )
    return used

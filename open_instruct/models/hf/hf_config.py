"""Reads the config.json of a Hugging Face checkpoint, and finds the file of its weights.

Code that a config.json names is never run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.core.errors import InputError
from open_instruct.core.families import find_family
from open_instruct.data.files.foreign_json import check_files, one_line, read_object
from open_instruct.models.hf.config_values import FIELDS, SIZES, check_size, shorten_value
from open_instruct.models.hf.rope import normalize_rope_fields
from open_instruct.models.hf.supported import check_supported

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = ("float32", "bfloat16", "float16", "float64")
CODE_FIELDS = {*FIELDS["naming_code"]}


def remove_code_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without those that name code; private ones, as `_attn_implementation`, may too."""
    return {
        name: value
        for name, value in fields.items()
        if name not in CODE_FIELDS and not name.startswith("_")
    }


def fingerprint_model(fields: Mapping[str, Any], weights: str) -> str:
    """Fingerprint weights and config: the same tensors with another window are another model.

    :param weights: their own fingerprint.
    """
    computed_with = {
        name: value for name, value in fields.items() if name not in FIELDS["not_computed_with"]
    }
    text = weights + json.dumps(computed_with, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def load_hf_config(path: str) -> PretrainedConfig:
    """Read the configuration in a checkpoint's folder; fields that name code are left out.

    A generation_config.json beside it, which engines read, is checked too.

    Raises:
        InputError: there is no such folder or file, it is not JSON, its `model_type` is not of a
            supported family, a size is impossible, or transformers refuses a value in it.
    """
    folder = Path(path).expanduser()
    config = build_hf_config(read_config_fields(folder), folder / "config.json")
    from transformers import GenerationConfig

    generation = folder / "generation_config.json"
    if generation.is_file():
        _build_config(GenerationConfig, read_object(generation), generation)
    return config


def build_hf_config(fields: dict[str, Any], file: Path) -> PretrainedConfig:
    """The configuration of checked fields, which `file` gave.

    :raises InputError: transformers refuses a value of it.
    """
    # Imported late, because transformers takes a second to import.
    from transformers import CONFIG_MAPPING

    family = find_family(fields["model_type"])
    read = normalize_rope_fields(remove_code_fields(fields), family, str(file))
    config: PretrainedConfig = _build_config(CONFIG_MAPPING[fields["model_type"]], read, file)
    return config


def read_config_fields(folder: Path) -> dict[str, Any]:
    """Read the fields of config.json, checked as far as possible without transformers.

    Raises:
        InputError: see `load_hf_config`.
    """
    if not folder.is_dir():
        what = " is a file" if folder.exists() else ": no such folder"
        raise InputError(
            (f"{folder}{what}; give the folder that holds config.json and the safetensors files"),
            kind="bad_model",
        )
    file = folder / "config.json"
    if not file.is_file():
        run = folder.parent if (folder / "checkpoint.json").is_file() else folder
        if (run / "hf_model").is_dir():
            raise InputError(
                f"{folder} holds no model but a run's files; did you mean {run / 'hf_model'}?",
                kind="bad_model",
            )
        raise InputError(
            (f"{file}: no such file; a checkpoint folder needs the config.json it was saved with"),
            kind="missing_file",
        )
    check_files(folder)
    fields = read_object(file)
    check_config_fields(fields, file)
    return fields


def check_config_fields(fields: Mapping[str, Any], file: Path) -> None:
    """Check the fields of a config.json as far as possible without transformers.

    Raises:
        InputError: see `load_hf_config`.
    """
    find_family(fields.get("model_type"), str(file))

    for name, does in FIELDS["refused"].items():
        if name in fields:
            raise InputError(f"{file}: {name} {does}", kind="bad_model")
    for name, largest in SIZES.items():
        if fields.get(name) is not None:
            check_size(name, fields[name], str(file), largest)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
        raise InputError(
            f"{file}: dtype = {shorten_value(dtype)}; use one of {', '.join(DTYPES)}",
            kind="bad_model",
        )
    check_supported(fields, str(file))


def find_weights_file(folder: Path) -> Path:
    """Find what locates a checkpoint's weights: the index, or the one file that holds them all.

    Raises:
        InputError: there is neither; or both, of different weights.
    """
    index = folder / INDEX_NAME
    single = folder / SINGLE_NAME
    if index.is_file() and single.is_file():
        named = read_object(index).get("weight_map")
        if not isinstance(named, dict) or set(map(str, named.values())) != {SINGLE_NAME}:
            raise InputError(
                f"{folder} holds {SINGLE_NAME}, which transformers reads, and {INDEX_NAME} with "
                "other files, which vLLM reads: they are of two saves; remove the one that is "
                "stale",
                kind="bad_model",
            )
    for path in (index, single):
        if path.is_file():
            return path
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise InputError(
            f"{folder} holds its weights as pickle (.bin or .pt), which is never read here "
            "because a pickle can run code: convert it, e.g. with transformers' "
            "from_pretrained(...).save_pretrained(...)",
            kind="bad_model",
        )
    if any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} holds safetensors files, but neither {SINGLE_NAME} nor {INDEX_NAME}: "
            "the index is missing; fetch the whole checkpoint",
            kind="bad_model",
        )
    raise InputError(
        f"{folder} holds no weights: {SINGLE_NAME} or {INDEX_NAME} is needed", kind="bad_model"
    )


def _build_config(kind: Any, fields: dict[str, Any], file: Path) -> Any:
    try:
        return kind.from_dict(fields)
    # Transformers' validators raise many types, all of them about a value in the file.
    except Exception as error:
        raise InputError(
            f"{file}: transformers cannot read it: {one_line(error)}", kind="bad_model"
        ) from None

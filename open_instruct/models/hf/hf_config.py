"""The config.json of a Hugging Face checkpoint, read without running code that it names, and its weights' file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from open_instruct.data.files.foreign_json import check_files, one_line, read_object
from open_instruct.errors import InputError
from open_instruct.families import family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_SIZE = 2**24  # larger than any model, as are those of `SIZES`
MAX_NUMBER = 1e12  # the largest parameter of RoPE for which float32 still resolves the frequencies
PART_TURNED = "partial_rotary_factor"
DTYPES = ("float32", "bfloat16", "float16", "float64")

# What is known of fields.
FIELDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("config_fields.yaml").read_text(encoding="utf-8"))
CODE_FIELDS = {*FIELDS["naming_code"]}
SIZES: dict[str, int] = FIELDS["sizes"]


def without_code(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that describe a model, without those that name code (private ones, such as
    `_attn_implementation`, among them)."""
    return {name: value for name, value in fields.items() if name not in CODE_FIELDS and not name.startswith("_")}


def fingerprint_with(fields: Mapping[str, Any], weights: str) -> str:
    """A fingerprint of weights and config: the same tensors with another window are another model.

    :param weights: their own fingerprint.
    """
    computed_with = {name: value for name, value in fields.items() if name not in FIELDS["not_computed_with"]}
    return hashlib.sha256((weights + json.dumps(computed_with, sort_keys=True, default=str)).encode()).hexdigest()


def load_hf_config(path: str) -> PretrainedConfig:
    """Read the configuration in a checkpoint's folder; fields that name code are left out.

    A generation_config.json beside it, which engines read, is checked too.

    Raises:
        InputError: there is no such folder or file, it is not JSON, its `model_type` is not of a supported
            family, a size is impossible, or transformers refuses a value in it.
    """
    folder = Path(path).expanduser()
    fields, file = config_fields(folder), folder / "config.json"
    # Imported late, because transformers takes a second to import.
    from transformers import CONFIG_MAPPING, GenerationConfig

    config = _built(CONFIG_MAPPING[fields["model_type"]], without_code(fields), file)
    if (generation := folder / "generation_config.json").is_file():
        _built(GenerationConfig, read_object(generation), generation)
    return config


def config_fields(folder: Path) -> dict[str, Any]:
    """The fields of config.json, checked as far as possible without transformers.

    Raises:
        InputError: see `load_hf_config`.
    """
    if not folder.is_dir():
        what = " is a file" if folder.exists() else ": no such folder"
        raise InputError(
            f"{folder}{what}; give the folder that holds config.json and the safetensors files", kind="bad_model"
        )
    file = folder / "config.json"
    if not file.is_file():
        run = folder.parent if (folder / "checkpoint.json").is_file() else folder
        if (run / "hf_model").is_dir():
            raise InputError(
                f"{folder} holds no model but a run's files; did you mean {run / 'hf_model'}?", kind="bad_model"
            )
        raise InputError(
            f"{file}: no such file; a checkpoint folder needs the config.json it was saved with", kind="missing_file"
        )
    check_files(folder)
    fields = read_object(file)
    family_of(fields.get("model_type"), str(file))

    for name, does in FIELDS["refused"].items():
        if name in fields:
            raise InputError(f"{file}: {name} {does}", kind="bad_model")
    for name, largest in SIZES.items():
        if fields.get(name) is not None:
            check_size(name, fields[name], str(file), largest)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
        raise InputError(f"{file}: dtype = {_shown(dtype)}; use one of {', '.join(DTYPES)}", kind="bad_model")
    return fields


def weights_file(folder: Path) -> Path:
    """The file that locates a checkpoint's weights: the index, or the one file that holds them all.

    Raises:
        InputError: there is neither.
    """
    for name in (INDEX_NAME, SINGLE_NAME):
        if (folder / name).is_file():
            return folder / name
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise InputError(
            f"{folder} holds its weights as pickle (.bin or .pt), which is never read here because a pickle can run "
            "code: convert it, e.g. with transformers' from_pretrained(...).save_pretrained(...)",
            kind="bad_model",
        )
    if any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} holds safetensors files, but neither {SINGLE_NAME} nor {INDEX_NAME}: "
            "the index is missing; fetch the whole checkpoint",
            kind="bad_model",
        )
    raise InputError(f"{folder} holds no weights: {SINGLE_NAME} or {INDEX_NAME} is needed", kind="bad_model")


def check_size(name: str, value: Any, where: str, largest: int = MAX_SIZE) -> int:
    """`value`; raises InputError unless it is a whole number from 1 to `largest`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise InputError(
            f"{where}: {name} = {_shown(value)}; it must be a whole number from 1 to {largest}", kind="bad_model"
        )
    return value


def check_number(name: str, value: Any, where: str = "config.json", *, above: float = 0) -> Any:
    """`value`; raises InputError unless it is a number that RoPE, or a norm, can be computed with."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= MAX_NUMBER:
        raise InputError(
            f"{where}: {name} = {value!r}; a number above {above:g}, at most {MAX_NUMBER:g}, is needed",
            kind="bad_model",
        )
    return value


def check_multiple(where: str, **sizes: int) -> None:
    """Raises InputError unless the first of two sizes is a multiple of the second."""
    (whole, number), (part, divisor) = sizes.items()
    if number % divisor:
        raise InputError(f"{where}: {whole} = {number} is not a multiple of {part} = {divisor}", kind="bad_model")


def size_of(fields: Mapping[str, Any], where: str, name: str, default: Any = None) -> int:
    """The size `name` that the fields of a config.json give; raises InputError if it is none."""
    return check_size(name, default if fields.get(name) is None else fields[name], where, SIZES.get(name, MAX_SIZE))


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _built(kind: Any, fields: dict[str, Any], file: Path) -> Any:
    try:
        return kind.from_dict(fields)
    except Exception as error:  # transformers' validators raise many types, all of them about a value in the file
        raise InputError(f"{file}: transformers cannot read it: {one_line(error)}", kind="bad_model") from None

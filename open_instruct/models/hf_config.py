"""The config.json of a Hugging Face checkpoint, read without running anything it brings along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODEL_TYPES: dict[str, str] = {"olmo2": "OLMo 2", "olmo3": "OLMo 3", "qwen3": "Qwen 3", "llama": "Llama 3"}
"""The `model_type` of every supported family, and the name people call it by."""


def supported_families() -> str:
    """One phrase for error messages: "OLMo 2 (model_type 'olmo2'), …"."""
    return ", ".join(f"{family} (model_type {model_type!r})" for model_type, family in MODEL_TYPES.items())


def load_hf_config(path_or_name: str) -> PretrainedConfig:
    """Read the configuration of a checkpoint.

    Args:
        path_or_name: a local folder holding config.json, or the name of a model on the Hugging Face hub.

    Raises:
        InputError: there is no such folder or file, it is not JSON, its `model_type` is not of a supported
            family, or transformers refuses a value in it.
    """
    if Path(path_or_name).expanduser().is_dir():
        return _load_local(Path(path_or_name).expanduser() / "config.json")
    if Path(path_or_name).exists():
        raise InputError(f"{path_or_name} is a file; give the folder that holds config.json and the safetensors files")
    if not _could_be_hub_name(path_or_name):
        raise InputError(
            f"{path_or_name}: no such folder; give a folder with config.json, or a hub name like 'org/model'"
        )
    return _load_from_hub(path_or_name)


def _could_be_hub_name(name: str) -> bool:
    """Hub names are 'model' or 'org/model'; whatever else is written like a path is one."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not name.endswith("/") and name != ""


def _load_local(file: Path) -> PretrainedConfig:
    if not file.is_file():
        raise InputError(f"{file}: no such file; a checkpoint folder needs the config.json it was saved with")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); copy it again") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{file}, line {error.lineno}: not JSON ({error.msg}); copy it again") from None
    if not isinstance(fields, dict):
        raise InputError(f"{file} holds a JSON {type(fields).__name__}; a model config is an object")
    _check_model_type(fields.get("model_type"), str(file))
    return _from_pretrained(str(file.parent), str(file))


def _load_from_hub(name: str) -> PretrainedConfig:
    config = _from_pretrained(name, f"config of {name!r}")
    _check_model_type(config.model_type, f"config of {name!r}")
    return config


def _check_model_type(model_type: Any, where: str) -> None:
    if model_type is None:
        raise InputError(f"{where} has no 'model_type'; supported families are {supported_families()}")
    if model_type not in MODEL_TYPES:
        raise InputError(f"{where}: model_type {model_type!r} is not supported; supported are {supported_families()}")


def _from_pretrained(path_or_name: str, where: str) -> PretrainedConfig:
    # transformers takes a second to import: only once we know that there is something to read.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path_or_name, trust_remote_code=False)
    except OSError as error:
        raise InputError(
            f"{path_or_name!r} is neither a local folder nor a model that can be fetched from the Hugging Face hub "
            f"({_first_line(error)})"
        ) from None
    except Exception as error:  # transformers' validators raise many types, all of them about a value in the file
        raise InputError(f"{where}: transformers cannot read it: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__

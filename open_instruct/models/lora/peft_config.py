"""Reads peft's adapter_config.json, and refuses adapters that would compute something else here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from open_instruct.config.lora import ALL_LINEAR, MODULES_OF_TARGETS, LoRASection
from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import read_object
from open_instruct.models.hf.config_values import shorten_value

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 2**16
MAX_ALPHA = 1e12

# Ways of drawing an adapter that leave the base as it is. The others (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA) take a part of its weights away, which peft does again when it loads such an adapter.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
# Fields that change nothing of what a saved adapter computes; those that only a way of drawing
# reads are here too.
WITHOUT_EFFECT = {
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "runtime_config",
    "qalora_group_size",
    "layers_pattern",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
}
READ = {
    "peft_type",
    "bias",
    "init_lora_weights",
    "modules_to_save",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
}
SCORE_HEADS = {"score", "classifier"}  # peft names both of a model that scores


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of `LoRASection` that define an adapter, read from peft's file.

    :raises InputError: the file is missing or damaged, or has an option that is not supported here.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise InputError(
            f"--adapter_name_or_path {folder}: there is no {CONFIG_NAME} in it; give an adapter's "
            "folder",
            kind="missing_file",
        )
    fields = read_object(path)
    _check_kind(fields, path)
    targets = fields.get("target_modules")
    if isinstance(targets, str):
        targets = [targets]
    known = {*MODULES_OF_TARGETS, ALL_LINEAR}
    if not isinstance(targets, list) or not all(
        isinstance(each, str) and each in known for each in targets
    ):
        raise _refusal(
            path, "target_modules", targets, f"supported are {', '.join(MODULES_OF_TARGETS)}"
        )
    rank = fields.get("r")
    alpha = fields.get("lora_alpha")
    use_rslora = fields.get("use_rslora")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _refusal(path, "r", rank, f"it must be a whole number from 1 to {MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        raise _refusal(
            path, "lora_alpha", alpha, f"it must be a number above 0, at most {MAX_ALPHA:g}"
        )
    if use_rslora is not None and not isinstance(use_rslora, bool):
        raise _refusal(path, "use_rslora", use_rslora, "it must be true or false")
    return {
        "lora_r": rank,
        "lora_alpha": float(alpha),
        "use_rslora": bool(use_rslora),
        "lora_target_modules": list(LoRASection(lora_target_modules=targets).targets),
    }


def _check_kind(fields: Mapping[str, Any], path: Path) -> None:
    """:raises InputError: the adapter is no plain LoRA."""
    if fields.get("peft_type", "LORA") != "LORA":
        raise _refusal(path, "peft_type", fields["peft_type"], "it must be 'LORA'")
    if fields.get("bias") not in ("none", None):
        raise _refusal(path, "bias", fields["bias"], "it must be 'none'")
    init = fields.get("init_lora_weights")
    if not any(
        init is each or (isinstance(init, str) and init.lower() == each) for each in PLAIN_INITS
    ):
        raise _refusal(
            path,
            "init_lora_weights",
            init,
            "such an adapter belongs to a base whose weights peft changes when it loads the "
            "adapter; have it write a whole model (PeftModel.from_pretrained(BASE, "
            "ADAPTER).merge_and_unload().save_pretrained(OUT)) and start from that, or a plain "
            "adapter (save_pretrained(OUT, path_initial_model_for_weight_conversion=...))",
        )
    saved = fields.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(
        isinstance(each, str) and each in SCORE_HEADS for each in saved
    ):
        raise _refusal(
            path,
            "modules_to_save",
            saved,
            "only a head that scores may be trained whole beside an adapter",
        )
    for name, value in fields.items():
        if name not in WITHOUT_EFFECT | READ and value not in (None, False, [], {}):
            raise _refusal(
                path, name, value, "nothing here computes that; it must be absent, null or false"
            )


def _refusal(
    path: Path,
    field: str,
    value: Any,
    remedy: str,
) -> InputError:
    problem = f"{field} = {shorten_value(value)} is not supported"
    return InputError(f"{path}: {problem}; {remedy}", kind="bad_model")

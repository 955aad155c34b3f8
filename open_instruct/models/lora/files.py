"""Reads and writes adapters as peft does: adapter_config.json and adapter_model.safetensors.

Matrices are float32. A matrix is there under `base_model.model.` + the Hugging Face name of its
layer + `.lora_A.weight` or `.lora_B.weight`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from safetensors import safe_open
from safetensors.torch import save_file

from open_instruct.config.flags import spell_value
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import InputError, RunError
from open_instruct.data.files.foreign_json import read_object
from open_instruct.models import export_files
from open_instruct.models.hf.checkpoint_files import CheckpointFiles, read_header
from open_instruct.models.hf.head_kinds import HEAD_TENSORS, HF_SCORE, Head
from open_instruct.models.hf.names import TensorNames, clean_name
from open_instruct.models.load import find_cover_problem
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.models.lora.peft_config import CONFIG_NAME, read_settings
from open_instruct.parallel.process import run_on_main_process

WEIGHTS_NAME = "adapter_model.safetensors"
BASE_FINGERPRINT = "base_fingerprint"  # in the header of the weights, which other readers pass over
# Likewise: what the merged model's config.json adds to the base's, as JSON.
MODEL_FIELDS = "model_fields"
PREFIX = "base_model.model."
TASK_TYPES: dict[Head, str] = {
    "vocabulary": "CAUSAL_LM",
    "score": "SEQ_CLS",
    "classes": "TOKEN_CLS",
}


def find_peft_name(name: str, names: TensorNames) -> str:
    """Find the name in an adapter's file of, say, `blocks.3.attention.w_q.lora_A`."""
    if name in HEAD_TENSORS.get(names.head, {}):
        return f"{PREFIX}{names.hf_name(name)}"
    layer, _, leaf = name.rpartition(".")
    return f"{PREFIX}{names.hf_name(f'{layer}.weight').removesuffix('weight')}{leaf}.weight"


def read_head(folder: Path) -> Head:
    """Read which kind of head the model of the adapter in `folder` has.

    `read_settings` has accepted its file.
    """
    task = read_object(folder / CONFIG_NAME).get("task_type")
    for head, task_type in TASK_TYPES.items():
        if task_type == task:
            return head
    return "vocabulary"


def open_adapter(
    folder: Path,
    model: Transformer,
    names: TensorNames,
    lora: LoRASection,
) -> dict[str, torch.Tensor]:
    """Open views of the file's matrices, by OLMo-core's names; a copy of one reads it.

    :param model: on meta; it gets adapters, which define the matrices to find.
    :raises InputError: the adapter is missing or damaged, is of another model, or does not fit the
        flags.
    """
    settings = vars(lora) | {"lora_target_modules": list(lora.targets)}
    differing = [
        f"--{name} {spell_value(value)}"
        for name, value in read_settings(folder).items()
        if settings[name] != value
    ]
    if differing:
        problem = f"{folder} was made with other flags: give {' '.join(differing)}"
        raise InputError(f"--adapter_name_or_path {problem}", kind="conflict")
    add_adapters(model, lora, dtype=torch.float32)
    shapes = {
        clean_name(name): tuple(each.shape)
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    path = folder / WEIGHTS_NAME
    files = CheckpointFiles(folder, read_header(path))
    wanted = {find_peft_name(name, names): name for name in shapes}
    wanted_shapes = {file_name: shapes[name] for file_name, name in wanted.items()}
    problem = find_cover_problem(files, wanted_shapes)
    if problem:
        raise InputError(
            f"{path} {problem}. It is of other --lora_target_modules, or of another model",
            kind="bad_model",
        )
    return {name: files.read(file_name) for file_name, name in wanted.items()}


def check_base(folder: Path, base: Path, fingerprint: str) -> str | None:
    """Check that the adapter in `folder` belongs to `base`; a warning if that is unknown.

    :param fingerprint: of the weights of `base`.
    :raises InputError: the adapter was trained on other weights.
    """
    named = str(read_object(folder / CONFIG_NAME).get("base_model_name_or_path"))
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as adapter:
        known = (adapter.metadata() or {}).get(BASE_FINGERPRINT)
    if known is None and Path(named).expanduser().resolve() != base.resolve():
        return (
            f"{folder} says that it was made beside {named}: whether {base} has those weights "
            "cannot be told"
        )
    if known not in (None, fingerprint):
        raise InputError(
            f"{folder} was made beside {named}, and {base} has other weights; give that model",
            kind="other_run",
        )
    return None


def read_model_fields(folder: Path) -> dict[str, Any]:
    """Read the fields that config.json of the merged model adds to its base's.

    There are none in adapters that others wrote.

    :raises InputError: they are damaged.
    """
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as adapter:
        text = (adapter.metadata() or {}).get(MODEL_FIELDS, "{}")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{folder / WEIGHTS_NAME}: {MODEL_FIELDS} in its header is damaged ({error}); export "
            "the run again",
            kind="bad_model",
        ) from None


def write_adapter(
    folder: Path,
    adapter: Iterable[tuple[str, torch.Tensor]],
    names: TensorNames,
    lora: LoRASection,
    *,
    base: str,
    fingerprint: str,
    chat_template: str | None = None,
    more_config: Mapping[str, Any] | None = None,
    card: Callable[[], str | None] = lambda: None,
) -> None:
    """Write `adapter`, whole matrices by OLMo-core's names, in place of an earlier one.

    Collective; rank 0 writes.

    :param base: the name of the base model, for readers.
    :param fingerprint: of the weights of `base`, checked when a run goes on from the adapter.
    :param chat_template: of training, where it is not the base's own.
    :param more_config: the fields that config.json of the merged model adds to the base's.
    :param card: gives the text of README.md; only rank 0 calls it.
    :raises RunError: the disk filled up or failed; an earlier one is unharmed.
    """
    tensors = {}
    for name, whole in adapter:
        if dist.get_rank() == 0:
            tensors[find_peft_name(name, names)] = whole.to("cpu", torch.float32).contiguous()

    def write() -> None:
        with export_files.translate_disk_errors(folder, RunError):
            export_files.prepare_folder(folder, sum(tensor.nbytes for tensor in tensors.values()))
            beside = export_files.find_partial_folder(folder)
            header = {
                "format": "pt",
                BASE_FINGERPRINT: fingerprint,
                MODEL_FIELDS: json.dumps(dict(more_config or {})),
            }
            save_file(tensors, beside / WEIGHTS_NAME, metadata=header)
            config = _config(lora, base=base, head=names.head)
            (beside / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            export_files.write_texts(beside, chat_template=chat_template, card=card())
        export_files.put_in_place(folder)

    run_on_main_process(write)


def _config(lora: LoRASection, *, base: str, head: Head) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES[head],
        "base_model_name_or_path": base,
        "r": lora.lora_r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "use_rslora": lora.use_rslora,
        "target_modules": list(lora.targets),
        "modules_to_save": None if head == "vocabulary" else [HF_SCORE.removesuffix(".weight")],
        "bias": "none",
        "inference_mode": True,
    }

"""Adds an adapter to the model that it was trained beside, one tensor at a time."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from open_instruct.config.lora import LoRASection
from open_instruct.config.sections import ExportDtype, ModelSection
from open_instruct.data.chat import ChatFormat
from open_instruct.data.templates.chat_templates import ChatTemplate
from open_instruct.data.tokenizer import TOKENIZER_NAME, load_tokenizer
from open_instruct.models.build import build_model
from open_instruct.models.export import export_hf
from open_instruct.models.export_checks import check_destination, check_exportable
from open_instruct.models.export_files import CHAT_TEMPLATE_NAME
from open_instruct.models.heads.value_head import replace_head
from open_instruct.models.hf.head_kinds import HEAD_TENSORS, Head
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import check_cover, find_parameter_shapes
from open_instruct.models.lora.adapters import MergedWeights
from open_instruct.models.lora.files import check_base, open_adapter, read_head, read_model_fields
from open_instruct.models.lora.peft_config import read_settings
from open_instruct.models.model_folder import load_model_config
from open_instruct.models.open_files import FileWeights, open_files
from open_instruct.models.shards import find_local_shard
from open_instruct.objectives import prm, reward_model
from open_instruct.run.generation_settings import build_export_settings
from open_instruct.run.pretrained import find_tokenizer_beside


def merge_adapter(
    base: Path,
    adapter_folder: Path,
    out_folder: Path,
    *,
    export_dtype: ExportDtype,
) -> int:
    """Write the model in `base` with the adapter added to `out_folder`; returns its bytes.

    Raises:
        InputError: a folder is damaged, the adapter is of another model, or the result cannot be
            written.
    """
    lora = LoRASection(use_lora=True, **read_settings(adapter_folder))
    head = read_head(adapter_folder)
    hf_config = load_model_config(base)
    names = TensorNames(hf_config, head=head)
    files = open_files(base, hf_config)
    if head != "vocabulary":
        # A head that the base lacks is drawn, and then replaced by the adapter's.
        files = replace_head(files, hf_config, head, seed=0)
    model = build_model(hf_config, init_device="meta", head=head)
    shapes = find_parameter_shapes(model)
    check_cover(names, files, shapes)
    check_exportable(names, shapes)
    check_destination(base, out_folder)
    check_destination(adapter_folder, out_folder)
    adapter = open_adapter(adapter_folder, model, names, lora)
    warning = check_base(adapter_folder, base, files.fingerprint)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)

    heads = {
        name: find_local_shard(adapter[name])
        for name in HEAD_TENSORS.get(head, {})
        if name in adapter
    }
    weights = FileWeights(files, names, others=heads)
    dtype = files.main_dtype if export_dtype == "source" else getattr(torch, export_dtype)
    return export_hf(
        model.to(dtype),
        names,
        source_folder=base,
        out_folder=out_folder,
        dtype=dtype,
        weights=MergedWeights(weights, adapter, scale=lora.scale),
        **_read_settings(base, adapter_folder, head),
        more_config=_head_fields(hf_config, head) | read_model_fields(adapter_folder),
    )


def _read_settings(base: Path, adapter_folder: Path, head: Head) -> dict[str, Any]:
    """The settings of tokenizer and generation that go beside the model, for `export_hf`."""
    chat_template = _read_chat_template(adapter_folder)
    folder = find_tokenizer_beside(ModelSection(model_name_or_path=str(base)), base)
    if not (folder / TOKENIZER_NAME).is_file():
        return {"chat_template": chat_template}
    tokenizer = load_tokenizer(str(folder), flag="--model_name_or_path")
    template = chat_template or tokenizer.chat_template
    chat = None
    if head == "vocabulary" and isinstance(template, str):
        own_template = ChatTemplate(name="the adapter's own", text=template, is_foreign=True)
        chat = ChatFormat(tokenizer, own_template)
    return {
        "chat_template": chat_template,
        "tokenizer_folder": folder,
        **build_export_settings(base, folder, tokenizer, chat),
    }


def _read_chat_template(adapter_folder: Path) -> str | None:
    """The template that the adapter was trained with, where it is not the base's own."""
    path = adapter_folder / CHAT_TEMPLATE_NAME
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _head_fields(hf_config: PretrainedConfig, head: Head) -> dict[str, Any]:
    if head == "score":
        return reward_model.find_class_fields(hf_config)
    if head == "classes":
        return prm.find_class_fields(hf_config)
    return {}

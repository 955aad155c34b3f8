"""Writes a model in the other of the two forms of checkpoints, one tensor at a time."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from open_instruct.config.sections import ExportDtype, ModelSection
from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.templates.chat_templates import ChatTemplate
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.build import build_model
from open_instruct.models.export import export_hf
from open_instruct.models.export_checks import check_destination, check_exportable
from open_instruct.models.export_olmo_core import TokenizerFiles, export_olmo_core
from open_instruct.models.hf.head_kinds import CLASS_ENDINGS, has_head
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import check_cover, find_parameter_shapes
from open_instruct.models.model_folder import open_model_folder
from open_instruct.models.open_files import FileWeights, open_files
from open_instruct.run.first_look import check_vocabulary
from open_instruct.run.generation_settings import build_export_settings
from open_instruct.run.pretrained import find_tokenizer_beside


def convert_model(
    source: Path, out: Path, *, export_dtype: ExportDtype, tokenizer_name: str | None = None
) -> tuple[str, int]:
    """Write the model in `source` to `out` in the other form; returns that form, and its bytes.

    Raises:
        InputError: a folder is damaged, the other form has no such model, or `out` cannot be
            written.
    """
    model_folder = open_model_folder(source)
    hf_config = model_folder.load_config()
    for head in CLASS_ENDINGS:
        if has_head(hf_config, head):
            raise InputError(
                f"{source} is a model that gives scores, which has one form alone: Hugging Face's",
                kind="unsupported_model",
            )
    section = ModelSection(model_name_or_path=str(source), tokenizer_name_or_path=tokenizer_name)
    tokenizer_folder = find_tokenizer_beside(section, source)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    check_vocabulary(model_folder, tokenizer, tokenizer_folder)
    names = TensorNames(hf_config)
    files = open_files(model_folder, hf_config)
    model = build_model(hf_config, init_device="meta")
    check_cover(names, files, find_parameter_shapes(model))
    check_destination(source, out)
    dtype = files.main_dtype if export_dtype == "source" else getattr(torch, export_dtype)
    common: dict[str, Any] = {
        "source_folder": source,
        "out_folder": out,
        "dtype": dtype,
        "weights": FileWeights(files, names),
    }
    if model_folder.olmo_core is None:
        beside = TokenizerFiles(tokenizer=tokenizer, folder=tokenizer_folder)
        num_bytes = export_olmo_core(model.to(dtype), names, tokenizer=beside, **common)
        return "a checkpoint of OLMo-core", num_bytes
    check_exportable(names, find_parameter_shapes(model))
    num_bytes = export_hf(
        model.to(dtype),
        names,
        tokenizer_folder=tokenizer_folder,
        **build_export_settings(model_folder, tokenizer_folder, tokenizer, _find_chat(tokenizer)),
        **common,
    )
    return "a Hugging Face folder", num_bytes


def _find_chat(tokenizer: PreTrainedTokenizerFast) -> ChatFormat | None:
    """The chat format of the tokenizer's own template; None for a model that has none."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return None
    return ChatFormat(tokenizer, ChatTemplate(name="its own", text=template, is_foreign=True))

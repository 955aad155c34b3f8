"""`open-instruct merge`: a model with an adapter added to it, from folder to folder, a tensor at a
time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.lora import LoRASection
from open_instruct.config.parser import parse
from open_instruct.config.sections import ExportDtype, flag

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from open_instruct.models.hf.names import Head


@dataclass(kw_only=True)
class MergeFlags:
    """Add a low-rank adapter, as our runs and peft write them, to the model that it was trained
    beside, in float32, and write the result as a Hugging Face folder. The run is not needed. Needs
    one process, and no more memory than the largest tensor.

    Examples:
        open-instruct merge --model_name_or_path MODEL_DIR --adapter_name_or_path runs/a/adapter
            --output_dir merged
    """

    model_name_or_path: str = flag(
        "folder or hub name of the model that the adapter was trained beside"
    )
    adapter_name_or_path: str = flag("folder or hub name of the adapter")
    output_dir: str = flag(
        "where the model goes: a new folder, or an earlier export, which is replaced"
    )
    export_dtype: ExportDtype = flag("dtype of the model that is written", "source")


def main(words: Sequence[str]) -> int:
    """:raises InputError: a folder is missing or damaged, or the adapter is of another model."""
    flags = parse(MergeFlags, words)

    import torch

    from open_instruct.models.build import build_model
    from open_instruct.models.export import check_destination, check_exportable, export_hf
    from open_instruct.models.heads.value_head import open_head_files
    from open_instruct.models.hf.checkpoint_files import CheckpointFiles
    from open_instruct.models.hf.head_kinds import HEAD_TENSORS
    from open_instruct.models.hf.hf_config import load_hf_config
    from open_instruct.models.hf.names import TensorNames
    from open_instruct.models.load import check_cover, parameter_shapes
    from open_instruct.models.lora.adapters import MergedWeights
    from open_instruct.models.lora.files import (
        check_base,
        open_adapter,
        read_head,
        read_model_fields,
    )
    from open_instruct.models.lora.peft_config import read_settings
    from open_instruct.models.shards import held
    from open_instruct.run.first_look import local_folder

    base, adapter_folder = (
        local_folder(flags.model_name_or_path),
        local_folder(flags.adapter_name_or_path),
    )
    lora = LoRASection(use_lora=True, **read_settings(adapter_folder))
    head = read_head(adapter_folder)
    hf_config = load_hf_config(str(base))
    names = TensorNames(hf_config, head=head)
    # A head that the base lacks is drawn, and then replaced by the adapter's.
    is_plain = head == "vocabulary"
    files = (
        CheckpointFiles.open(base) if is_plain else open_head_files(base, hf_config, head, seed=0)
    )
    model = build_model(hf_config, init_device="meta", head=head)
    shapes = parameter_shapes(model)
    check_cover(names, files, shapes)
    check_exportable(names, shapes)
    check_destination(base, Path(flags.output_dir))
    check_destination(adapter_folder, Path(flags.output_dir))
    adapter = open_adapter(adapter_folder, model, names, lora)
    if warning := check_base(adapter_folder, base, files.fingerprint):
        print(f"warning: {warning}", file=sys.stderr)

    # Views: nothing is read before its use.
    plain = {name: held(files.read(hf_name)) for name, hf_name in names}
    plain |= {name: held(adapter[name]) for name in HEAD_TENSORS.get(head, {}) if name in adapter}
    dtype = (
        files.main_dtype if flags.export_dtype == "source" else getattr(torch, flags.export_dtype)
    )
    num_bytes = export_hf(
        model.to(dtype),
        names,
        source_folder=base,
        out_folder=flags.output_dir,
        dtype=dtype,
        weights=MergedWeights(plain, adapter, scale=lora.scale),
        **_settings(base, adapter_folder, head),
        more_config=_fields_of_head(hf_config, head) | read_model_fields(adapter_folder),
    )
    out = Path(flags.output_dir).absolute()
    print(f"{base} with the adapter of {adapter_folder} is in {out} ({num_bytes / 1e6:,.1f} MB)")
    return 0


def _settings(base: Path, adapter_folder: Path, head: Head) -> dict[str, Any]:
    """The files of settings beside the model, as arguments of `export_hf`: its tokenizer's, and
    where a reply ends.
    """
    from open_instruct.data.chat import ChatFormat
    from open_instruct.data.templates.chat_templates import ChatTemplate
    from open_instruct.data.tokenizer import TOKENIZER_NAME, load_tokenizer
    from open_instruct.run.turn_ends import exported_settings

    chat_template = _chat_template(adapter_folder)
    if not (base / TOKENIZER_NAME).is_file():
        return {"chat_template": chat_template}
    tokenizer = load_tokenizer(str(base), flag="--model_name_or_path")
    template = chat_template or tokenizer.chat_template
    chat = None
    if head == "vocabulary" and isinstance(template, str):
        chat = ChatFormat(
            tokenizer, ChatTemplate(name="the adapter's own", text=template, is_foreign=True)
        )
    return {"chat_template": chat_template, **exported_settings(base, base, tokenizer, chat)}


def _chat_template(adapter_folder: Path) -> str | None:
    """The template that the adapter was trained with, where it is not the base's own."""
    from open_instruct.models.export_files import CHAT_TEMPLATE_NAME

    path = adapter_folder / CHAT_TEMPLATE_NAME
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _fields_of_head(hf_config: PretrainedConfig, head: Head) -> dict[str, Any]:
    from open_instruct.objectives import prm, reward_model

    if head == "score":
        return reward_model.fields_of_class(hf_config)
    return prm.fields_of_class(hf_config) if head == "classes" else {}

"""Writes a sharded model as a Hugging Face folder, tensor by tensor, spread over the ranks."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from olmo_core.distributed.utils import get_world_size
from torch import nn

from open_instruct.core.families import find_family
from open_instruct.models import export_files
from open_instruct.models.export_files import append_tensor
from open_instruct.models.export_rounds import finish_export, prepare_export, write_weights
from open_instruct.models.hf.hf_config import remove_code_fields
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.hf.rope import export_rope_fields, read_rope
from open_instruct.models.load import find_parameter_shapes
from open_instruct.models.model_folder import find_config_file, open_model_folder
from open_instruct.models.shards import LocalShard, find_local_shards, reshard

MAX_FILE_BYTES = 2 * 2**30
GENERATION_CONFIG_NAME = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    export_files.TOKENIZER_CONFIG_NAME,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    export_files.OLD_CHAT_TEMPLATE_NAME,
    export_files.CHAT_TEMPLATE_NAME,
)


@torch.no_grad()
def export_hf(
    model: nn.Module,
    names: TensorNames,
    *,
    source_folder: str | Path,
    out_folder: str | Path,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
    tokenizer_folder: str | Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    card: Callable[[], str | None] = lambda: None,
    more_config: Mapping[str, Any] | None = None,
    weights: Mapping[str, LocalShard] | None = None,
) -> int:
    """Write `model`, on any mesh, as a Hugging Face folder; returns the bytes of all its tensors.

    Collective: every rank calls it and sees `out_folder`.

    Args:
        names: the model's names.
        source_folder: the start model; its config.json (with the dtype changed, and without fields
            that name code) and generation_config.json are kept.
        out_folder: replaced as a whole in the end, if it is an earlier export.
        dtype, max_file_bytes: of all tensors, and of tensor data in one file.
        tokenizer_folder: holds the tokenizer's files; default: `source_folder`.
        tokenizer_config, generation_config: fields of these files; None: the files as they are.
        chat_template: Jinja text to store instead of the tokenizer's own chat template.
        card: gives the text of README.md; only rank 0 calls it.
        more_config: fields of config.json in place of the source's; None leaves one out.
        weights: the written shard of each parameter; default: `find_local_shards(model)`.

    Raises:
        InputError: `out_folder` is the source, or cannot be replaced or written.
        RunError: the disk filled up or failed; an earlier export is unharmed.
    """
    reshard(model)
    source = Path(source_folder)
    out = Path(out_folder).absolute()
    shapes = find_parameter_shapes(model)
    plan = export_files.plan_files(
        names, shapes, dtype, max_file_bytes=max_file_bytes, num_ranks=get_world_size()
    )
    num_bytes = sum(tensor.num_bytes for file in plan for tensor in file.tensors)
    prepare_export(source, out, num_bytes)
    folder = export_files.find_partial_folder(out)
    problems = write_weights(folder, plan, weights or find_local_shards(model), append_tensor)

    def finish() -> None:
        export_files.write_index(folder, plan)
        _write_config(folder, source, names, dtype, more_config or {})
        copy_files(folder, source, (GENERATION_CONFIG_NAME,))
        copy_files(folder, Path(tokenizer_folder or source), TOKENIZER_FILES)
        export_files.write_fields(folder / GENERATION_CONFIG_NAME, generation_config)
        export_files.write_fields(folder / export_files.TOKENIZER_CONFIG_NAME, tokenizer_config)
        export_files.write_texts(folder, chat_template=chat_template, card=card())

    finish_export(out, finish, problems)
    return num_bytes


def _write_config(
    folder: Path,
    source: Path,
    names: TensorNames,
    dtype: torch.dtype,
    more: Mapping[str, Any],
) -> None:
    """Write the source's config.json with `more` and the new dtype, without fields that name code.

    Other readers find in it the model that was trained: RoPE in the spelling of each, and the class
    of its head.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    hf_config = names.hf_config
    path = find_config_file(source)
    source_fields = hf_config.to_dict()
    if path.is_file():
        source_fields = open_model_folder(source).read_fields()
    fields = remove_code_fields(source_fields) | dict(more)
    left_out = {name for name, value in more.items() if value is None}
    fields = {name: value for name, value in fields.items() if name not in left_out}
    family = find_family(hf_config.model_type)
    rope = read_rope(hf_config.to_dict(), family, str(path))
    fields = export_rope_fields(fields, family, rope)
    if names.head == "vocabulary":
        fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]]
    # transformers 5 writes "dtype", older ones and most other readers know "torch_dtype"; both are
    # read.
    for key in {"dtype", "torch_dtype"} & fields.keys() or {"torch_dtype"}:
        fields[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def copy_files(folder: Path, source: Path, file_names: tuple[str, ...]) -> None:
    """Copy those of the files that `source` has."""
    for file_name in file_names:
        if (source / file_name).is_file():
            shutil.copyfile(source / file_name, folder / file_name)

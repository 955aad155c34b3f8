"""Writes a sharded model as a checkpoint of OLMo-core, tensor by tensor, spread over the ranks.

`model_and_optim` has the weights alone, in the format of `torch.distributed.checkpoint`: each
tensor is one chunk, which torch.save writes, and `.metadata` says where each lies. OLMo-core's own
loader, Trainer and converter open the folder.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from olmo_core.data.tokenizer import TokenizerConfig
from olmo_core.distributed.checkpoint.filesystem import _StorageInfo
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.transformer import TransformerConfig
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from open_instruct.core.errors import InputError
from open_instruct.models import export_files
from open_instruct.models.export import TOKENIZER_FILES, copy_files
from open_instruct.models.export_files import PlannedFile, PlannedTensor
from open_instruct.models.export_rounds import finish_export, prepare_export, write_weights
from open_instruct.models.hf.head_kinds import LM_HEAD
from open_instruct.models.hf.names import EMBEDDINGS, TensorNames
from open_instruct.models.load import find_parameter_shapes
from open_instruct.models.olmo_core.dcp_names import METADATA_NAME, MODEL_PREFIX, WEIGHTS_FOLDER
from open_instruct.models.shards import LocalShard, find_local_shards, reshard
from open_instruct.models.stock_config import build_stock_config
from open_instruct.parallel.process import gather_objects

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_FILE_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer to put beside a model: its files' folder, and their fields where they change."""

    tokenizer: PreTrainedTokenizerFast
    folder: Path
    config: Mapping[str, Any] | None = None
    chat_template: str | None = None


Places = dict[str, tuple[str, int, int]]
"""The file, the first byte and the number of bytes of each tensor, by OLMo-core's names."""


def check_olmo_core_exportable(names: TensorNames) -> None:
    """Refuse, before training, a model that OLMo-core could not open.

    :raises InputError: OLMo-core has no such model, or its head gives scores.
    """
    if names.head != "vocabulary":
        raise InputError(
            "--export_olmo_core: a model that gives scores has no checkpoint in OLMo-core; leave "
            "the flag out",
            kind="conflict",
        )
    build_stock_config(names.hf_config)


@torch.no_grad()
def export_olmo_core(
    model: nn.Module,
    names: TensorNames,
    *,
    source_folder: str | Path,
    out_folder: str | Path,
    dtype: torch.dtype,
    tokenizer: TokenizerFiles,
    max_file_bytes: int = MAX_FILE_BYTES,
    weights: Mapping[str, LocalShard] | None = None,
) -> int:
    """Write `model`, on any mesh, as a checkpoint of OLMo-core; returns the bytes of all tensors.

    Collective: every rank calls it and sees `out_folder`, which is replaced as a whole in the end,
    if it is an earlier export.

    Args:
        names: the model's names.
        source_folder: the start model, which `out_folder` must not be.
        dtype, max_file_bytes: of all tensors, and of tensor data in one file.
        tokenizer: whose files go beside the model, where OLMo-core finds them by its config.json.
        weights: the written shard of each parameter; default: `find_local_shards(model)`.

    Raises:
        InputError: OLMo-core has no such model, or `out_folder` is the source, or cannot be
            replaced or written.
        RunError: the disk filled up or failed; an earlier export is unharmed.
    """
    config = build_stock_config(names.hf_config)
    reshard(model)
    out = Path(out_folder).absolute()
    shapes = find_parameter_shapes(model)
    plan = _plan_files(names, shapes, dtype, max_file_bytes)
    num_bytes = sum(tensor.num_bytes for file in plan for tensor in file.tensors)
    prepare_export(Path(source_folder), out, num_bytes)
    folder = export_files.find_partial_folder(out)
    (folder / WEIGHTS_FOLDER).mkdir(exist_ok=True)
    places: Places = {}

    def append(
        folder: Path, file: PlannedFile, tensor: PlannedTensor, values: torch.Tensor
    ) -> None:
        is_last = tensor is file.tensors[-1]
        places[tensor.name] = _append_chunk(folder / file.file_name, values, is_last=is_last)

    problems = write_weights(folder, plan, weights or find_local_shards(model), append)
    for others in gather_objects(dict(places)):
        places.update(others)

    def finish() -> None:
        tensors = {tensor.name: tensor for file in plan for tensor in file.tensors}
        if places.keys() == tensors.keys():  # else a rank has a problem, which is raised
            _write_metadata(folder / WEIGHTS_FOLDER, tensors, places, is_tied=names.tied)
        _write_tokenizer(folder, tokenizer)
        fields = _describe_model(names, config, tokenizer, out)
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    finish_export(out, finish, problems)
    return num_bytes


def _describe_model(
    names: TensorNames, config: TransformerConfig, tokenizer: TokenizerFiles, out: Path
) -> dict[str, Any]:
    """The fields of config.json, of which OLMo-core's readers take two sections."""
    return {
        "model": config.as_config_dict(),
        "dataset": {
            "tokenizer": _describe_tokenizer(tokenizer.tokenizer, out),
            "sequence_length": names.hf_config.max_position_embeddings,
        },
    }


def _write_tokenizer(folder: Path, tokenizer: TokenizerFiles) -> None:
    copy_files(folder, tokenizer.folder, TOKENIZER_FILES)
    export_files.write_fields(folder / export_files.TOKENIZER_CONFIG_NAME, tokenizer.config)
    export_files.write_texts(folder, chat_template=tokenizer.chat_template, card=None)


def _plan_files(
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_file_bytes: int,
) -> Sequence[PlannedFile]:
    """The files to write, by the names that DCP gives them: of a rank, and numbered."""
    plan = export_files.plan_files(
        names, shapes, dtype, max_file_bytes=max_file_bytes, num_ranks=get_world_size()
    )
    numbers: dict[int, int] = {}
    files = []
    for file in plan:
        number = numbers.get(file.owner, 0)
        numbers[file.owner] = number + 1
        name = f"{WEIGHTS_FOLDER}/__{file.owner}_{number}.distcp"
        files.append(replace(file, file_name=name))
    return files


def _append_chunk(path: Path, values: torch.Tensor, *, is_last: bool) -> tuple[str, int, int]:
    """Write a tensor at the end of a file, which its last tensor has flushed to the disk.

    Returns its place.
    """
    with path.open("ab") as opened:
        start = opened.tell()
        torch.save(values, opened)
        num_bytes = opened.tell() - start
        if is_last:
            opened.flush()
            os.fsync(opened.fileno())
    return path.name, start, num_bytes


def _write_metadata(
    folder: Path,
    tensors: Mapping[str, PlannedTensor],
    places: Places,
    *,
    is_tied: bool,
) -> None:
    """Write `.metadata`, which lists the head of a tied model too, as OLMo-core's models do."""
    listed = {name: name for name in tensors}
    if is_tied:
        listed[LM_HEAD] = EMBEDDINGS
    entries: dict[str, Any] = {}
    paths: dict[str, tuple[str, str]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, stored in listed.items():
        tensor = tensors[stored]
        start = torch.Size([0] * len(tensor.shape))
        size = torch.Size(tensor.shape)
        full_name = MODEL_PREFIX + name
        entries[full_name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=size,
            chunks=[ChunkStorageMetadata(offsets=start, sizes=size)],
        )
        paths[full_name] = (MODEL_PREFIX.removesuffix("."), name)
        storage[MetadataIndex(full_name, start, 0)] = _StorageInfo(*places[stored])
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(),
    )
    (folder / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def _describe_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> dict[str, Any]:
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(
            f"{out}: the tokenizer has no eos token, which OLMo-core's config.json needs",
            kind="bad_model",
        )
    padding = tokenizer.pad_token_id
    return TokenizerConfig(
        vocab_size=len(tokenizer),
        eos_token_id=end,
        pad_token_id=end if padding is None else padding,
        bos_token_id=tokenizer.bos_token_id,
        identifier=str(out),
    ).as_config_dict()

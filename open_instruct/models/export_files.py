"""Files of an export: planned from shapes, written tensor by tensor, moved into place as a whole.

A safetensors file begins with a header that gives every tensor's place, so with a plan made from
shapes alone it can be written front to back without ever holding more than one tensor.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from open_instruct.core.errors import RunError
from open_instruct.data.files.foreign_json import read_object
from open_instruct.models.hf.checkpoint_files import make_header
from open_instruct.models.hf.hf_config import INDEX_NAME, SINGLE_NAME
from open_instruct.models.hf.names import TensorNames

CHAT_TEMPLATE_NAME = "chat_template.jinja"
OLD_CHAT_TEMPLATE_NAME = "chat_template.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
CARD_NAME = "README.md"
_FULL = "the disk is full: free some space or export to another disk"
_FORBIDDEN = "it may not be written to: change its permissions or choose another folder"
REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENOENT: "the folder is gone or not shared: every rank must see the same --output_dir",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor to write: both its names, full shape, stored dtype."""

    name: str
    hf_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One file to write: its tensors in the order of their data, and the writer's global rank."""

    file_name: str
    owner: int
    tensors: tuple[PlannedTensor, ...]


def plan_files(
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    *,
    max_file_bytes: int,
    num_ranks: int,
) -> tuple[PlannedFile, ...]:
    """Fill files in layer order up to `max_file_bytes`, and spread their owners.

    A tensor that is larger has a file to itself.

    Example: three files on two ranks are written by ranks 0, 1 and 0; two files on eight by ranks 0
    and 4.
    """
    groups: list[list[PlannedTensor]] = [[]]
    num_bytes = 0
    for name, hf_name in names:
        tensor = PlannedTensor(
            name=name,
            hf_name=hf_name,
            shape=shapes[name],
            dtype=dtype,
        )
        if groups[-1] and num_bytes + tensor.num_bytes > max_file_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.num_bytes
    stride = max(1, num_ranks // len(groups))  # fewer files than ranks: owners on different nodes
    files = []
    for number, group in enumerate(groups):
        name = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        if len(groups) == 1:
            name = SINGLE_NAME
        owner = number * stride % num_ranks
        files.append(PlannedFile(file_name=name, owner=owner, tensors=tuple(group)))
    return tuple(files)


def plan_rounds(
    files: Sequence[PlannedFile],
) -> Iterator[dict[int, tuple[PlannedFile, PlannedTensor]]]:
    """Rounds that all ranks go through together: in each, every owner gets its next tensor.

    So all owners write at the same time, each its own files one after the other.
    """
    tensors_by_owner: dict[int, list[tuple[PlannedFile, PlannedTensor]]] = {}
    for file in files:
        entries_of_owner = tensors_by_owner.setdefault(file.owner, [])
        entries_of_owner += [(file, tensor) for tensor in file.tensors]
    for entries in zip_longest(*tensors_by_owner.values()):
        yield {entry[0].owner: entry for entry in entries if entry is not None}


def append_tensor(
    folder: Path,
    file: PlannedFile,
    tensor: PlannedTensor,
    values: torch.Tensor,
) -> None:
    """Write the next tensor of a planned file; the last one is flushed to the disk.

    :param values: on the CPU and contiguous.

    :raises OSError: the disk filled up or failed.
    """
    assert (tuple(values.shape), values.dtype) == (tensor.shape, tensor.dtype), tensor.hf_name
    with (folder / file.file_name).open("ab") as opened:
        if tensor is file.tensors[0]:
            tensors = ((each.hf_name, each.dtype, each.shape) for each in file.tensors)
            opened.write(make_header(tensors, metadata={"format": "pt"}))
        opened.write(np.from_dlpack(values.detach().flatten().view(torch.uint8)).data)
        if tensor is file.tensors[-1]:
            opened.flush()
            os.fsync(opened.fileno())


def write_index(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Write `model.safetensors.index.json`, unless there is one file, which needs none."""
    if len(files) == 1:
        return
    weight_map: dict[str, str] = {}
    total_size = 0
    for file in files:
        weight_map |= {tensor.hf_name: file.file_name for tensor in file.tensors}
        total_size += sum(tensor.num_bytes for tensor in file.tensors)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_texts(folder: Path, *, chat_template: str | None, card: str | None) -> None:
    """Write the text files beside a model; None leaves an existing file."""
    for name, text in {CHAT_TEMPLATE_NAME: chat_template, CARD_NAME: card}.items():
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    align_chat_templates(folder, is_chosen=chat_template is not None)


def align_chat_templates(folder: Path, *, is_chosen: bool) -> None:
    """Write chat_template.jinja's text into the other files in which readers look for it.

    Of several templates transformers takes that file, llama.cpp and others tokenizer_config.json.

    Args:
        folder: of the export.
        is_chosen: whether the run chose the template, in place of the tokenizer's own; then named
            ones, such as "tool_use", go, too.
    """
    file = folder / CHAT_TEMPLATE_NAME
    if not file.is_file():
        return
    template = file.read_text(encoding="utf-8")
    for name in (TOKENIZER_CONFIG_NAME, OLD_CHAT_TEMPLATE_NAME):
        path = folder / name
        fields = read_object(path) if path.is_file() else {}
        other = fields.get("chat_template")
        if other not in (None, template) and (is_chosen or isinstance(other, str)):
            write_fields(path, fields | {"chat_template": template})


def write_fields(path: Path, fields: Mapping[str, Any] | None) -> None:
    """Write a JSON file in place of the one that was copied, unless it has these fields."""
    if fields is None or (path.is_file() and read_object(path) == fields):
        return
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def find_partial_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _find_previous_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.previous")


def prepare_folder(out: Path, num_bytes: int) -> None:
    """Make an empty folder beside `out`, after removing the remains of an interrupted export.

    Raises:
        OSError: it cannot be made, or the disk has no room for `num_bytes`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    if _find_previous_folder(out).exists() and not out.exists():
        _find_previous_folder(out).rename(out)
    for leftover in (find_partial_folder(out), _find_previous_folder(out)):
        if leftover.exists():
            shutil.rmtree(leftover)
    if shutil.disk_usage(out.parent).free < num_bytes:
        raise OSError(errno.ENOSPC, f"no room for {num_bytes / 1e9:.1f} GB")
    find_partial_folder(out).mkdir()


def find_replace_problem(out: Path) -> str | None:
    """Find what would keep a finished export from being moved to `out`; None if nothing does."""
    for path in (out, find_partial_folder(out), _find_previous_folder(out)):
        if path.is_symlink():
            return (
                f"{path} is a link to {os.readlink(path)}; an export takes the place of a "
                "folder: remove the link"
            )
        if path.exists() and not path.is_dir():
            return f"{path} is a file; remove it, or choose another folder"
        if path.is_mount():
            return (
                f"{path} is a mount of its own, which cannot be replaced; mount the folder above it"
            )
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written; change its permissions or choose another folder"
    return None


def put_in_place(out: Path) -> None:
    """Move the finished partial folder to `out`, replacing it.

    Raises:
        RunError: the disk failed.
    """
    previous = _find_previous_folder(out)
    with translate_disk_errors(
        out, RunError, hint=f" (the finished export is in {find_partial_folder(out)})"
    ):
        if out.exists():
            out.rename(previous)
        find_partial_folder(out).rename(out)
        if previous.exists():
            shutil.rmtree(previous)


@contextmanager
def translate_disk_errors(path: Path, kind: type[Exception], *, hint: str = "") -> Iterator[None]:
    """A context whose OSErrors are raised as `kind`, with what would help."""
    try:
        yield
    except OSError as error:
        raise kind(explain_disk_error(path, error) + hint) from None


def explain_disk_error(path: Path, error: OSError) -> str:
    """Name the failure of a disk and its remedy, in one sentence."""
    remedy = REMEDIES.get(error.errno or 0, "choose another folder or disk")
    return f"cannot export to {path}: {error.strerror or error}; {remedy}"

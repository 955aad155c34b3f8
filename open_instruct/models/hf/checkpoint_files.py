"""Opens the safetensors files of a Hugging Face checkpoint, and reads parts of their tensors.

Opening a checkpoint reads only the JSON header of each file. The library checks headers against the
files' sizes, and this module checks them against the index, so that a damaged checkpoint is refused
before anything is allocated. Tensors are views of the mapped file: the operating system reads the
pages that a copy touches, and they are not the process's own memory.

The format, written here too since the library writes whole tensors only: 8 bytes (little-endian
length of the header), the header (JSON: name -> dtype, shape and `[begin, end)` in the data that
follows), the data. See https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from olmo_core.distributed.utils import get_rank, get_world_size
from safetensors import SafetensorError, safe_open

from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import one_line, read_object
from open_instruct.models.hf.hf_config import INDEX_NAME, find_weights_file
from open_instruct.models.hf.names import unpack_tensor
from open_instruct.parallel.process import gather_objects

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DIGESTED_BYTES = 64 * 2**20
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


ReadBox = Callable[[tuple[slice, ...]], torch.Tensor]
FileRange = tuple[Path, int, int]
"""A file, the first of some bytes in it, and the end of them."""


class TensorOnDisk(Protocol):
    """A tensor of a checkpoint's files, of whatever format."""

    @property
    def path(self) -> Path: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ranges(self) -> Sequence[FileRange]:
        """The bytes that a fingerprint of the tensor is made of."""

    def open(self) -> ReadBox:
        """What reads a box of the tensor. The result is not for writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The entry of a tensor in a file's header, or of `part` of the tensor `stored` there."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: str
    part: tuple[Any, ...] = ()

    @property
    def ranges(self) -> Sequence[FileRange]:
        """All of the file, whose header counts too."""
        return [(self.path, 0, self.path.stat().st_size)]

    def open(self) -> ReadBox:
        """Map the file: no bytes are read until a view is copied from.

        The file's pages are let go with the last view of them.
        """
        with safe_open(self.path, framework="pt") as file:
            view: torch.Tensor = file.get_tensor(self.stored)[self.part]
        return view.__getitem__


class CheckpointFiles:
    """The tensors of a checkpoint folder, by their Hugging Face names.

    Example::

        files = CheckpointFiles.open("allenai/OLMo-2-1B")
        files.shapes["model.norm.weight"]                                      # (2048,)
        files.read("model.embed_tokens.weight", (slice(0, 16), slice(None)))   # 16 rows
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorOnDisk],
        *,
        spelling: Mapping[str, str] | None = None,
        salt: str = "",
    ) -> None:
        """Take tensors that were found in files of `folder`.

        :param spelling: the names in the files, where they are others than Hugging Face's.
        :param salt: what the fingerprint follows from, beside the bytes in files.
        """
        self.folder = folder
        self._salt = salt.encode()
        self.spelling = spelling or {}
        # A torch.Tensor is in none of the files.
        self.tensors: dict[str, TensorOnDisk | torch.Tensor] = dict(tensors)

    @classmethod
    def open(cls, folder: str | Path) -> CheckpointFiles:
        """Read the headers of `folder`'s safetensors files.

        Raises:
            InputError: no such folder, no safetensors in it, or files that do not fit together;
                the message names the file or the tensor.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(
                f"{folder} is not a folder: give the folder of a Hugging Face checkpoint",
                kind="missing_file",
            )
        path = find_weights_file(folder)
        stored = _read_indexed(path) if path.name == INDEX_NAME else read_header(path)
        tensors: dict[str, StoredTensor] = {}
        for tensor in stored.values():
            for name, part in unpack_tensor(tensor.stored, tensor.shape).items():
                if name in tensors:
                    raise InputError(
                        f"{folder}: {name!r} is there twice, in {tensors[name].stored!r} and in "
                        f"{tensor.stored!r}: fetch the checkpoint again",
                        kind="bad_model",
                    )
                shape = tuple(torch.empty(tensor.shape, device="meta")[part].shape)
                tensors[name] = replace(tensor, part=part, shape=shape)
        return cls(folder, tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype that most values are stored in."""
        num_values: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            num_values[tensor.dtype] += torch.Size(tensor.shape).numel()
        return num_values.most_common(1)[0][0]

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change if any byte of the tensors' files does.

        Collective at its first use.

        The files are cut into chunks whose digests the ranks share out among themselves, so every
        byte is read once whatever the number of ranks, and the result is the same for any number.
        The folder and the names of the files do not matter. All ranks see the same files.
        """
        ranges: set[FileRange] = set()
        for tensor in self.tensors.values():
            if not isinstance(tensor, torch.Tensor):
                ranges.update(tensor.ranges)
        # Chunks in the order of the files' names; no chunk crosses two ranges.
        chunks: list[FileRange] = []
        for path, first, end in sorted(ranges):
            for start in range(first, end, DIGESTED_BYTES):
                chunks.append((path, start, min(start + DIGESTED_BYTES, end)))
        rank_numbers = range(get_rank(), len(chunks), get_world_size())
        rank_digests = {number: _digest(*chunks[number]) for number in rank_numbers}
        digests: dict[int, bytes] = {}
        for some in gather_objects(rank_digests):
            digests |= some
        joined = b"".join(digests[number] for number in range(len(chunks)))
        return xxhash.xxh3_128(joined + self._salt).hexdigest()

    def find_file(self, name: str) -> Path:
        tensor = self.tensors[name]
        assert not isinstance(tensor, torch.Tensor), f"{name} is in no file"
        return tensor.path

    def spell(self, name: str) -> str:
        """The name of a tensor in the files, for messages."""
        return self.spelling.get(name, name)

    def open_tensor(self, name: str) -> ReadBox:
        """What reads boxes of a tensor; whoever reads several opens its file once."""
        tensor = self.tensors[name]
        if isinstance(tensor, torch.Tensor):
            return tensor.__getitem__
        return tensor.open()

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> torch.Tensor:
        """Read `tensor[slices]`, which is not for writing.

        Of safetensors it is a view on the mapped file, and no bytes are read until it is copied
        from.
        """
        return self.open_tensor(name)(slices)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


def _digest(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return xxhash.xxh3_128_digest(file.read(end - start))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that one safetensors file holds, in the order of their data.

    Raises:
        InputError: the file is not safetensors, or is shorter or longer than its header says.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                if not name.isprintable():
                    problem = f"the tensor name {name!r} cannot be printed; fetch the file again"
                    raise InputError(f"{path}: {problem}", kind="bad_model")
                tensor = file.get_slice(name)
                dtype = tensor.get_dtype()
                if dtype not in DTYPES:
                    problem = f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(DTYPES)}"
                    raise InputError(f"{path}: {problem}", kind="bad_model")
                shape = tuple(tensor.get_shape())
                tensors[name] = StoredTensor(
                    path=path,
                    dtype=DTYPES[dtype],
                    shape=shape,
                    stored=name,
                )
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", kind="bad_model"
        ) from None
    except SafetensorError as error:
        with path.open("rb") as file:
            is_pointer = file.read(24).startswith(b"version https://git-lfs")
        remedy = "fetch it again"
        if is_pointer:
            remedy = "it is a Git LFS pointer: run `git lfs pull`"
        what = f"not a safetensors file, or a truncated or damaged one ({one_line(error)})"
        raise InputError(f"{path} is {what}: {remedy}", kind="bad_model") from None
    return tensors


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Make the header of a file of `tensors`: the name, dtype and shape of each.

    Their data follows in that order.
    """
    entries: dict[str, object] = {}
    if metadata:
        entries["__metadata__"] = metadata
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    return struct.pack("<Q", len(text)) + text


def _read_indexed(index_path: Path) -> dict[str, StoredTensor]:
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file_name, str) for file_name in weight_map.values()
    ):
        raise InputError(
            (f"{index_path} has no 'weight_map' from tensor names to file names: fetch it again"),
            kind="bad_model",
        )
    for name, file_name in weight_map.items():
        if (
            Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
            or not file_name.isprintable()
        ):
            raise InputError(
                f"{index_path}: tensor {name!r} is said to be in {file_name!r}; only names of "
                "safetensors files beside the index may stand there: fetch the checkpoint again, "
                "from a source that you trust",
                kind="bad_model",
            )
    paths = {name: index_path.parent / file_name for name, file_name in weight_map.items()}
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(set(paths.values())):
        if not path.is_file():
            raise InputError(
                (f"{path} is missing, but {index_path.name} names it: fetch the checkpoint again"),
                kind="missing_file",
            )
        stored = read_header(path)
        named = {name for name, other in paths.items() if other == path}
        differing = sorted(stored.keys() ^ named)
        if differing:
            what = (
                f"{path.name} and {index_path} do not agree on whether tensor {differing[0]!r} "
                "is in that file"
            )
            raise InputError(f"{what}: fetch the checkpoint again", kind="bad_model")
        tensors |= stored
    return tensors

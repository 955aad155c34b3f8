"""The weights in a checkpoint, read without a learner."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from open_instruct.checkpoints.step_folder import INDEX
from open_instruct.core.errors import InputError
from open_instruct.models.box_files import make_part, read_parts
from open_instruct.models.hf.checkpoint_files import DTYPES
from open_instruct.models.shards import LocalShard, find_local_shard, find_stack_rows

# Before the names of weights: in checkpoints of FSDP2, and in DeepSpeed's, where each is flat.
PREFIXES = ("model.", "zero.weights.")


class SavedWeights(Mapping[str, LocalShard]):
    """The weights of a checkpoint by OLMo-core's names, each read from all ranks' files on access.

    Example, on the CPU::

        SavedWeights(Path("OUT/step4"), find_parameter_shapes(model))["embeddings.weight"]

    Args:
        shapes: of the parameters; the checkpoint may hold fewer, as after training adapters.

    Raises:
        InputError: DeepSpeed had split the matrices over ranks.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder = folder
        self._shapes = shapes
        self._index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())["tensors"]
        self._full_names: dict[str, str] = {}
        for prefix in PREFIXES:
            names = [name for name in shapes if prefix + name in self._index]
            self._full_names |= {name: prefix + name for name in names}
        self._rows: dict[str, tuple[str, int | None]] = {}
        for name in self._full_names:
            for row, index in find_stack_rows(name, shapes[name]).items():
                self._rows[row] = (name, index)
        self._last = ("", torch.empty(0))
        if not self._full_names:
            raise InputError(
                f"the checkpoint {folder} has matrices that DeepSpeed had split "
                "(--tensor_parallel_degree): give the command of the run again to end it with an "
                "export",
                kind="bad_checkpoint",
            )

    def __getitem__(self, name: str) -> LocalShard:
        name, index = self._rows[name]
        if self._last[0] != name:  # callers take the matrices of a stack one after the other
            self._last = (name, self._read_whole(name))
        _, whole = self._last
        if index is not None:
            whole = whole[index]
        return find_local_shard(whole)

    def _read_whole(self, name: str) -> torch.Tensor:
        full_name = self._full_names[name]
        entry = self._index[full_name]
        whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        read_parts(self._folder, self._index, {full_name: make_part(whole)})
        return whole.view(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

"""The weights in a checkpoint, read without a learner."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from open_instruct.checkpoints.step_folder import INDEX
from open_instruct.core.errors import InputError
from open_instruct.models.box_files import part_of, read_parts
from open_instruct.models.hf.checkpoint_files import DTYPES
from open_instruct.models.shards import Held, held, rows_of

# Before the names of weights: in checkpoints of FSDP2, and of DeepSpeed, where each is flat.
BACKENDS = ("model.", "zero.weights.")


class SavedWeights(Mapping[str, Held]):
    """The weights of a checkpoint by OLMo-core's names, each assembled from all ranks' files on
    access.

    Example: `SavedWeights(Path("OUT/step4"), parameter_shapes(model))["embeddings.weight"]`, on the
    CPU.

    :param shapes: shapes of the parameters; the checkpoint may hold fewer, as after training
        adapters.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """:raises InputError: the matrices were split over ranks by DeepSpeed."""
        self._folder, self._shapes = folder, shapes
        self._index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())["tensors"]
        self._full_names = {
            name: kind + name for kind in BACKENDS for name in shapes if kind + name in self._index
        }
        names = self._full_names
        self._rows = {
            row: (name, index)
            for name in names
            for row, index in rows_of(name, shapes[name]).items()
        }
        self._last = ("", torch.empty(0))
        if not self._full_names:
            raise InputError(
                f"the checkpoint {folder} has matrices that DeepSpeed had split "
                "(--tensor_parallel_degree): give the command of the run again to end it with an "
                "export",
                kind="bad_checkpoint",
            )

    def __getitem__(self, name: str) -> Held:
        name, index = self._rows[name]
        if self._last[0] != name:  # the matrices of a stack are asked for one after the other
            self._last = (name, self._whole(name))
        return held(self._last[1] if index is None else self._last[1][index])

    def _whole(self, name: str) -> torch.Tensor:
        full_name = self._full_names[name]
        entry = self._index[full_name]
        whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        read_parts(self._folder, self._index, {full_name: part_of(whole)})
        return whole.view(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

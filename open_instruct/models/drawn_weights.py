"""Weights drawn at random in place of a checkpoint's, for models that are trained from scratch.

Every value follows from the seed, the tensor's name and its place, so that it is the same under
every layout, and a rank draws no more than the rows of its shards. Matrices are drawn as OLMo-core
draws them by default: normal, cut off at three standard deviations; norms are ones, biases zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from open_instruct.core.boxes import box_shape, complete_box
from open_instruct.models.hf.checkpoint_files import CheckpointFiles, FileRange, ReadBox
from open_instruct.models.hf.names import TensorNames

BLOCK_ROWS = 256  # drawn at once, with a generator of their own
CUT_OFF = 3  # standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTensor:
    """A tensor that is drawn when it is read, as `CheckpointFiles` takes it.

    :param path: of the config.json, for messages.
    :param std: of its values; None for a norm, whose values are ones.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    seed: int
    std: float | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def ranges(self) -> Sequence[FileRange]:
        return ()

    def open(self) -> ReadBox:
        """What draws the values of a box."""

        def read(slices: tuple[slice, ...]) -> torch.Tensor:
            box = complete_box(slices, self.shape)
            if self.std is None or len(self.shape) < 2:
                return torch.full(box_shape(box), float(self.std is None))
            rows, *columns = box
            values = torch.empty(box_shape(box))
            for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
                first = block * BLOCK_ROWS
                start = max(rows.start, first)
                stop = min(rows.stop, first + BLOCK_ROWS)
                drawn = self._draw_block(block)[start - first : stop - first]
                values[start - rows.start : stop - rows.start] = drawn[(slice(None), *columns)]
            return values

        return read

    def _draw_block(self, block: int) -> torch.Tensor:
        assert self.std is not None
        digest = hashlib.sha256(f"{self.name} {self.seed} {block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        num_rows = min(BLOCK_ROWS, self.shape[0] - block * BLOCK_ROWS)
        values = torch.empty(num_rows, *self.shape[1:])
        limit = CUT_OFF * self.std
        return torch.nn.init.trunc_normal_(
            values, std=self.std, a=-limit, b=limit, generator=generator
        )


def draw_files(
    path: Path,
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    std: float,
) -> CheckpointFiles:
    """The tensors of a model by Hugging Face's names, each drawn when it is read.

    :param path: of the config.json that describes the model.
    :param shapes: by OLMo-core's names, as `find_parameter_shapes` gives them.
    :param std: of all matrices.
    """
    tensors = {}
    for name, hf_name in names:
        is_norm = "norm" in name.rpartition(".")[0].rpartition(".")[2]
        tensors[hf_name] = DrawnTensor(
            name=hf_name,
            path=path,
            shape=tuple(shapes[name]),
            seed=seed,
            std=None if is_norm else std,
        )
    return CheckpointFiles(path.parent, tensors, salt=f"{seed} {std}")

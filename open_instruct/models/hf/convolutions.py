"""Repairs the convolutions of an Olmo-Hybrid that transformers 5.19 has saved.

It joins those of queries, keys and values, and cuts the result into three of one size. They have as
many rows as their matrices, which need not be alike.
"""

from collections.abc import Mapping

import torch

from open_instruct.models.hf.checkpoint_files import CheckpointFiles

FIRST = "linear_attn.q_conv1d.weight"


def recut_convolutions(files: CheckpointFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Cut convolutions anew, where a file has three of one size and the model wants other sizes.

    :param shapes: that the model wants, by Hugging Face's names.
    """
    for first in shapes:
        names = [first.replace("q_conv1d", f"{one}_conv1d") for one in "qkv"]
        if not first.endswith(FIRST) or not all(name in files for name in names):
            continue
        stored = [files.tensors[name].shape[0] for name in names]
        rows = [shapes[name][0] for name in names]
        part = -(-sum(rows) // 3)  # the last has what is left
        if stored != rows and stored == [part, part, sum(rows) - 2 * part]:
            whole = torch.cat([files.read(name) for name in names])
            files.tensors.update(zip(names, whole.split(rows), strict=True))

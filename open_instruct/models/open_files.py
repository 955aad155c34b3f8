"""Opens the weights of a model's folder, of either kind, before any is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.head_kinds import LM_HEAD
from open_instruct.models.hf.names import HF_LM_HEAD, TensorNames
from open_instruct.models.model_folder import ModelFolder, open_model_folder
from open_instruct.models.olmo_core.dcp_metadata import read_metadata
from open_instruct.models.olmo_core.dcp_names import METADATA_NAME, WEIGHTS_FOLDER
from open_instruct.models.olmo_core.saved_chunks import ChunkedTensor
from open_instruct.models.shards import LocalShard, find_local_shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def open_files(source: Path | ModelFolder, hf_config: PretrainedConfig) -> CheckpointFiles:
    """Open the files of a model; its tensors have Hugging Face's names.

    :raises InputError: files are missing or damaged, or could run code.
    """
    if isinstance(source, Path):
        source = open_model_folder(source)
    folder = source.path
    if source.olmo_core is None:
        return CheckpointFiles.open(folder)
    weights = folder / WEIGHTS_FOLDER
    hf_names = {LM_HEAD: HF_LM_HEAD, **dict(TensorNames(hf_config))}
    tensors = {}
    spelling = {hf_name: name for name, hf_name in hf_names.items()}
    for name, saved in read_metadata(weights).items():
        tensors[hf_names.get(name, name)] = ChunkedTensor(path=weights / METADATA_NAME, saved=saved)
    return CheckpointFiles(folder, tensors, spelling=spelling)


class FileWeights(Mapping[str, LocalShard]):
    """The weights in a checkpoint's files by OLMo-core's names, each read when it is asked for.

    :param others: weights in place of those in the files.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        names: TensorNames,
        *,
        others: Mapping[str, LocalShard] | None = None,
    ) -> None:
        self._files = files
        self._hf_names = dict(names)
        self._others = others or {}

    def __getitem__(self, name: str) -> LocalShard:
        if name in self._others:
            return self._others[name]
        return find_local_shard(self._files.read(self._hf_names[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._hf_names)

    def __len__(self) -> int:
        return len(self._hf_names)

"""The model that a training starts from: opened, built without weights, and filled once sharded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import nn
from transformers import PretrainedConfig

from open_instruct.models.build import build_model
from open_instruct.models.heads.value_head import replace_head
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.head_kinds import Head
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import LoadReport, check_cover, find_parameter_shapes, stream_load
from open_instruct.models.model_folder import ModelFolder, open_model_folder
from open_instruct.models.open_files import open_files
from open_instruct.models.transformer import SegmentTransformer


@dataclass(frozen=True, slots=True, kw_only=True)
class StartModel:
    """A checkpoint, Hugging Face's or OLMo-core's, of which no weight has been read.

    Example::

        start = StartModel.open("olmo3-7B")
        module = DPOTrainModule(model=start.build(), ...)    # which shards it
        start.load_into(module.model)
    """

    source: ModelFolder
    hf_config: PretrainedConfig
    files: CheckpointFiles
    names: TensorNames

    @classmethod
    def open(cls, folder: str | Path, *, head: Head = "vocabulary", seed: int = 0) -> Self:
        """Open a folder, and check that its tensors are those of the model.

        Args:
            folder: a Hugging Face model, or a step that OLMo-core's Trainer saved.
            head: the kind of head; one that scores is drawn from `seed` where the folder has none.

        Raises:
            InputError: naming the file or tensor that is missing, damaged or does not fit.
        """
        source = open_model_folder(Path(folder))
        hf_config = source.load_config()
        files = open_files(source, hf_config)
        if head != "vocabulary":
            files = replace_head(files, hf_config, head, seed=seed)
        start = cls(
            source=source,
            hf_config=hf_config,
            files=files,
            names=TensorNames(hf_config, head=head),
        )
        check_cover(start.names, files, find_parameter_shapes(start.build()))
        return start

    @property
    def folder(self) -> Path:
        return self.source.path

    def build(self, *, init_device: str = "meta") -> SegmentTransformer:
        """Build the model, without weights."""
        return build_model(self.hf_config, init_device=init_device, head=self.names.head)

    def load_into(self, model: nn.Module) -> LoadReport:
        """Read this rank's shards of `model` from the files. Collective."""
        return stream_load(model, self.files, self.names)

"""The folder that engines open: vLLM reads Hugging Face folders alone.

A start model of OLMo-core's, or one that is drawn, is written once, in the dtype of the engines;
the learners read their shards from the checkpoint itself, or draw them.
"""

import json
from pathlib import Path

import torch

from open_instruct.data.files.foreign_json import read_object
from open_instruct.models.open_files import FileWeights
from open_instruct.parallel.status import this_process
from open_instruct.run.console import Console
from open_instruct.run.pretrained import Pretrained
from open_instruct.run.run_directory import RunDirectory

SOURCE_NAME = "converted_from.json"


def find_engine_folder(
    pretrained: Pretrained, directory: RunDirectory, console: Console, *, dtype: torch.dtype
) -> Path:
    """The start model's folder, or OUT/engine_model, which is written if need be.

    :raises RunError: the disk filled up or failed.
    """
    if not pretrained.is_drawn and pretrained.source.olmo_core is None:
        return pretrained.folder
    folder = directory.engine_model
    source = {"start_model": pretrained.fingerprint, "dtype": str(dtype)}
    record = folder / SOURCE_NAME
    if record.is_file() and read_object(record) == source:
        return folder
    this_process.begin("writing the start model for the engines")
    model = pretrained.build(init_device="meta").to(dtype)
    pretrained.export(
        model, folder, dtype=dtype, weights=FileWeights(pretrained.files, pretrained.names)
    )
    record.write_text(json.dumps(source) + "\n", encoding="utf-8")
    console.say(f"the engines open {folder}, written from {pretrained.folder}")
    return folder

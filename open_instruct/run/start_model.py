"""The start model is part of a run's identity: a model that was changed in place belongs to another run."""

from __future__ import annotations

import json

from open_instruct.checkpoints.step_folder import Damaged, find_checkpoints, refuse_another_start_model
from open_instruct.models.fingerprint import with_config
from open_instruct.parallel.process import on_main_process
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


def start_model_of(pretrained: Pretrained, run: Run) -> str:
    """Fingerprint of the start model's weights and config.json, compared with the checkpoints of `run`. Collective.

    :raises InputError: the run began with another start model.
    """
    own = fingerprint_of(pretrained)

    def compare() -> None:
        for folder in find_checkpoints(run.directory.path):
            try:
                refuse_another_start_model(folder, own)
            except Damaged:
                continue  # told where checkpoints are chosen

    on_main_process(compare)
    return own


def is_same_model(one: Pretrained, other: Pretrained) -> bool:
    """Whether both have the same weights and config.json. Collective; every byte is read if the shapes are equal."""
    return one.files.shapes == other.files.shapes and fingerprint_of(one) == fingerprint_of(other)


def fingerprint_of(pretrained: Pretrained) -> str:
    """Fingerprint of the weights and of config.json. Collective at the first call.

    The text of config.json counts, not the object that transformers parses: a newer version has more defaults.
    """
    config = json.loads((pretrained.folder / "config.json").read_text(encoding="utf-8"))
    return with_config(pretrained.weights_fingerprint, config)

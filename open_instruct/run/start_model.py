"""The start model of a run as part of its identity: one that was changed in place is another run's."""

from __future__ import annotations

import json

from open_instruct.checkpoints.step_folder import Damaged, find_checkpoints, refuse_another_start_model
from open_instruct.models.fingerprint import with_config
from open_instruct.parallel.process import on_main_process
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


def start_model_of(pretrained: Pretrained, run: Run) -> str:
    """Fingerprint of weights and config.json, where the checkpoints of `run`, if any, know no other. Collective.

    :raises InputError: the run began with another.
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
    """Whether both have the same weights and config.json. Collective: of two of the same shapes every byte is read."""
    return one.files.shapes == other.files.shapes and fingerprint_of(one) == fingerprint_of(other)


def fingerprint_of(pretrained: Pretrained) -> str:
    """Of weights and config.json. Collective when it is first asked for.

    Of config.json the text counts, not what a version of transformers makes of it: a newer one has more defaults.
    """
    config = json.loads((pretrained.folder / "config.json").read_text(encoding="utf-8"))
    return with_config(pretrained.weights_fingerprint, config)

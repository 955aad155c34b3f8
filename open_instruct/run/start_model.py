"""The start model of a run as part of its identity: one that was changed in place is another run's."""

from __future__ import annotations

import json

from open_instruct.checkpoints.step_folder import Damaged, find_checkpoints, read_manifest, refuse_another_start_model
from open_instruct.models.fingerprint import with_config
from open_instruct.parallel.process import on_main_process
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


def start_model_of(pretrained: Pretrained, run: Run) -> str:
    """Fingerprint of weights and config.json, where the checkpoints of `run`, if any, know no other. Collective.

    Of config.json the text counts, not what a version of transformers makes of it: a newer one has more defaults.

    :raises InputError: the run began with another.
    """
    config = json.loads((pretrained.folder / "config.json").read_text(encoding="utf-8"))
    own = with_config(pretrained.weights_fingerprint, config)

    def compare() -> None:
        for folder in find_checkpoints(run.directory.path):
            try:
                refuse_another_start_model(folder, read_manifest(folder).start_model, own)
            except Damaged:
                continue  # told where checkpoints are chosen

    on_main_process(compare)
    return own

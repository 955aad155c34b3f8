"""A run's place in its data, read from its newest checkpoint before a model is loaded or Ray is
started.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from open_instruct.checkpoints import step_folder
from open_instruct.checkpoints.safe_checkpointer import from_json
from open_instruct.checkpoints.step_folder import UNREADABLE

STATE = "rank0.json"
"""Rank 0's file of the trainer's state, which has the place; all ranks have the same."""


def read_saved_place(folder: Path) -> Mapping[str, Any] | None:
    """The place in the data of the newest checkpoint in `folder` whose state is as it was written.

    It is what the loop's `place` gave as its `state_dict`. A damaged checkpoint is passed over here
    without a word: it is named when the run's checkpoint is loaded. Returns None where there is
    none to read.
    """
    for checkpoint in step_folder.candidates(folder):
        try:
            written = step_folder.read_manifest(checkpoint).files[STATE]
            if step_folder.damage_of_file(checkpoint / STATE, written) is not None:
                continue
            state = from_json(json.loads((checkpoint / STATE).read_bytes()))
            return cast(Mapping[str, Any], state["data_loader"])
        except UNREADABLE:  # `Damaged` is a ValueError
            continue
    return None

"""A run's place in its data, read from its newest checkpoint before anything else is loaded."""

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
    """Read the place in the data of the newest readable checkpoint; None if there is none.

    It is the `state_dict` of the loop's `place`. A damaged checkpoint is skipped here without a
    message: it is named when the run's checkpoint is loaded.
    """
    for checkpoint in step_folder.find_candidates(folder):
        try:
            written = step_folder.read_manifest(checkpoint).files[STATE]
            if step_folder.find_file_damage(checkpoint / STATE, written) is not None:
                continue
            state = from_json(json.loads((checkpoint / STATE).read_bytes()))
            return cast(Mapping[str, Any], state["data_loader"])
        except UNREADABLE:  # `Damaged` is a ValueError
            continue
    return None

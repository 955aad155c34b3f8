"""A run's place in its data is read from a checkpoint without its model, and never from a damaged
one.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from open_instruct.checkpoints import step_folder
from open_instruct.checkpoints.safe_checkpointer import to_json
from open_instruct.checkpoints.saved_place import STATE, read_saved_place
from open_instruct.checkpoints.step_folder import Manifest
from open_instruct.models.box_files import write_hashed


def save_place(run_folder: Path, step: int, place: dict[str, Any]) -> Path:
    """Write a checkpoint that has nothing but the trainer's state."""
    final = run_folder / f"step{step}"
    part = step_folder.begin(final)
    state = {"global_step": step, "data_loader": place, "rng": {"cpu": torch.get_rng_state()}}
    files = {STATE: write_hashed(part / STATE, [json.dumps(to_json(state)).encode()])}
    step_folder.write_manifest(
        part, Manifest(step=step, num_ranks=1, start_model="ab", files=files)
    )
    step_folder.publish(part, final)
    return final


def test_place_is_that_of_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert read_saved_place(tmp_path / "gone") is None and read_saved_place(tmp_path) is None
    for step in (2, 10, 9):
        save_place(tmp_path, step, {"epoch": step, "excluded": [1, 2]})
    assert read_saved_place(tmp_path) == {"epoch": 10, "excluded": [1, 2]}
    # Half written: it has no manifest yet, or not its name.
    (tmp_path / "step11").mkdir()
    (tmp_path / "step11" / STATE).write_text("{}")
    shutil.copytree(tmp_path / "step10", tmp_path / "step12-tmp")
    assert read_saved_place(tmp_path) == {"epoch": 10, "excluded": [1, 2]}


def test_damaged_state_is_passed_over(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save_place(tmp_path, step, {"epoch": step})
    text = (tmp_path / "step8" / STATE).read_text()
    (tmp_path / "step8" / STATE).write_text(text.replace('["epoch", 8]', '["epoch", 7]'))
    (tmp_path / "step6" / STATE).unlink()
    (tmp_path / "step4" / "checkpoint.json").write_text("{}")
    assert read_saved_place(tmp_path) == {"epoch": 2}

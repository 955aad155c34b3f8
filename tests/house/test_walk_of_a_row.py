"""How much of the package a reader passes who follows one pair from its row to its gradient, as it is executed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.toys.tiny import write_tiny_model

pytestmark = pytest.mark.extended

WALKED = Path(__file__).with_name("walked.py")
MAX_FILES = 38
# Calls from one file into another, with a model of four layers.
MAX_MOVES = 250
TURNS = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}]
PAIR = {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "Seven."}]}


def test_a_row_passes_few_files_with_few_moves_between_them(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", family="olmo2", size="tiny", corpus=["Name a colour. Blue. Seven."])
    (tmp_path / "row.jsonl").write_text(json.dumps(PAIR), encoding="utf-8")
    flags = {
        "model_name_or_path": tmp_path / "model",
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "max_seq_length": 64,
        "max_train_steps": 1,
        "per_device_train_batch_size": 1,
        "param_dtype": "float32",
    }
    words = ["--single_gpu_mode", "--mixer_list", str(tmp_path / "row.jsonl"), "1.0"]
    words += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    ran = subprocess.run(
        [sys.executable, str(WALKED), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(WALKED.parents[2])},
        check=False,
    )
    if ran.returncode != 0:
        pytest.fail(ran.stderr)
    found = json.loads(ran.stdout.splitlines()[-1])
    num_moves = sum(times for _, _, times in found["moves"])
    print(f"{len(found['files'])} files, {num_moves} moves")
    assert len(found["files"]) <= MAX_FILES, found["files"]
    assert num_moves <= MAX_MOVES, found["moves"]

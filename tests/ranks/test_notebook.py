"""The page for notebooks: its code is run as it stands."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.ranks.launch import REPOSITORY
from tests.unit.fake_hub import fake_hub

PAGE = REPOSITORY / "docs" / "notebook.md"
BAD_ROW = """
from open_instruct.errors import InputError
try:
    fit(DPO, [{"chosen": 1}], model_name_or_path="tiny", output_dir="bad", max_seq_length=128)
except InputError as error:
    print("REFUSED", error)
flags = {"max_seq_length": 128, "per_device_train_batch_size": 4, "max_train_steps": 1}
print("AGAIN", fit(DPO, rows, model_name_or_path=folder, output_dir="again", push_to_hub=True, **flags))
"""


def test_the_page_trains_a_model_and_says_what_a_row_lacks(tmp_path: Path) -> None:
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "cells.py").write_text(code + BAD_ROW)
    command = [sys.executable, "cells.py"]
    with fake_hub() as hub:
        environment = {**os.environ, **hub.environment}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    told = next(line for line in done.stdout.splitlines() if line.startswith("["))
    assert json.loads(told) == [row["loss"] for row in rows] and len(rows) == 5
    assert math.isclose(rows[0]["loss"], math.log(2), abs_tol=1e-3) and rows[-1]["loss"] < rows[0]["loss"]
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf_model")
    assert "REFUSED 1 row of 1 cannot be used" in done.stdout and "rows.jsonl, line 1" in done.stdout
    assert "AGAIN again/hf_model" in done.stdout
    left = {path.name: path.read_bytes() for path in (tmp_path / "again" / "hf_model").iterdir()}
    assert hub.files == {"me/again": left} and hub.cards[0].encode() == left["README.md"]

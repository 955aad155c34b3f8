"""The page for notebooks: its code is run as it stands."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.ranks.launch import REPOSITORY
from tests.unit.run.fake_hub import fake_hub

pytestmark = pytest.mark.extended

PAGE = REPOSITORY / "docs" / "notebook.md"
BAD_ROW = """
from open_instruct.errors import InputError
def refused(rows, **arguments):
    try:
        fit(DPO, rows, **{"model_name_or_path": "tiny", "output_dir": "bad", "max_seq_length": 128} | arguments)
    except InputError as error:
        print("REFUSED", error)

refused([{"chosen": 1}])
refused(rows, max_seq_length=1)
refused([{"chosen": {1, 2}}])
refused(rows[:2], output_dir="out")
Path("own").mkdir()
Path("own/rows.jsonl").write_text("mine")
refused(rows, output_dir="own")
refused(rows, mixer_list=["out/rows.jsonl", 1.0])
refused(rows, reward="math")
from open_instruct.notebook import GRPO
from open_instruct.verifiers.answers import GSM8K
prompts = [{"prompt": "Hi."}]
def short(completions):
    return [-float(len(text)) for text in completions]
def refused_grpo(rows=prompts, **arguments):
    try:
        fit(GRPO, rows, **{"model_name_or_path": "tiny", "output_dir": "bad", "reward": short} | arguments)
    except InputError as error:
        print("REFUSED", error)
refused_grpo(reward=lambda completions: [len(prompts)])
refused_grpo(reward="maths")
refused_grpo(num_samples_per_prompt_rollout=1)
refused_grpo(verifier=["math"])
refused_grpo([{"prompt": 3}])
refused_grpo(total_episodes=32, num_unique_prompts_rollout=8, num_samples_per_prompt_rollout=4, report_to=["pigeon"])
class Hooks(Curve):
    def post_step(self): ...
refused_grpo(callbacks={"mine": Hooks()})
Path("own/reward.py").write_text("mine")
Path("own/rows.jsonl").unlink()
refused_grpo(output_dir="own")
import ray
refused_grpo()
Path("own/rows.jsonl").write_text("mine")
flags = {"max_seq_length": 128, "per_device_train_batch_size": 4, "max_train_steps": 1}
evaluated = {"eval_mixer_list": ["out/rows.jsonl", 1.0]}
again = fit(DPO, "out/rows.jsonl", model_name_or_path=fitted.model, output_dir="again", push_to_hub=True, **flags)
print("AGAIN", again.model)
from datasets import Dataset
third = fit(DPO, Dataset.from_list(rows), model_name_or_path="tiny", output_dir="third", **evaluated, **flags)
print("HELD OUT", third.held_out["step"], sorted(third.held_out)[:2])
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
    assert len(rows) == 5
    assert f"True {[row['rewards/accuracy'] for row in rows]}" in done.stdout
    assert math.isclose(rows[0]["loss"], math.log(2), abs_tol=1e-3) and rows[-1]["loss"] < rows[0]["loss"]
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf_model")
    assert not (tmp_path / "bad").exists()
    assert [path.read_text() for path in (tmp_path / "own").iterdir()] == ["mine", "mine"]
    refused = [line.removeprefix("REFUSED ") for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert [text.partition(":")[0] for text in refused] == [
        "1 row of 1 cannot be used (not_messages 1)",
        "max_seq_length 1",
        "rows",
        "out/rows.jsonl has other rows",
        "own/rows.jsonl has other rows",
        "mixer_list",
        "reward",
        "reward",
        "verifier maths",
        "num_samples_per_prompt_rollout 1",
        "verifier",
        "1 row of 1 cannot be used (not_messages 1)",
        "report_to takes any of wandb, trackio, tensorboard, not 'pigeon'",
        "callbacks",
        "own/reward.py has another reward",
        "ray was imported in this process before a run began, and has settled then with which token it talks",
    ]
    assert "AGAIN again/hf_model" in done.stdout and "HELD OUT" in done.stdout
    left = {path.name: path.read_bytes() for path in (tmp_path / "again" / "hf_model").iterdir()}
    assert hub.files == {"me/again": left} and hub.cards[0].encode() == left["README.md"]

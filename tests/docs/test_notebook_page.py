"""docs/notebook.md, run as a notebook, and once more as a program."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM

from tests.docs.pages import REPOSITORY
from tests.unit.run.hub.fake_hub import fake_hub

NOTEBOOK = REPOSITORY / "docs" / "notebook.md"
TIMEOUT_S = 600
# Between the cells of the page: a run of GRPO is interrupted, and the page's comes after it in that
# process.
INTERRUPTED = """
import os, signal

class Interrupting(Callback):
    steps = []
    def log_metrics(self, step, metrics):
        self.steps.append(step)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

sizes = {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 2, "total_episodes": 8}
lengths = {"response_length": 8, "max_prompt_token_length": 32}
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
try:
    fit(GRPO, prompts=prompts, reward=digits, model_name_or_path="tiny", output_dir="interrupted",
        callbacks={"at once": Interrupting()}, param_dtype="float32", **sizes, **lengths)
except KeyboardInterrupt:
    import ray
    print("INTERRUPTED", Interrupting.steps, ray.is_initialized())
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
"""


def cells_of_page() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", NOTEBOOK.read_text(), flags=re.MULTILINE | re.DOTALL
    )


def printed_by(cell: Any) -> str:
    return "".join(
        output.get("text", "") for output in cell.outputs if output.get("name") == "stdout"
    )


@pytest.mark.extended
def test_page_for_notebooks_runs_in_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    folder = tmp_path / "empty"
    folder.mkdir()
    *before, last = cells_of_page()
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (*before, INTERRUPTED, last)]
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(REPOSITORY)})

    *_, interrupted, shown = notebook.cells
    assert "INTERRUPTED [1] False" in printed_by(interrupted)
    rows = [
        json.loads(line) for line in (folder / "digits" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert f"{[row['reward'] for row in rows]}" in printed_by(shown).splitlines()[-1]
    assert all(
        row["num_verifier_problems"] == 0 and row["verifier/digits"] == row["reward"]
        for row in rows
    )
    assert (folder / "digits" / "hf_model" / "model.safetensors").is_file()
    assert "def digits(completions, **columns):" in (folder / "digits" / "reward.py").read_text()
    assert not list(folder.glob("*/pids.json"))


MORE_CELLS = """
from open_instruct.core.errors import InputError
def refused(rows, **arguments):
    try:
        fit(DPO, rows, **{"model_name_or_path": "tiny", "output_dir": "bad", "max_seq_length": 128} | arguments)
    except InputError as error:
        print("REFUSED", error.kind, error.flag, "|", str(error).splitlines()[0])

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
from open_instruct.rewards.answers import GSM8K
prompts = [{"prompt": "Hi."}]
def short(completions):
    return [-float(len(text)) for text in completions]
def refused_grpo(rows=prompts, **arguments):
    try:
        fit(GRPO, rows, **{"model_name_or_path": "tiny", "output_dir": "bad", "reward": short} | arguments)
    except InputError as error:
        print("REFUSED", error.kind, error.flag, "|", str(error).splitlines()[0])
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


@pytest.mark.extended
def test_page_for_notebooks_trains_as_a_program_and_names_refused_arguments(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(cells_of_page()[0] + MORE_CELLS)
    command = [sys.executable, "cells.py"]
    with fake_hub() as hub:
        environment = {**os.environ, **hub.environment}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stdout + done.stderr

    rows = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 5
    assert f"True {[row['rewards/accuracy'] for row in rows]}" in done.stdout
    # In bfloat16 the reference, whose rows are packed otherwise, may differ by a rounding of a
    # logit.
    assert (
        math.isclose(rows[0]["loss"], math.log(2), abs_tol=5e-3)
        and rows[-1]["loss"] < rows[0]["loss"]
    )
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf_model")
    assert not (tmp_path / "bad").exists()
    assert [path.read_text() for path in (tmp_path / "own").iterdir()] == ["mine", "mine"]
    refused = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert refused == [
        ["bad_row", "columns"],
        ["out_of_range", "max_seq_length"],
        ["bad_row", "rows"],
        ["other_run", "None"],
        ["other_run", "None"],
        ["conflict", "mixer_list"],
        ["conflict", "reward"],
        ["own_code", "reward"],
        ["bad_value", "verifier"],
        ["conflict", "num_samples_per_prompt_rollout"],
        ["conflict", "verifier"],
        ["bad_row", "columns"],
        ["bad_value", "report_to"],
        ["own_code", "callbacks"],
        ["other_run", "None"],
        ["machine", "None"],
    ], done.stdout
    assert "AGAIN again/hf_model" in done.stdout and "HELD OUT" in done.stdout
    left = {path.name: path.read_bytes() for path in (tmp_path / "again" / "hf_model").iterdir()}
    assert hub.files == {"me/again": left} and hub.cards[0].encode() == left["README.md"]

"""docs/notebook.md, run as a notebook: every cell in order in one kernel, in an empty folder, GRPO's with Ray and vLLM.

Between the page's cells one of ours runs, which interrupts a run of GRPO: the page's comes after it in that process.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.ranks.fork_server import REPOSITORY

pytestmark = pytest.mark.extended

TIMEOUT_S = 600
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
    page = (REPOSITORY / "docs" / "notebook.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def said(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")


def test_the_page_runs_as_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    folder = tmp_path / "empty"
    folder.mkdir()
    *before, last = cells_of_page()
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (*before, INTERRUPTED, last)]
    client = NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(REPOSITORY)})

    *_, interrupted, shown = notebook.cells
    assert "INTERRUPTED [1] False" in said(interrupted)
    rows = [json.loads(line) for line in (folder / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert f"{[row['reward'] for row in rows]}" in said(shown).splitlines()[-1]
    assert all(row["num_verifier_problems"] == 0 and row["verifier/digits"] == row["reward"] for row in rows)
    assert (folder / "digits" / "hf_model" / "model.safetensors").is_file()
    assert "def digits(completions, **columns):" in (folder / "digits" / "reward.py").read_text()
    assert not list(folder.glob("*/pids.json"))

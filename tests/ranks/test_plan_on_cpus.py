"""A plan for CPUs against the memory that runs of a real model take, each a process of its own.

Rows are cut to `max_seq_length`, since a plan is of the longest ones. The measured figure is the
most that the process has had in memory, `peak_memory_gib` of its metrics.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks.fork_server import REPOSITORY
from tests.unit.data.real_tokenizers import SMOLLM2, download

pytestmark = pytest.mark.extended

GIB = 2**30
TOLERANCE = 0.15
TIMEOUT_S = 900
LORA = ("--use_lora", "--lora_r", "16")
REPLIES = ("the house by the river " * 80, "a bird in the old tree " * 80)
USER = {"role": "user", "content": "Tell me a story."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command that trains, the form of its rows, and the flags of the run."""

    command: str
    rows: str
    batch_size: int
    flags: tuple[str, ...] = ()


CASES = {
    "dpo": Case(command="dpo", rows="pairs", batch_size=1),
    "dpo_lora": Case(command="dpo", rows="pairs", batch_size=1, flags=LORA),
    "sft": Case(command="sft", rows="conversations", batch_size=2),
    "sft_lora": Case(command="sft", rows="conversations", batch_size=2, flags=LORA),
    "kto": Case(command="kto", rows="labelled", batch_size=2),
    "reward_model": Case(command="reward_model", rows="pairs", batch_size=1),
}


def write_rows(path: Path, form: str) -> None:
    """Write four rows of one form, longer than any run here takes."""
    first, second = [[USER, {"role": "assistant", "content": reply}] for reply in REPLIES]
    rows: dict[str, list[dict[str, object]]] = {
        "pairs": [{"chosen": first, "rejected": second}] * 2,
        "conversations": [{"messages": first}, {"messages": second}],
        "labelled": [{"messages": first, "label": True}, {"messages": second, "label": False}],
    }
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[form] * 2))


def link_model(folder: Path) -> Path:
    """The model with another token to pad with, which a reward model needs."""
    model = download(SMOLLM2)
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    settings = folder / "tokenizer_config.json"
    changed = json.loads(settings.read_text()) | {"pad_token": "<|endoftext|>"}
    settings.unlink()
    settings.write_text(json.dumps(changed))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_planned_peak_is_within_15_percent_of_the_measured_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, case.rows)
    folder = tmp_path / name
    flags = {
        "model_name_or_path": link_model(tmp_path / "model"),
        "output_dir": folder,
        "cache_dir": tmp_path / "cache",
        "max_seq_length": 256,
        "per_device_train_batch_size": case.batch_size,
        "gradient_accumulation_steps": 1,
        "param_dtype": "float32",
        "learning_rate": 1e-6,
        "max_train_steps": 2,
    }
    command = [sys.executable, str(REPOSITORY / "open_instruct" / f"{case.command}.py")]
    command += ["--mixer_list", str(rows), "1.0", *case.flags]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr

    plan = json.loads((folder / "plan.json").read_text())
    planned_bytes = max(phase["total_bytes"] for phase in plan["phases"])
    metrics = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    measured_bytes = max(row["peak_memory_gib"] for row in metrics) * GIB
    ratio = planned_bytes / measured_bytes
    figures = f"{planned_bytes / GIB:.2f} GiB planned, {measured_bytes / GIB:.2f} measured"
    print(f"{name}: {figures}, {ratio:.3f}")
    assert abs(ratio - 1) <= TOLERANCE, figures

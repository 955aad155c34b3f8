"""Small float32 runs against what was recorded of them: every metric of every step, and the final
weights.

Where processor and torch are those of the record, they are the same to the last bit; elsewhere to
the precision that other kernels leave. A change that is meant to change numbers records them anew,
and says so:

    OPEN_INSTRUCT_RECORD=1 .venv/bin/python -m pytest tests/ranks/test_recorded.py
"""

import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.tiny_model import write_tiny_model
from tests.ranks.grpo_case import GRPOCase
from tests.ranks.train_case import TrainCase, free_ports

RECORD = Path(__file__).with_name("recorded_runs.json")
RECORDING = os.environ.get("OPEN_INSTRUCT_RECORD") == "1"
TRAIN, GRPO = "tests.ranks.jobs.train_runs:run_each", "tests.ranks.jobs.replayed_run:run_it"
NUM_GRPO_STEPS = 3
# Clocks and memory.
NOT_COMPUTED = ("tokens_per_second", "peak_memory_gib", "time/")

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def dpo_case(dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """Of four layers, as the record is."""
    folder = tmp_path_factory.mktemp("recorded")
    return replace(
        dpo_case, model=write_tiny_model(folder / "model", family="olmo2"), folder=folder
    )


@pytest.fixture(scope="module")
def grpo_case(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    return GRPOCase(tmp_path_factory.mktemp("recorded_grpo"), layers=4, is_narrow=False)


def machine() -> dict[str, str]:
    """What the last bits of a product depend on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    return {
        "processor": model or platform.processor(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def check(name: str, rows: list[dict[str, float]], digest: str) -> None:
    """Compare the run called `name` with its record, or make the record."""
    rows = [
        {key: row[key] for key in sorted(row) if not key.startswith(NOT_COMPUTED)} for row in rows
    ]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if RECORDING:
        if record.get("machine") != machine():
            record = {"machine": machine(), "runs": {}}
        record["runs"][name] = {"rows": rows, "weights": digest}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        return
    recorded = record["runs"][name]
    assert [list(row) for row in rows] == [list(row) for row in recorded["rows"]]
    for ours, theirs in zip(rows, recorded["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    if record["machine"] == machine():
        assert rows == recorded["rows"]
        assert digest == recorded["weights"]


def test_dpo_with_shared_prompts_on_two_ranks_and_its_resume(
    dpo_case: TrainCase, run_ranks: RunRanks
) -> None:
    flags = {
        "prefix_sharing": "on",
        "loss_type": "dpo_norm",
        "beta": 0.1,
        "checkpointing_steps": 2,
        "weight_decay": 0.1,
    }
    flags |= {"eval_mixer_list": [dpo_case.rows, "6"]}
    command = dpo_case.command("recorded_dpo", ranks=2, batch=2, **flags)
    run_ranks(2, TRAIN, commands=[command], ports=free_ports(1))
    rows, digest = dpo_case.metrics("recorded_dpo"), dpo_case.weights_digest("recorded_dpo")
    check("dpo", rows, digest)
    assert dpo_case.is_exported_again("recorded_dpo")

    stopped = dpo_case.folder / "recorded_dpo_resumed"
    shutil.copytree(
        dpo_case.folder / "recorded_dpo",
        stopped,
        ignore=shutil.ignore_patterns("step5", "hf_model"),
    )
    command = dpo_case.command(stopped.name, ranks=2, batch=2, **flags)
    run_ranks(2, TRAIN, commands=[command], ports=free_ports(1))
    check("dpo", dpo_case.metrics(stopped.name), dpo_case.weights_digest(stopped.name))


def test_sft(dpo_case: TrainCase, tmp_path: Path, run_ranks: RunRanks) -> None:
    rows_file = tmp_path / "conversations.jsonl"
    with rows_file.open("w") as file:
        for line in dpo_case.rows.read_text().splitlines():
            file.write(json.dumps({"messages": json.loads(line)["chosen"]}) + "\n")
    case = TrainCase(
        model=dpo_case.model,
        rows=rows_file,
        folder=tmp_path,
        own_flags={"optimizer": "skip_step_adamw"},
    )
    command = case.command("run", batch=2, eval_mixer_list=[rows_file, "5"])
    run_ranks(1, TRAIN, commands=[command], ports=free_ports(1), entry="sft")
    check("sft", case.metrics("run"), case.weights_digest("run"))


def test_grpo_from_saved_rollouts(
    grpo_case: GRPOCase, dpo_case: TrainCase, run_ranks: RunRanks
) -> None:
    flags = {
        "num_unique_prompts_rollout": 4,
        "num_samples_per_prompt_rollout": 3,
        "total_episodes": 12 * NUM_GRPO_STEPS,
        "learning_rate": 1e-3,
        "save_traces": True,
        "beta": 0.05,
        "ref_policy_update_freq": 2,
        "alpha": 0.5,
        "num_mini_batches": 2,
        "record_entropy": True,
    }
    case = grpo_case.case("recorded", flags=flags)
    (rows,) = run_ranks(1, GRPO, flags=case["flags"], num_steps=NUM_GRPO_STEPS, export=True)
    assert (grpo_case.folder / "recorded" / "traces" / f"step{NUM_GRPO_STEPS}.parquet").exists()
    exported = TrainCase(
        model=grpo_case.model, rows=dpo_case.rows, folder=grpo_case.folder, own_flags={}
    )
    check("grpo", rows, exported.weights_digest("recorded"))

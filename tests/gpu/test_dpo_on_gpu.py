"""A run of DPO on one GPU follows the run on the CPU. Skipped where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.commands.tiny_model import write_tiny_model
from scripts.demo_data.pairs import write_synthetic_preferences

ENTRY = Path(__file__).resolve().parents[2] / "open_instruct" / "dpo.py"
# Of a rehearsal, where a few cores run all of them.
TIMEOUT_S = 600 if os.environ.get("REHEARSE_GPU_TESTS") else 150
# By its name: flags of a run, and how far its losses and gradient norms may be from those of the
# CPU in float32.
WAYS: dict[str, tuple[list[str], float]] = {
    "float32": (["--param_dtype", "float32", "--no_compile_model"], 1e-4),
    "bfloat16": (["--param_dtype", "bfloat16", "--no_compile_model"], 5e-2),
    "unshared": (
        ["--param_dtype", "bfloat16", "--no_compile_model", "--prefix_sharing", "off"],
        5e-2,
    ),
    "compiled": (["--param_dtype", "bfloat16", "--compile_model"], 5e-2),
    "budget": (["--param_dtype", "bfloat16", "--activation_memory_budget", "0.5"], 5e-2),
    "single_gpu_mode": (
        ["--param_dtype", "bfloat16", "--no_compile_model", "--single_gpu_mode"],
        5e-2,
    ),
}

pytestmark = pytest.mark.gpu


def start(
    folder: Path, name: str, flags: list[str], *, on_cpu: bool = False
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, str(ENTRY), "--model_name_or_path", str(folder / "model")),
        *(
            "--mixer_list",
            str(folder / "rows.jsonl"),
            "1.0",
            "--cache_dir",
            str(folder / "cache" / name),
        ),
        *("--output_dir", str(folder / name), "--max_seq_length", "256", "--loss_type", "dpo"),
        *("--learning_rate", "1e-4", "--max_train_steps", "4", *flags),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if on_cpu else dict(os.environ)
    with (folder / f"{name}.txt").open("w") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every way of running was run, at the same time: what takes long is to start a
    process.
    """
    folder = tmp_path_factory.mktemp("dpo")
    write_tiny_model(folder / "model", family="olmo3")
    write_synthetic_preferences(folder / "rows.jsonl", num_rows=32, seed=0)
    runs = {"cpu": start(folder, "cpu", ["--param_dtype", "float32"], on_cpu=True)}
    runs |= {name: start(folder, name, flags) for name, (flags, _) in WAYS.items()}
    try:
        for run in runs.values():
            run.wait(TIMEOUT_S)
    finally:
        for run in runs.values():
            run.kill()
            run.wait()
    return folder


def trajectory(folder: Path, name: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    metrics = folder / name / "metrics.jsonl"
    assert metrics.exists(), (folder / f"{name}.txt").read_text()[-3000:]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(rows) == 4, (folder / f"{name}.txt").read_text()[-3000:]
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize("name", WAYS)
def test_gpu_follows_cpu(folder: Path, name: str) -> None:
    for ours, theirs in zip(trajectory(folder, name), trajectory(folder, "cpu"), strict=True):
        assert ours == pytest.approx(theirs, rel=WAYS[name][1])

"""A run on one GPU follows the run on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.toys.synthetic import write_synthetic_preferences
from open_instruct.toys.tiny import write_tiny_model

ENTRY = Path(__file__).resolve().parents[2] / "open_instruct" / "dpo.py"

pytestmark = pytest.mark.gpu


def trajectory(folder: Path, name: str, *flags: str, on_cpu: bool = False) -> list[tuple[float, float]]:
    command = [
        *(sys.executable, str(ENTRY), "--model_name_or_path", str(folder / "model")),
        *("--mixer_list", str(folder / "rows.jsonl"), "1.0", "--cache_dir", str(folder / "cache" / name)),
        *("--output_dir", str(folder / name), "--max_seq_length", "256", "--loss_type", "dpo"),
        *("--learning_rate", "1e-4", "--max_train_steps", "4", *flags),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if on_cpu else dict(os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def test_gpu_follows_cpu(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", family="olmo3")
    write_synthetic_preferences(tmp_path / "rows.jsonl", num_rows=32, seed=0)
    expected = trajectory(tmp_path, "cpu", "--param_dtype", "float32", on_cpu=True)
    ways = {
        "float32": (("--param_dtype", "float32"), 1e-4),
        "bfloat16": (("--param_dtype", "bfloat16"), 5e-2),
        "compiled": (("--param_dtype", "bfloat16", "--compile_model"), 5e-2),
        "budget": (("--param_dtype", "bfloat16", "--compile_model", "--activation_memory_budget", "0.5"), 5e-2),
        "single_gpu_mode": (("--param_dtype", "bfloat16", "--single_gpu_mode"), 5e-2),
    }
    for name, (flags, rel) in ways.items():
        for ours, theirs in zip(trajectory(tmp_path, name, *flags), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=rel), name

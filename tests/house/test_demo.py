"""The parts of the demo that need no run: its flags, and the summary that it ends with."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from open_instruct.config.dpo import DPOConfig, validate_dpo
from open_instruct.config.parser import parse

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_importing_the_demo_does_not_load_torch() -> None:
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parents[1], env={"PYTHONPATH": "."}).returncode == 0


def test_dpo_accepts_the_flags(demo: ModuleType) -> None:
    config = parse(DPOConfig, demo.dpo_flags())
    assert validate_dpo(config) == []
    assert config.run.output_dir == str(demo.RUN)
    assert config.run.overwrite_output_dir
    # HSDP needs two copies at least, of two shards at least.
    assert config.parallel.fsdp_shard_degree == 2
    assert demo.NUM_RANKS == 4


@pytest.mark.parametrize("width", [72, 80, 140])
def test_summary_fits_and_says_what_happened(demo: ModuleType, width: int) -> None:
    metrics = [
        {
            "step": index + 1,
            "loss": 0.7 / (index + 1),
            "rewards/margin": 0.1 * index,
            "tokens_per_second": [1.0, 500.0, 700.0][index],
            "num_tokens": 1000 * (index + 1),
        }
        for index in range(3)
    ]
    evaluations = [
        {"step": step, "eval/preference_accuracy": accuracy, "eval/num_pairs": 128}
        for step, accuracy in ((0, 0.5), (3, 0.875))
    ]
    layout = {"num_replicas": 2, "shard_degree": 2, "shard_groups": [[0, 1], [2, 3]]}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(
        demo.summary(metrics=metrics, evaluations=evaluations, layout=layout, elapsed_s=90.0, width=console.width)
    )
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for fact in (
        "50.0% -> 87.5% of 128 pairs",
        "0.7000 -> 0.2333 in 3 steps",
        "600 tokens/s, 3,000 tokens in all",
        "2 copies of 2 shards: [0, 1], [2, 3]",
        "demo_output/run/hf_model",
        "1.5 minutes",
    ):
        assert fact in text
    # Each curve is whole: one axis a line, none broken by the frame.
    assert text.count("┤") == 2 * demo.CURVE_HEIGHT

"""Weights from sharded learners into a real vLLM, which then computes what the learners compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.toys.tiny import write_tiny_model
from tests.fleet.weight_engine import PROMPT
from tests.ranks.launch import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
FSDP_2 = {"replicas": 1, "shards": 2, "tensor": 1, "checkpointing": False}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("olmo2", "shm"), ("qwen2", "shm"), ("qwen3", "gloo")])
def test_an_engine_computes_what_the_learners_do(tmp_path: Path, family: str, backend: str) -> None:
    """Also after an update that broke in the middle of a layer."""
    pytest.importorskip("vllm", reason="needs vLLM")
    engines_model, learners_model = (
        write_tiny_model(tmp_path / name, family=family, seed=seed) for seed, name in enumerate(("engine", "learner"))
    )
    engine = subprocess.Popen(
        [sys.executable, "-m", "tests.fleet.weight_engine", str(engines_model), str(tmp_path), "2"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "engine.log").open("w"),
        text=True,
    )
    try:
        expected, _ = run_ranks(
            2,
            "tests.ranks.jobs.weight_sync:feed_engine",
            timeout_s=100,
            folder=str(tmp_path),
            source=str(learners_model),
            layout=FSDP_2,
            backend=backend,
            prompt=PROMPT,
        )
        output, _ = engine.communicate(timeout=30)
    finally:
        engine.kill()
    assert engine.returncode == 0, (tmp_path / "engine.log").read_text()[-4000:]
    before, broken, after = json.loads(output.splitlines()[-1])
    assert "learner 0 failed: OutOfOrder" in broken or "learner 1 failed: OutOfOrder" in broken
    assert after == pytest.approx(expected, abs=1e-4)
    assert before != pytest.approx(expected, abs=1e-2)

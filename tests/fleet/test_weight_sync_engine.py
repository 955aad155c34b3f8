"""Weights from sharded learners into a real vLLM, which then computes what the learners compute.

OLMo 2 is in whole runs: `test_engines_and_learners_agree_after_every_sync` of test_grpo.py.
"""

import json
import re
from pathlib import Path

import pytest

from open_instruct.config.lora import RANKS_OF_ENGINES
from tests.fleet import weight_engine
from tests.fleet.weight_engine import IN_FLIGHT, KEPT_NAME, NUM_VERSIONS
from tests.ranks import programs
from tests.ranks.launch import run_ranks
from tests.ranks.nccl_rules import breaches
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.extended

FSDP_2 = {"replicas": 1, "shards": 2, "tensor": 1, "checkpointing": False}
TOLERANCE = 1e-4
TIED = ("qwen2", "llama")  # the head has no tensor of its own there


@pytest.mark.parametrize(
    ("family", "backend", "way"),
    [
        *(("qwen2", "shm", "merged"), ("qwen3_moe", "shm", "merged")),
        *(("llama", "gloo", "delta"), ("llama", "files", "delta"), ("qwen3", "nccl", "adapter")),
    ],
)
def test_engine_computes_what_the_learners_do(
    tmp_path: Path, family: str, backend: str, way: str
) -> None:
    """Version after version, for prompts that it has in its cache of another one, and after an
    update that broke in the middle of a layer; also where completions were being generated. NCCL's
    way goes over gloo, and keeps to its rules.
    """
    pytest.importorskip("vllm", reason="needs vLLM")
    is_adapter = way == "adapter"
    num_versions = KEPT_NAME if is_adapter else IN_FLIGHT
    engines_model, learners_model = (
        write_shallow_model(
            tmp_path / name, family=family, seed=seed, is_narrow=False, tie=family in TIED
        )
        for seed, name in enumerate(("engine", "learner"))
    )
    if is_adapter:
        engines_model = learners_model
    engine = programs.start([weight_engine.__file__, str(engines_model), str(tmp_path), way])
    try:
        learners = run_ranks(
            2,
            "tests.ranks.jobs.nccl_sync:feed_engine",
            folder=str(tmp_path),
            source=str(learners_model),
            layout=FSDP_2,
            backend=backend,
            adapter_alone=is_adapter,
            changes_alone=way == "delta",
            num_versions=num_versions,
        )
        output, _ = engine.communicate(timeout=300)
    finally:
        engine.end()
    assert engine.returncode == 0, output[-4000:]
    said = json.loads((tmp_path / "said.json").read_text())
    differences = learners[0]["differences"]
    notes = [*(learner["notes"] for learner in learners), said["notes"]]
    assert all(len(calls) > 20 for calls in notes) == (backend == "nccl")
    assert breaches(notes, broken_channels=[1]) == []
    words = "could not read version 1" if backend == "files" else "learner [01] failed: OutOfOrder"
    assert re.search(words, said["broken"])
    assert all({NUM_VERSIONS, IN_FLIGHT} == set(versions) for versions in said["in_flight"])
    assert [version for version, *_ in differences] == list(
        range(0 if is_adapter else 1, num_versions + 1)
    )
    for version, to_own, to_one_before in differences:
        if version == KEPT_NAME:  # what a prefix of another version would do to each of the others
            assert to_own > 100 * TOLERANCE
        else:
            assert to_own < TOLERANCE
        assert version == 0 or to_one_before > 100 * TOLERANCE
    if is_adapter:
        assert tuple(said["ranks"]) == RANKS_OF_ENGINES
        assert (
            said["refused"] == "an engine can hold no adapter for lm_head: use --lora_sync merged"
        )

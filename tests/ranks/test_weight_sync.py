"""What receivers get is bit for bit what an export holds, and a time-out names who is missing."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from open_instruct.cluster.watchdog import MARK_VARIABLE
from open_instruct.commands.tiny_model import write_tiny_model

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.weight_sync"
KILLS_JOB = "tests.ranks.jobs.delta_kills"
FSDP_2 = {"replicas": 1, "shards": 2, "tensor": 1, "checkpointing": False}
TP_2 = {"replicas": 1, "shards": 1, "tensor": 2, "checkpointing": False}
HSDP_2X2 = {"replicas": 2, "shards": 2, "tensor": 1, "checkpointing": True}
EXPERTS = {"splits_experts": True}
FSDP_2_TP_2 = {"replicas": 1, "shards": 2, "tensor": 2, "checkpointing": False}
CONTEXT_2_REPLICAS_2 = {
    "replicas": 2,
    "shards": 1,
    "tensor": 1,
    "context": 2,
    "checkpointing": False,
}
ALONE = "the adapter alone"
CHANGES = "what has changed"
LEAST_BUCKETS = 8
# Less than the embeddings, which come in pieces.
BUCKET_BYTES = {"float32": 150_000, "bfloat16": 100_000}
ADAPTERS_BUCKET_BYTES = {"float32": 5_000, "bfloat16": 2_500}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    kinds: dict[str, dict[str, Any]] = {
        "olmo2": {"vocab_size": 531},  # shards of unequal size
        "olmo3": {"tie": True},
        "qwen2": {},
        "qwen3": {"tie": True, "dtype": "bfloat16"},
        "llama": {},
        "qwen3_moe": {},
    }
    return {
        family: write_tiny_model(root / family, family=family, **kind)
        for family, kind in kinds.items()
    }  # type: ignore[arg-type]


CASES: dict[int, list[tuple[Any, ...]]] = {
    1: [
        ("olmo2", None, "shm", "float32"),
        ("olmo3", None, "gloo", "bfloat16"),
        ("llama", None, "gloo", "bfloat16", CHANGES),
        ("qwen2", None, "files", "bfloat16"),
    ],
    2: [
        ("olmo2", FSDP_2, "shm", "bfloat16"),
        ("qwen3", FSDP_2, "gloo", "bfloat16"),
        ("olmo2", FSDP_2, "gathered", "bfloat16"),
        ("llama", TP_2, "shm", "float32"),
        ("olmo3", TP_2, "gloo", "float32"),
        ("olmo2", "ranges", "shm", "bfloat16"),
        ("olmo2", FSDP_2, "shm", "bfloat16", ALONE),
        ("qwen2", TP_2, "gloo", "float32", ALONE),
        ("qwen3", TP_2, "shm", "bfloat16", CHANGES),
        ("olmo3", FSDP_2, "gloo", "float32", CHANGES),
        ("olmo2", FSDP_2, "files", "bfloat16", CHANGES),
        ("llama", "ranges", "files", "float32", CHANGES),
        ("qwen2", FSDP_2, "files", "bfloat16", ALONE),
        ("qwen3_moe", FSDP_2, "gloo", "bfloat16"),
        ("qwen3_moe", FSDP_2 | EXPERTS, "gloo", "bfloat16"),
        ("qwen3_moe", FSDP_2, "shm", "float32", CHANGES),
    ],
    4: [
        ("llama", HSDP_2X2, "gloo", "bfloat16"),
        ("olmo3", HSDP_2X2, "shm", "float32"),
        ("olmo3", HSDP_2X2, "gathered", "bfloat16"),
        ("qwen3_moe", HSDP_2X2 | EXPERTS, "gathered", "float32"),
        ("qwen3", FSDP_2_TP_2, "shm", "bfloat16"),
        ("qwen2", FSDP_2_TP_2, "gloo", "float32"),
        ("olmo2", CONTEXT_2_REPLICAS_2, "gloo", "float32"),
        ("qwen3", "ranges", "gloo", "float32"),
        ("llama", HSDP_2X2, "gloo", "float32", ALONE),
        ("olmo3", FSDP_2_TP_2, "shm", "bfloat16", ALONE),
        ("qwen2", FSDP_2_TP_2, "gloo", "bfloat16", CHANGES),
        ("llama", HSDP_2X2, "shm", "float32", CHANGES),
        ("olmo2", "ranges", "gloo", "bfloat16", CHANGES),
        ("llama", HSDP_2X2, "files", "bfloat16", CHANGES),
        ("qwen3", FSDP_2_TP_2, "files", "bfloat16", CHANGES),
        ("qwen3_moe", HSDP_2X2, "shm", "bfloat16"),
        ("qwen3_moe", HSDP_2X2 | EXPERTS, "shm", "float32", CHANGES),
        ("qwen3_moe", "ranges", "gloo", "float32"),
    ],
}


@pytest.mark.parametrize("num_learners", CASES)
def test_receivers_get_what_an_export_holds(run_ranks, models, tmp_path, num_learners):
    cases = [
        {
            "folder": str(models[family]),
            "layout": layout,
            "backend": backend,
            "dtype": dtype,
            "bucket_bytes": (ADAPTERS_BUCKET_BYTES if ALONE in sent else BUCKET_BYTES)[dtype],
            "min_buckets": LEAST_BUCKETS,
            "adapter_alone": ALONE in sent,
            "changes_alone": CHANGES in sent,
        }
        for family, layout, backend, dtype, *sent in CASES[num_learners]
    ]
    num_receivers = 2
    results = run_ranks(
        num_learners + num_receivers,
        f"{JOB}:sync",
        cases=cases,
        num_learners=num_learners,
        num_receivers=num_receivers,
        folder=str(tmp_path),
    )
    assert results[num_learners:] == [[[]] * len(cases)] * num_receivers


@pytest.mark.parametrize(
    ("backend", "missing_at", "complaint"),
    [
        ("shm", "join", "2 s for receiver 1 to join"),
        ("gloo", "connect", r"2 s for receiver 1 to connect with learner \d"),
        ("gloo", "begin", "2 s for receiver 1 to begin to receive version 7"),
        ("gloo", "receive", r"2 s for receiver 1 to take bucket \d of \d+ of version 7"),
        ("shm", "receive", r"2 s for receiver 1 to take bucket \d of \d+ of version 7"),
        ("gloo", "abandoned", "engine 1 died"),
    ],
)
def test_missing_process_is_named_on_every_side(
    run_ranks, models, tmp_path, backend, missing_at, complaint
):
    results = run_ranks(
        4,
        f"{JOB}:go_missing",
        environment={MARK_VARIABLE: f"open_instruct-test-{os.getpid()}"},
        folder=str(tmp_path),
        source=str(models["llama"]),
        layout=FSDP_2,
        backend=backend,
        missing_at=missing_at,
    )
    *learners, receiver, missing = results
    assert missing == "missing"
    for message in (*learners, receiver):
        assert re.search(complaint, message), results


@pytest.mark.parametrize("changes_alone", [True, False])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_receiver_has_exactly_one_version_when_a_process_is_killed(
    run_ranks, backend, changes_alone
):
    """A hundred versions of what has changed on each way, or of all weights, and kills in every
    phase that there is.
    """
    arguments = {"num_syncs": 100, "backend": backend, "seed": 7, "changes_alone": changes_alone}
    (kills,) = run_ranks(1, f"{KILLS_JOB}:syncs", **arguments)
    phases = {"send", "stage", "apply", "between versions"}
    assert set(kills) == (phases | {"compare"} if changes_alone else phases), kills
    assert sum(kills.values()) >= 20

"""Every family trains the same sharded, its matrices or rows split, its prompts shared, and on one
process without.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

FAMILIES = ("olmo3", "qwen2", "qwen3", "llama")
JOB = "tests.ranks.jobs.train_runs:run_each"


@pytest.fixture(scope="module")
def cases(dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainCase]:
    folder: Path = tmp_path_factory.mktemp("families")
    # Llama's embeddings are tied, which FSDP and tensor parallelism must keep.
    return {
        family: replace(
            dpo_case,
            model=write_shallow_model(folder / family, family=family, tie=family == "llama"),
        )
        for family in FAMILIES
    }


def test_families(cases: dict[str, TrainCase], run_ranks: Callable[..., list[Any]]) -> None:
    flags: dict[str, Any] = {"max_train_steps": 3, "per_device_train_batch_size": 4}
    alone = [
        case.command(f"{family}_alone", batch=4, prefix_sharing="off", **flags)
        for family, case in cases.items()
    ]
    sharded = [case.command(f"{family}_fsdp_2", ranks=2, **flags) for family, case in cases.items()]
    split = [
        case.command(f"{family}_{name}_2", batch=4, **{f"{name}_parallel_degree": 2}, **flags)
        for family, case in cases.items()
        for name in ("tensor", "context")
    ]
    run_ranks(1, JOB, commands=alone, ports=free_ports(len(alone)))
    run_ranks(2, JOB, commands=sharded + split, ports=free_ports(len(sharded + split)))
    for family, case in cases.items():
        expected = case.trajectory(f"{family}_alone")
        assert len(expected) == 3 and expected[-1][0] < expected[0][0]
        for way in ("fsdp_2", "tensor_2", "context_2"):
            assert all(row["shared_fraction"] > 0.1 for row in case.metrics(f"{family}_{way}"))
            for ours, theirs in zip(case.trajectory(f"{family}_{way}"), expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5), (family, way)

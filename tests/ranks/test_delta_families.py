"""Models with layers of the gated delta rule train alike on every layout, and on DeepSpeed, and go on bitwise."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from open_instruct.families import FAMILIES
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import TrainCase, free_ports

JOB = "tests.ranks.jobs.train_runs:run_each"
DELTA_FAMILIES = [name for name, family in FAMILIES.items() if family.delta is not None]
SAVES: dict[str, Any] = {"activation_checkpointing": "full", "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module", params=DELTA_FAMILIES)
def case(request: pytest.FixtureRequest, dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    folder: Path = tmp_path_factory.mktemp("delta")
    model = write_shallow_model(folder / "model", family=request.param)
    return replace(dpo_case, model=model, folder=folder, own_flags=dpo_case.own_flags | {"max_train_steps": 3})


def test_every_layout_takes_the_same_steps(case: TrainCase, run_ranks: Callable[..., list[Any]]) -> None:
    alone = [case.command("alone", batch=4, prefix_sharing="off")]
    two = [
        case.command("fsdp", ranks=2),
        case.command("zero", ranks=2, backend="deepspeed", deepspeed_stage=2),
        case.command("whole", ranks=2, **SAVES),
        case.command("resumed", ranks=2, max_train_steps=2, **{name: SAVES[name] for name in SAVES}),
        case.command("resumed", ranks=2, **SAVES),
    ]
    four = [case.command("hsdp", ranks=4, fsdp_shard_degree=2)]
    for num_ranks, commands in ((1, alone), (2, two), (4, four)):
        codes = run_ranks(num_ranks, JOB, commands=commands, ports=free_ports(len(commands)))
        assert set(codes[0]) == {0}
    expected = case.trajectory("alone")
    assert expected[0][0] == pytest.approx(0.6931472, abs=1e-6) and expected[-1][0] < expected[0][0]
    for name in ("fsdp", "hsdp", "zero"):
        assert all(row["shared_fraction"] > 0.1 for row in case.metrics(name))
        for ours, theirs in zip(case.trajectory(name), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name
    assert case.trajectory("resumed")[-1] == case.trajectory("whole")[-1]
    assert case.weights_digest("resumed") == case.weights_digest("whole")
    exported = transformers.AutoModelForCausalLM.from_pretrained(case.folder / "fsdp" / "hf_model", dtype=torch.float32)
    started = transformers.AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    moved = [not torch.equal(*pair) for pair in zip(exported.parameters(), started.parameters(), strict=True)]
    assert all(moved)

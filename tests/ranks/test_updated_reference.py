"""TR-DPO: a reference beside the policy that follows it."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

RunRanks = Callable[..., list[Any]]

JOB = "tests.ranks.jobs.train_runs:run_each"
FLAT: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "learning_rate": 2e-4,
    "max_train_steps": 4,
}
HALF: dict[str, Any] = FLAT | {"ref_policy_update_freq": 2, "alpha": 0.5}


@pytest.fixture(scope="module")
def runs(dpo_case: TrainCase) -> TrainCase:
    from tests.ranks.launch import run_ranks

    commands = [
        dpo_case.command("cached", **FLAT),
        dpo_case.command("never_due", **FLAT, ref_policy_update_freq=9),
        dpo_case.command("always_the_policy", **FLAT, ref_policy_update_freq=1, alpha=1),
        dpo_case.command("half", **HALF, eval_mixer_list=[dpo_case.rows, "5"]),
        dpo_case.command("half_cut", **HALF, batch=2, prefix_sharing="off", checkpointing_steps=3),
        dpo_case.command("half_resumed", **HALF | {"max_train_steps": 3}),
        dpo_case.command("half_resumed", **HALF),
    ]
    run_ranks(1, JOB, commands=commands, ports=free_ports(len(commands)))
    return dpo_case


def assert_same(case: TrainCase, name: str, other: str) -> None:
    for ours, theirs in zip(case.trajectory(name), case.trajectory(other), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_reference_that_is_never_due_is_the_cached_one(runs: TrainCase) -> None:
    assert_same(runs, "never_due", "cached")


def test_reference_that_is_the_policy_sees_no_difference(runs: TrainCase) -> None:
    losses = [loss for loss, _ in runs.trajectory("always_the_policy")]
    assert losses == pytest.approx([math.log(2)] * 4, abs=1e-6)


def test_half_an_update_halves_what_is_seen(runs: TrainCase) -> None:
    frozen, moved = runs.trajectory("cached"), runs.trajectory("half")
    assert moved[1] == pytest.approx(frozen[1], rel=1e-5)
    assert frozen[2][0] + 1e-3 < moved[2][0] < math.log(2)
    before, after = map(json.loads, (runs.folder / "half" / "eval.jsonl").read_text().splitlines())
    assert before["eval/rewards/margin"] == 0 < after["eval/rewards/margin"]


def test_cut_does_not_matter(runs: TrainCase) -> None:
    assert_same(runs, "half_cut", "half")


def test_reference_is_resumed_bitwise(runs: TrainCase) -> None:
    assert runs.trajectory("half_resumed") == runs.trajectory("half")
    assert runs.weights_digest("half_resumed") == runs.weights_digest("half")
    index = json.loads((runs.folder / "half_cut" / "step3" / "index.json").read_text())
    assert any(name.startswith("reference.") for name in index["tensors"])


def test_two_ranks(runs: TrainCase, run_ranks: RunRanks) -> None:
    run_ranks(2, JOB, commands=[runs.command("half_2", ranks=2, **HALF)], ports=free_ports(1))
    assert_same(runs, "half_2", "half")

"""Every loss of --loss_type in a run: it starts where it must, and its steps do not depend on how
they are cut.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.objectives.dpo import EXO_SMOOTHING, bind
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

RunRanks = Callable[..., list[Any]]

JOB = "tests.ranks.jobs.train_runs:run_each"
# What a loss has of the whole batch, of single tokens, of both replies' lengths, or of other
# losses.
CASES: dict[str, dict[str, Any]] = {
    "aot": {"loss_type": "aot"},
    "aot_unpaired": {"loss_type": "aot_unpaired"},
    "desensitized": {"loss_type": "dpo", "ld_alpha": 0.3, "f_divergence_type": "js_divergence"},
    "aligned": {"loss_type": "wpo", "weight_alignment": True},
    "mixed": {"loss_type": ["dpo", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "orpo": {"loss_type": "orpo"},
}
EXO = {"label_smoothing": EXO_SMOOTHING}
LONG = {"max_train_steps": 3, "learning_rate": 3e-4}


@pytest.fixture(scope="module")
def one_process(dpo_case: TrainCase) -> TrainCase:
    from tests.ranks.launch import run_ranks

    heldout = [dpo_case.rows, "5"]
    commands = [
        *(
            dpo_case.command(
                f"first_{name}",
                loss_type=name,
                max_train_steps=1,
                **(EXO if name == "exo_pair" else {}),
            )
            for name in PREFERENCE_LOSSES
        ),
        *(
            dpo_case.command(f"{name}_{cut}", **LONG, **flags, **how)
            for name, flags in CASES.items()
            for cut, how in {
                "base": {"prefix_sharing": "off", "eval_mixer_list": heldout},
                "shared": {"prefix_sharing": "on", "batch": 4},
                "one_at_a_time": {"batch": 1},
                "padded": {"packing": False, "batch": 2},
            }.items()
        ),
    ]
    run_ranks(1, JOB, commands=commands, ports=free_ports(len(commands)))
    return dpo_case


def assert_same_trajectory(case: TrainCase, name: str, other: str) -> None:
    ours, theirs = case.trajectory(name), case.trajectory(other)
    assert len(ours) == len(theirs) == 3
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6), (
            f"{name} differs from {other} at step {step}"
        )


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_loss_starts_where_a_policy_is_its_reference(one_process: TrainCase, name: str) -> None:
    (row,) = one_process.metrics(f"first_{name}")
    flags = EXO if name == "exo_pair" else {}
    first_loss = bind(PreferenceLossSection(loss_type=name, **flags)).first_loss({})
    assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
    if first_loss is not None:
        assert row["loss"] == pytest.approx(first_loss, rel=1e-5, abs=5e-6)


@pytest.mark.parametrize("cut", ["shared", "one_at_a_time", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_cutting_does_not_matter(one_process: TrainCase, name: str, cut: str) -> None:
    assert_same_trajectory(one_process, f"{name}_{cut}", f"{name}_base")


@pytest.mark.parametrize("name", CASES)
def test_loss_falls(one_process: TrainCase, name: str) -> None:
    losses = [loss for loss, _ in one_process.trajectory(f"{name}_base")]
    assert min(losses) < losses[0]  # each step has rows of its own, and some are harder
    evaluations = (one_process.folder / f"{name}_base" / "eval.jsonl").read_text().splitlines()
    before, after = map(json.loads, evaluations)
    assert after["eval/loss"] < before["eval/loss"]


def test_sum_of_losses_tells_each_of_them(one_process: TrainCase) -> None:
    for row in one_process.metrics("mixed_base"):
        parts = {name: row[f"loss/{name}"] for name in ("dpo", "bco_pair", "sft")}
        assert row["loss"] == pytest.approx(
            0.8 * parts["dpo"] + 0.2 * parts["bco_pair"] + parts["sft"], rel=1e-6
        )
    first = one_process.metrics("mixed_base")[0]
    assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["loss/bco_pair"] == pytest.approx(2 * math.log(2), abs=1e-5)
    assert first["loss/sft"] == pytest.approx(one_process.metrics("first_sft")[0]["loss"], rel=1e-6)
    assert not [name for name in one_process.metrics("orpo_base")[0] if name.startswith("loss/")]


def test_sums_that_count_tokens_differently_are_kept_apart(one_process: TrainCase) -> None:
    folder = one_process.folder / "cache" / "reference_logprobs"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"ld-0.3"}
    names = {path.name for path in (folder / "ld-0.3").iterdir()}
    assert names and names <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(one_process: TrainCase, run_ranks: RunRanks, ranks: int) -> None:
    names = list(CASES) if ranks == 2 else ["aot", "aot_unpaired"]
    commands = [
        one_process.command(f"{name}_{ranks}", ranks=ranks, **LONG, **CASES[name]) for name in names
    ]
    run_ranks(ranks, JOB, commands=commands, ports=free_ports(len(commands)))
    for name in names:
        assert_same_trajectory(one_process, f"{name}_{ranks}", f"{name}_base")

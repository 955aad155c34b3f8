"""--deepcompile without a GPU: managed gradient accumulation learns bit for bit what the backend's
own way does, and so do DeepSpeed's code around compiled passes and its order of calls.

What it compiles runs on CUDA alone.
"""

import json
from typing import Any

import pytest

from scripts.demo_data.pairs import write_synthetic_preferences
from tests.ranks.launch import run_ranks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, STEPS_OF_AN_EPOCH, TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.deepcompile:run"
KINDS = [*(f"{stage}" for stage in range(4)), *(f"{stage}_in_bfloat16" for stage in (1, 2, 3))]
COMPILED = ["1", "2", "3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainCase, dict[str, list[str]]]:
    """All runs on two ranks, and what the extension was told on the first.

    Steps have several microbatches, the last step fewer; held-out rows are scored between; and before
    the last step comes an update that has nothing to learn from.
    """
    folder = tmp_path_factory.mktemp("deepcompile")
    model = write_shallow_model(folder / "model", family="olmo2")
    write_synthetic_preferences(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    own = {
        "loss_type": "dpo",
        "max_train_steps": STEPS_OF_AN_EPOCH,
        "eval_mixer_list": [folder / "rows.jsonl", "3"],
        "eval_steps": 2,
        "backend": "deepspeed",
        "activation_checkpointing": "none",
    }
    case = TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)
    jobs: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        for how in ("plain", "managed", "compiled"):
            if how == "compiled" and kind not in COMPILED:
                continue
            flags: dict[str, Any] = {"deepspeed_stage": int(kind[0])}
            if "bfloat16" in kind:
                flags["param_dtype"] = "bfloat16"
            if how == "compiled":
                flags["deepcompile"] = True
            name = f"{how}_{kind}"
            command = case.command(name, ranks=2, batch=1, **flags)
            jobs[name] = {"command": command, "how": how, "does": "idle"}
    calls, _ = run_ranks(2, JOB, runs=[*jobs.values()], ports=free_ports(len(jobs)))
    return case, dict(zip(jobs, calls, strict=True))


def assert_same(case: TrainCase, name: str, other: str) -> None:
    assert case.trajectory(name) == case.trajectory(other)
    assert case.weights_digest(name) == case.weights_digest(other)
    assert read_held_out(case, name) == read_held_out(case, other)


def read_held_out(case: TrainCase, name: str) -> list[dict[str, float]]:
    lines = (case.folder / name / "eval.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_managed_accumulation_is_bitwise_the_same(runs: Any, kind: str) -> None:
    case, _ = runs
    assert len(case.trajectory(f"plain_{kind}")) == STEPS_OF_AN_EPOCH
    assert all(norm > 0 for _, norm in case.trajectory(f"plain_{kind}"))
    assert_same(case, f"managed_{kind}", f"plain_{kind}")


@pytest.mark.parametrize("stage", ["1", "2"])
def test_code_around_compiled_passes_changes_nothing(runs: Any, stage: str) -> None:
    case, _ = runs
    assert_same(case, f"compiled_{stage}", f"plain_{stage}")


def test_code_around_compiled_passes_gathers_what_computes(runs: Any) -> None:
    """To rounding: where nothing is compiled DeepSpeed gathers parameters one by one, and for a
    pass without gradients a unit is gathered at a time.
    """
    case, _ = runs
    for ours, theirs in zip(*map(case.trajectory, ("compiled_3", "plain_3")), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    held_out = [read_held_out(case, name) for name in ("compiled_3", "plain_3")]
    for ours, theirs in zip(*held_out, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("stage", COMPILED)
def test_extension_is_told_which_microbatch_is_the_last(runs: Any, stage: str) -> None:
    """And of the weights before anything is compiled; a pass without gradients is not compiled."""
    _, calls = runs
    told = calls[f"compiled_{stage}"]
    setup = told.index("compile")
    assert told[0] == "init"
    assert set(told[1:setup]) == {"register"}
    assert "reset" in told[setup:]
    assert "uncompiled" in told[setup:]
    backward = [each for each in told if "backward" in each]
    assert backward[:2] == ["backward", "last backward"]
    assert backward[-1] == "last backward"
    assert backward.count("last backward") == STEPS_OF_AN_EPOCH + 1


def test_runs_without_it_tell_the_extension_nothing(runs: Any) -> None:
    _, calls = runs
    assert not any(told for name, told in calls.items() if not name.startswith("compiled"))

"""--keep_best: of a run whose best step is in its middle, that step's weights are kept and
exported, bit by bit.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from open_instruct.checkpoints.step_folder import find_checkpoints
from open_instruct.commands import export
from open_instruct.objectives.registry import OBJECTIVES, load_objective
from tests.ranks.objective_rows import write_objective_case
from tests.ranks.test_deepspeed import of_stage
from tests.ranks.test_dpo_resume import finish, kill, start, wait_for_rows
from tests.ranks.train_case import TrainCase, free_ports

NUM_STEPS, BEST_STEP = 8, 4
METRIC = "eval/loss"
JOB = "tests.ranks.jobs.train_runs:run_each"

RunRanks = Callable[..., list[Any]]


def write_command(case: TrainCase, name: str, *, ranks: int = 2, **flags: Any) -> list[str]:
    """A run whose held-out loss falls for four steps, and rises then."""
    own = {"eval_mixer_list": [case.rows, "6"], "eval_steps": 2, "keep_best": METRIC}
    own |= {"checkpointing_steps": 5, "keep_last_n_checkpoints": 1}
    own |= {"learning_rate": 3e-2, "lr_scheduler_type": "constant"}
    return case.command(name, ranks=ranks, max_train_steps=NUM_STEPS, **own | flags)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names_of_checkpoints(run: Path) -> list[str]:
    return [path.name for path in find_checkpoints(run)]


def digest_of_step(run: Path, step: int) -> str:
    """Hash of the weights in a checkpoint, as `TrainCase.weights_digest` has it of a run's
    model.
    """
    folder = run.parent / f"{run.name}_step{step}"
    assert export.main([str(run / f"step{step}"), "--output_dir", str(folder)]) == 0
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        for tensor, values in sorted(load_file(file).items()):
            digest.update(tensor.encode() + values.tobytes())
    return digest.hexdigest()


def write_row(path: Path, row: dict[str, Any]) -> None:
    kept = [each for each in read_rows(path) if each["step"] != row["step"]]
    path.write_text("".join(json.dumps(each) + "\n" for each in [*kept, row]))


@pytest.mark.extended
def test_best_step_in_the_middle_is_kept_and_exported_bitwise(dpo_case: TrainCase) -> None:
    run = dpo_case.folder / "middle"
    said = finish(start(write_command(dpo_case, run.name), ranks=2))

    values = {row["step"]: row[METRIC] for row in read_rows(run / "eval.jsonl") if row["step"]}
    assert min(values, key=lambda step: values[step]) == BEST_STEP
    assert json.loads((run / "best.json").read_text()) == {
        "step": BEST_STEP,
        "metric": METRIC,
        "value": values[BEST_STEP],
    }
    # Step 2, once the best, is gone; step 5 is one of every five, and step 8 the last.
    assert names_of_checkpoints(run) == ["step4", "step5", "step8"]
    exported = dpo_case.weights_digest(run.name)
    assert exported == digest_of_step(run, BEST_STEP) != digest_of_step(run, NUM_STEPS)
    assert f"exported: step {BEST_STEP}, the best by {METRIC} ({values[BEST_STEP]:.6g})" in said
    card = (run / "hf_model" / "README.md").read_text()
    assert f"step {BEST_STEP}, the best by {METRIC}" in card and f"step {NUM_STEPS} |" not in card


@pytest.mark.extended
def test_killed_run_keeps_its_best_step_when_it_goes_on(dpo_case: TrainCase) -> None:
    """Killed at any moment; and before the last checkpoint, of a step whose score nothing has any
    more.
    """
    undisturbed, killed, half = (
        dpo_case.folder / name for name in ("undisturbed", "killed", "half")
    )
    finish(start(write_command(dpo_case, undisturbed.name), ranks=2))
    process = start(write_command(dpo_case, killed.name, async_checkpoints="on"), ranks=2)
    wait_for_rows(killed / "metrics.jsonl", BEST_STEP + 1, process)
    kill(process)
    finish(start(write_command(dpo_case, killed.name, async_checkpoints="on"), ranks=2))

    shutil.copytree(
        undisturbed, half, ignore=shutil.ignore_patterns("step8", "hf_model", "best.json")
    )
    write_row(half / "eval.jsonl", read_rows(half / "eval.jsonl")[-1] | {METRIC: 0.0})
    finish(start(write_command(dpo_case, half.name), ranks=2))

    for run in (killed, half):
        assert (run / "best.json").read_text() == (undisturbed / "best.json").read_text()
        assert names_of_checkpoints(run) == names_of_checkpoints(undisturbed)
        assert dpo_case.weights_digest(run.name) == dpo_case.weights_digest(undisturbed.name)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, of_stage(3)),
        (2, {"use_lora": True}),
        (1, {"single_gpu_mode": True, "param_dtype": "bfloat16", "learning_rate": 1e-2}),
    ],
)
def test_weights_of_every_backend_go_back_to_the_best_step(
    dpo_case: TrainCase, run_ranks: RunRanks, ranks: int, flags: dict[str, Any]
) -> None:
    """The share of pairs that are told apart is soon 1, and as good is no better."""
    name = f"back_{next(iter(flags))}"
    command = write_command(
        dpo_case, name, ranks=ranks, **flags | {"keep_best": "eval/rewards/accuracy"}
    )
    run_ranks(ranks, JOB, commands=[command], ports=free_ports(1))
    run = dpo_case.folder / name
    best = json.loads((run / "best.json").read_text())["step"]
    assert best < NUM_STEPS
    assert (
        dpo_case.weights_digest(name) == digest_of_step(run, best) != digest_of_step(run, NUM_STEPS)
    )


@pytest.mark.extended
@pytest.mark.parametrize("entry", OBJECTIVES)
def test_every_metric_that_it_takes_is_in_the_rows_of_such_a_run(
    tmp_path: Path, entry: str, run_ranks: RunRanks
) -> None:
    case = write_objective_case(tmp_path, entry, family="qwen2")
    held_out = {"eval_mixer_list": [case.rows, "6"], "eval_steps": 1, "keep_best": "eval/loss"}
    command = case.command("run", **held_out | {"max_train_steps": 2, "learning_rate": 1.0})
    run_ranks(1, JOB, commands=[command], ports=free_ports(1), entry=entry)
    run = case.folder / "run"
    rows, scores = case.metrics("run"), read_rows(run / "eval.jsonl")
    config = load_objective(entry).config_class
    assert set(config.quality_metrics.fget(None)) <= rows[-1].keys() | scores[-1].keys()
    best = json.loads((run / "best.json").read_text())["step"]
    assert case.weights_digest("run") == digest_of_step(run, best)
    if entry == "reward_model":  # whose exported config has the scores of these weights
        of_best = next(row for row in scores if row["step"] == best)
        written = json.loads((run / "hf_model" / "config.json").read_text())
        assert written["score_mean"] == pytest.approx(of_best["eval/rewards/mean"], abs=1e-5)

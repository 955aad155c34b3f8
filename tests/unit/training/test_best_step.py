"""--keep_best: which step is the best, from the rows and the checkpoints of a run."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from open_instruct.checkpoints.step_folder import MANIFEST
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.metrics import metric_entry
from open_instruct.objectives.registry import OBJECTIVES, load_objective
from open_instruct.run.cadence import Cadence
from open_instruct.run.run_directory import RunDirectory
from open_instruct.training.best_step_watch import BestStepWatch, find_idle_watch

NAN, INFINITE = float("nan"), float("inf")


def write_run(
    folder: Path, values: dict[int, float], *, checkpoints: Iterable[int], metric: str
) -> RunDirectory:
    directory = RunDirectory(path=folder)
    file = directory.evaluations if metric.startswith("eval/") else directory.metrics
    file.write_text(
        "".join(json.dumps({"step": step, metric: value}) + "\n" for step, value in values.items())
    )
    for step in checkpoints:
        (folder / f"step{step}").mkdir()
        (folder / f"step{step}" / MANIFEST).write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("eval/loss", [3.0, 1.0, 2.0], 2),
        ("eval/reward", [3.0, 1.0, 2.0], 1),
        ("eval/verifier/mine", [0.0, 0.5, 0.5], 2),  # as good is no better
        ("eval/loss", [NAN, 2.0, NAN], 2),
        ("eval/loss", [INFINITE, -INFINITE, 5.0], 3),
        ("eval/loss", [NAN, NAN, NAN], None),
        ("loss", [3.0, 1.0, 2.0], 2),
        ("reward", [1.0, 3.0, 3.0], 2),
    ],
)
def test_best_step_is_the_same_during_a_run_and_from_its_files(
    tmp_path: Path, metric: str, values: list[float], best: int | None
) -> None:
    directory = write_run(tmp_path, {}, checkpoints=(), metric=metric)
    watch = BestStepWatch(metric, directory, until=0)
    for step, value in enumerate(values, start=1):
        before = watch.step
        assert watch.improves(step, {metric: value}, is_saved=True) == (watch.step != before)
    assert watch.step == best
    told = directory.read_best_step()
    assert (told.step if told else None) == best

    rows = dict(enumerate(values, start=1))
    again = BestStepWatch(
        metric, write_run(tmp_path, rows, checkpoints=rows, metric=metric), until=len(values)
    )
    assert again.best == watch.best


def test_only_steps_with_a_checkpoint_up_to_the_one_that_it_stands_at_are_found(
    tmp_path: Path,
) -> None:
    rows = {2: 0.1, 4: 0.5, 6: 0.4, 8: 0.2}
    directory = write_run(tmp_path, rows, checkpoints=(4, 6, 8), metric="eval/loss")
    assert BestStepWatch("eval/loss", directory, until=7).step == 6
    assert BestStepWatch("eval/loss", directory, until=8).step == 8


def test_metric_of_training_is_compared_where_there_is_a_checkpoint_anyway(tmp_path: Path) -> None:
    watch = BestStepWatch("loss", RunDirectory(path=tmp_path), until=0)
    assert not watch.improves(1, {"loss": 1.0}, is_saved=False)
    assert watch.improves(2, {"loss": 2.0}, is_saved=True)
    held_out = BestStepWatch("eval/loss", RunDirectory(path=tmp_path), until=0)
    assert held_out.improves(1, {"eval/loss": 1.0}, is_saved=False)
    assert not held_out.improves(2, {"loss": 0.5}, is_saved=True)


@pytest.mark.parametrize("interval", [3, 10, None])
def test_run_of_one_evaluation_is_warned_of(interval: int | None) -> None:
    cadence = Cadence(num_steps=10, save_every=5, evaluate_every=interval)
    warning = find_idle_watch("eval/loss", cadence, flag="--eval_steps")
    assert (warning is not None) == (interval == 10)
    assert warning is None or "--eval_steps 10" in warning
    assert find_idle_watch("loss", cadence, flag="--eval_steps") is None


def test_direction_of_every_metric_that_it_takes_is_known() -> None:
    words = [
        "--model_name_or_path",
        "m",
        "--dataset_mixer_list",
        "p.jsonl",
        "1.0",
        "--output_dir",
        "o",
        "--eval_pass_at_k",
        "4",
    ]
    names = {*parse_run(GRPOConfig, words).quality_metrics}
    for name in OBJECTIVES:
        names |= {*load_objective(name).config_class.quality_metrics.fget(None)}
    assert {"eval/pass_at_4", "eval/loss", "eval/verifier/*"} <= names
    assert [name for name in sorted(names) if metric_entry(name).better is None] == []

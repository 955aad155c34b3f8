"""When held-out rows are scored, and what of that goes where."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.core.errors import InputError
from open_instruct.objectives.objective import Evaluation, Objective
from open_instruct.objectives.sft import SFT, SFTConfig
from open_instruct.run.run_directory import RunDirectory
from open_instruct.train import train
from open_instruct.training.scoring import Heldout


@pytest.fixture
def scored() -> list[str]:
    return []


def heldout_of(
    folder: Path, scored: list[str], *, reference_ND: np.ndarray | None = None
) -> Heldout:
    def score(dataset: Any, rows: range, *, title: str) -> np.ndarray:
        scored.append(title)
        return np.array([[float(len(scored))]])

    def evaluate(dataset: Any, logps_ND: np.ndarray, reference: Any, config: Any) -> Evaluation:
        value = float(logps_ND[0, 0])
        row = {"eval/loss": value, "eval/num_rows": 1, "eval/histogram": [1, 2]}
        return Evaluation(row=row, sentence="held-out loss {when}", exported={"mean": value})

    run = SimpleNamespace(
        process=SimpleNamespace(rank=0),
        directory=RunDirectory(path=folder),
        console=SimpleNamespace(say=lambda text: None),
    )
    rows: Any = [None]
    scorer: Any = SimpleNamespace(score=score, run=run, config=None)
    objective: Any = SimpleNamespace(
        evaluate=evaluate, rows=SimpleNamespace(unit="pair"), scores_heldout_rows=True
    )
    return Heldout(rows, reference_ND, scorer, objective)


def test_step_is_scored_once_and_its_numbers_are_metrics(tmp_path: Path, scored: list[str]) -> None:
    heldout = heldout_of(tmp_path, scored)
    metrics = heldout.metrics(4)
    assert metrics.pop("time/evaluation") >= 0
    assert metrics == {"eval/loss": 1.0, "eval/num_rows": 1}
    assert heldout.evaluate(4).exported == {"mean": 1.0} and scored == ["held-out pairs at step 4"]
    assert heldout.evaluate(5).exported == {"mean": 2.0}
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(row["step"], row["eval/loss"]) for row in rows] == [(4, 1.0), (5, 2.0)]
    assert rows[0]["eval/histogram"] == [1, 2]


def test_rows_that_an_objective_says_nothing_of_are_refused() -> None:
    words = ["--model_name_or_path", "m", "--mixer_list", "r", "1.0", "--output_dir", "o"]
    config = parse_run(SFTConfig, [*words, "--eval_mixer_list", "e", "1.0"])

    class Unscored(Objective):
        name = "sft"
        config_class = SFTConfig
        rows = SFT.rows
        bind = SFT.bind

    with pytest.raises(
        InputError,
        match="--eval_mixer_list: sft has no `evaluate`; write one, or leave the flag out",
    ):
        train(config, objective=Unscored())


def test_before_the_first_step_a_reference_is_the_policy(tmp_path: Path, scored: list[str]) -> None:
    heldout = heldout_of(tmp_path, scored, reference_ND=np.array([[7.0]]))
    assert heldout.evaluate(0).row["eval/loss"] == 7.0 and not scored
    assert heldout.evaluate(1).row["eval/loss"] == 1.0

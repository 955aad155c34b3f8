"""What a finished run says last."""

import json
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.report.closing import print_results
from open_instruct.report.ends import step_ends


def finished(folder: Path, **architectures: Any) -> DPOConfig:
    """The flags of a run that has left its files in `folder`, as far as they are read."""
    (folder / "hf_model").mkdir(parents=True)
    (folder / "hf_model" / "config.json").write_text(json.dumps(architectures))
    rows = [
        {"step": 1, "loss": 0.7, "rewards/margin": 0.0, "lr": None},
        {"step": 2, "loss": 0.25, "rewards/margin": 1},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        "--model_name_or_path",
        "M",
        "--mixer_list",
        "rows.jsonl",
        "1.0",
        "--output_dir",
        str(folder),
    ]
    return parse_run(DPOConfig, words)


def test_closing_names_results_and_next_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    config = finished(folder, architectures=["Olmo2ForCausalLM"])
    evaluations = [{"step": step, "eval/preference_accuracy": step / 4} for step in (0, 2)]
    (folder / "eval.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in evaluations))
    print_results(config.run, config.adapters, took_s=130)
    assert capsys.readouterr().out.splitlines() == [
        "2 steps: loss 0.7 -> 0.25, rewards/margin 0 -> 1",
        "held out: preference_accuracy 0 -> 0.5",
        "time: 2 min",
        f"model: {folder}/hf_model",
        f"talk: open-instruct chat {folder}",
        f"report: open-instruct report {folder}",
    ]


def test_accuracy_begins_where_the_policy_has_left_its_reference() -> None:
    accuracies, margins = [0.0, 0.5, 1.0], [1e-7, -0.1, 2.0]
    rows = [
        {"step": step, "rewards/accuracy": accuracy, "rewards/margin": margin}
        for step, (accuracy, margin) in enumerate(zip(accuracies, margins, strict=True), start=1)
    ]
    assert step_ends(rows, "rewards/accuracy") == (0.5, 1.0)
    assert step_ends(rows, "rewards/margin") == (0.0, 2.0)
    # A loss without a reference tells pairs apart from the first step on.
    assert step_ends([rows[0] | {"rewards/margin": 1.0}, *rows[1:]], "rewards/accuracy") == (
        0.0,
        1.0,
    )


def test_judge_is_not_talked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = finished(tmp_path / "out", architectures=["Olmo2ForSequenceClassification"])
    print_results(config.run, config.adapters, took_s=7200)
    said = capsys.readouterr().out
    assert "time: 2.0 h" in said and "talk: " not in said


def test_run_without_a_model_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = finished(tmp_path / "out")
    (tmp_path / "out" / "metrics.jsonl").unlink()
    print_results(config.run, config.adapters, took_s=1)
    assert capsys.readouterr().out == ""

"""An objective that the package does not know: one file and one line, from the command line to a model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.ranks.launch import REPOSITORY
from tests.ranks.train_case import TrainCase, free_ports

# What a user would write: flags, the form of a row, a loss and its facts.
OBJECTIVE = '''
"""Replies to a question, each pulled up against the reference: 1 - sigmoid(strength * (log p - log p_ref))."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from open_instruct.config.sections import (
    DataSection, LoggingSection, MemorySection, ModelSection, OptimSection, ParallelSection, RunSection, flag,
)
from open_instruct.config.validation import refuse, training_problems, training_warnings
from open_instruct.data.row_builder import RenderedRow
from open_instruct.data.rows import MalformedRow
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.objectives.objective import REFERENCE, BoundLoss, Evaluation, LossOutputs, Objective
from open_instruct.records import Metric


@dataclass(kw_only=True)
class MadeUpLossSection:
    """Loss"""

    strength: float = flag("how steep the curve is", 0.5, above=0)
    height: float = flag("its highest value", 3.0, above=0)


@dataclass(kw_only=True)
class MadeUpConfig:
    """Pull replies up, each by its own distance from the reference."""

    examples: ClassVar[tuple[str, ...]] = ("open-instruct made_up --model_name_or_path DIR --output_dir OUT",)

    model: ModelSection
    data: DataSection
    loss: MadeUpLossSection
    optim: OptimSection
    parallel: ParallelSection
    memory: MemorySection
    run: RunSection
    logging: LoggingSection


def validate(config: MadeUpConfig) -> list[str]:
    refuse(training_problems(config))
    return list(training_warnings(config))


class QuestionBuilder(SFTBuilder):
    """`{"question": ..., "answer": ...}`."""

    unit = "question"

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        if not row.get("answer"):
            raise MalformedRow("no_answer", "'answer' is missing")
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        return super().render({"messages": turns})


def bind(config: MadeUpConfig) -> BoundLoss:
    def function(scores, batch, counts) -> LossOutputs:
        from open_instruct.losses.logprobs import sum_by_sequence

        logps_S, _ = sum_by_sequence(scores.logprobs_N, scores.sequence_ids_N, batch.packed.num_sequences)
        distance_S = logps_S - batch.values[f"{REFERENCE}_S"]
        losses_S = config.loss.height * (1 - (config.loss.strength * distance_S).sigmoid())
        num = float(losses_S.numel())
        metrics = {"loss": losses_S.detach(), "distance": distance_S.detach()}
        return LossOutputs(
            loss=losses_S.sum() / counts["rows"],
            metrics={name: Metric(value=each.sum() / max(num, 1.0), weight=num) for name, each in metrics.items()},
        )

    return BoundLoss(function=function, first_loss=config.loss.height / 2, remedy="look at the reference")


def evaluate(dataset, logps_ND, reference_ND, config) -> Evaluation:
    mean = float((logps_ND - reference_ND).mean())
    return Evaluation(row={"eval/distance": mean}, sentence=f"held-out distance {{when}}: {mean:.3f}")


MADE_UP = Objective(
    name="made_up",
    config_class=MadeUpConfig,
    validate=validate,
    rows=QuestionBuilder,
    bind=bind,
    needs_reference=lambda config: True,
    evaluate=evaluate,
)
'''

# The one line of the registry, and the console script.
PROGRAM = """
import sys
from open_instruct.objectives.registry import OBJECTIVES
OBJECTIVES["made_up"] = ("made_up_objective:MADE_UP", "questions with an answer")
from open_instruct.cli import main
from open_instruct.entry import leave
leave(main(["made_up", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def case(dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """Rows that only the made-up objective can read."""
    folder = tmp_path_factory.mktemp("made_up")
    (folder / "made_up_objective.py").write_text(OBJECTIVE)
    (folder / "program.py").write_text(PROGRAM)
    with (folder / "rows.jsonl").open("w") as file:
        for line in dpo_case.rows.read_text().splitlines():
            *_, question, answer = json.loads(line)["chosen"]
            file.write(json.dumps({"question": question["content"], "answer": answer["content"]}) + "\n")
    flags = {"eval_mixer_list": [folder / "rows.jsonl", "6"]}
    return TrainCase(model=dpo_case.model, rows=folder / "rows.jsonl", folder=folder, own_flags=flags)


def run(case: TrainCase, words: list[str], *, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """The program of the registry line, as a user starts it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    start = [sys.executable] if ranks == 1 else [*torchrun, "--master_port", str(free_ports(1)[0])]
    return subprocess.run(
        [*start, str(case.folder / "program.py"), *words],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{case.folder}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_ranks_train_it_to_a_model(case: TrainCase) -> None:
    flags = {"strength": 0.25, "height": 4, "learning_rate": 1e-3, "checkpointing_steps": 5}
    done = run(case, case.command("run", ranks=2, batch=2, **flags), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plan: needs " in done.stdout

    rows = case.metrics("run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # A policy that is its reference is at distance 0, where the curve is half as high as it can be: 4 / 2.
    assert rows[0]["loss"] == pytest.approx(2.0, abs=1e-5)
    assert rows[0]["distance"] == pytest.approx(0.0, abs=1e-4)
    own, every_run = ["distance", "loss"], ["grad_norm", "lr", "num_tokens", "padding_fraction", "peak_memory_gib"]
    for row in rows:
        assert sorted(row) == sorted([*own, *every_run, "shared_fraction", "step", "tokens_per_second"])
        assert math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0
    assert rows[-1]["loss"] < 1.0 < 8 < rows[-1]["distance"]
    before, after = read(case.folder / "run" / "eval.jsonl")
    assert before["eval/distance"] == pytest.approx(0.0, abs=1e-4) and after["eval/distance"] > 8

    model, report = AutoModelForCausalLM.from_pretrained(case.folder / "run" / "hf_model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained, start = model.state_dict(), AutoModelForCausalLM.from_pretrained(case.model).state_dict()
    assert any(not weight.equal(start[name]) for name, weight in trained.items())

    # Another value of a flag that only this objective has is another run.
    again = run(case, case.command("run", batch=2, **flags | {"height": 5}))
    assert again.returncode == 2
    assert "--height was 4.0, is 5.0" in again.stderr


def test_its_flags_are_refused_and_told_of_as_those_of_any_command(case: TrainCase) -> None:
    bad = run(case, case.command("bad", strength=-1, heigth=2))
    assert bad.returncode == 2
    assert "--heigth" in bad.stderr and "--height" in bad.stderr
    low = run(case, case.command("bad", strength=-1))
    assert low.returncode == 2
    assert "--strength -1.0: must be above 0" in low.stderr
    assert not (case.folder / "bad").exists()

    told = run(case, ["--help"])
    assert told.returncode == 0
    assert "--strength FLOAT" in told.stdout and "how steep the curve is" in told.stdout
    assert "open-instruct made_up --model_name_or_path DIR" in told.stdout

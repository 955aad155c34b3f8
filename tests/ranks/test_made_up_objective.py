"""An objective that the package does not know, as docs/your_own_loss.md has it: from the command
line to a model.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.ranks import programs
from tests.ranks.launch import REPOSITORY
from tests.ranks.train_case import OF_EVERY_RUN, TrainCase, free_ports
from tests.waiting import HANGS_AFTER_S

pytestmark = pytest.mark.extended

# What a user would write: the page shows it.
PAGE = REPOSITORY / "docs" / "your_own_loss.md"

# The one line of the registry, and the console script; where it is run was forked, the script is
# imported already.
PROGRAM = """
import sys
sys.modules.pop("open_instruct.cli", None)
from open_instruct.objectives.registry import OBJECTIVES
OBJECTIVES["pull"] = ("mine:PULL", "questions with an answer")
from open_instruct.cli import main
from open_instruct.commands.process import exit_process
exit_process(main(["pull", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def case(dpo_case: TrainCase, tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """Rows that only the made-up objective can read."""
    folder = tmp_path_factory.mktemp("made_up")
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    (folder / "mine.py").write_text(code)
    (folder / "program.py").write_text(PROGRAM)
    with (folder / "rows.jsonl").open("w") as file:
        for line in dpo_case.rows.read_text().splitlines():
            *_, question, answer = json.loads(line)["chosen"]
            file.write(
                json.dumps({"question": question["content"], "answer": answer["content"]}) + "\n"
            )
    flags = {"eval_mixer_list": [folder / "rows.jsonl", "6"]}
    return TrainCase(
        model=dpo_case.model, rows=folder / "rows.jsonl", folder=folder, own_flags=flags
    )


def run(case: TrainCase, words: list[str], *, ranks: int = 1) -> tuple[int, str]:
    """The program of the registry line, as a user starts it; its exit code, and what it said."""
    torchrun = [
        *programs.TORCHRUN,
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(free_ports(1)[0]),
    ]
    process = programs.start(
        [*(torchrun if ranks > 1 else ()), str(case.folder / "program.py"), *words]
    )
    said, _ = process.communicate(timeout=HANGS_AFTER_S)
    assert process.returncode is not None
    return process.returncode, said


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_ranks_train_it_to_a_model(case: TrainCase) -> None:
    flags = {"strength": 0.25, "height": 4, "learning_rate": 1e-3, "checkpointing_steps": 5}
    code, said = run(case, case.command("run", ranks=2, batch=2, **flags), ranks=2)
    assert code == 0, said
    assert "memory: at most " in said

    rows = case.metrics("run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # A policy that is its reference is at distance 0, where the curve is half as high as it can be:
    # 4 / 2.
    assert rows[0]["loss"] == pytest.approx(2.0, abs=1e-5)
    assert rows[0]["distance"] == pytest.approx(0.0, abs=1e-4)
    for row in rows:
        assert set(row) == OF_EVERY_RUN | {"distance"}
        assert math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0
    assert rows[-1]["loss"] < 1.0 < 8 < rows[-1]["distance"]
    before, after = read(case.folder / "run" / "eval.jsonl")
    assert before["eval/distance"] == pytest.approx(0.0, abs=1e-4) and after["eval/distance"] > 8

    model, report = AutoModelForCausalLM.from_pretrained(
        case.folder / "run" / "hf_model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained, start = (
        model.state_dict(),
        AutoModelForCausalLM.from_pretrained(case.model).state_dict(),
    )
    assert any(not weight.equal(start[name]) for name, weight in trained.items())

    # Another value of a flag that only this objective has is another run.
    code, said = run(case, case.command("run", batch=2, **flags | {"height": 5}))
    assert code == 2
    assert "--height was 4.0, is 5.0" in said


def test_flags_of_an_objective_of_ones_own_are_refused_and_explained(case: TrainCase) -> None:
    code, said = run(case, case.command("bad", strength=-1, heigth=2))
    assert code == 2
    assert "--heigth" in said and "--height" in said
    code, said = run(case, case.command("bad", strength=-1))
    assert code == 2
    assert "--strength -1.0: must be above 0" in said
    assert not (case.folder / "bad").exists()

    code, said = run(case, ["--help"])
    assert code == 0
    assert "--strength FLOAT" in said and "how steep the curve is" in said
    assert "open-instruct train --objective mine.py:PULL" in said


def train(case: TrainCase, *words: str | Path) -> tuple[int, str]:
    """What `open-instruct train` ends with, and what it said."""
    command = [str(REPOSITORY / "open_instruct" / "cli.py"), "train", *map(str, words)]
    process = programs.start(command, cwd=case.folder)
    try:
        said, _ = process.communicate(timeout=HANGS_AFTER_S)
    finally:
        process.end()
    return process.wait(), said


def test_flag_names_one_that_no_registry_knows(case: TrainCase) -> None:
    named = ["--objective", case.folder / "mine.py:PULL"]
    code, said = train(case, *named, *case.command("named", batch=2, max_train_steps=1))
    assert code == 0, said
    assert [row["loss"] for row in case.metrics("named")] == [pytest.approx(1.5, abs=1e-5)]
    told = programs.start(
        [str(REPOSITORY / "open_instruct" / "train.py"), *map(str, named), "--help"]
    )
    assert told.wait(60) == 0 and "--strength FLOAT" in told.said()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give --objective FILE.py:NAME"),
        (["--objective"], "give --objective FILE.py:NAME"),
        (
            ["--objective", "mine.py:PULLED"],
            "--objective mine.py:PULLED cannot be loaded (AttributeError",
        ),
        (
            ["--objective", "nowhere.py:PULL"],
            "--objective nowhere.py:PULL cannot be loaded (FileNotFoundError",
        ),
        (["--objective", "mine.py:Pull"], "--objective mine.py:Pull is no objective"),
    ],
)
def test_object_that_is_no_objective_is_refused(
    case: TrainCase, words: list[str], told: str
) -> None:
    code, said = train(case, *words)
    assert code == 2 and told in said
    assert "Traceback" not in said

"""An objective that the planner has never heard of is planned from its record alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from open_instruct.objectives.registry import OBJECTIVES
from open_instruct.wording import one_of

REPOSITORY = Path(__file__).parents[2]
MADE_UP = """
import sys
from dataclasses import dataclass

from open_instruct.config.sections import OptimSection, flag
from open_instruct.config.training import TrainingConfig
from open_instruct.data.row_builder import RowBuilder
from open_instruct.objectives.objective import BoundLoss, Objective
from open_instruct.objectives.registry import OBJECTIVES


@dataclass(kw_only=True)
class MadeUpOptim(OptimSection):
    strength: float = flag("of a pull towards the start", 0.0)


@dataclass(kw_only=True)
class MadeUpConfig(TrainingConfig):
    optim: MadeUpOptim


class Triples(RowBuilder):
    documents_per_row = 3


MADE_UP = Objective(
    name="made_up",
    config_class=MadeUpConfig,
    rows=Triples,
    bind=lambda config: BoundLoss(function=None),
    needs_reference=lambda config: config.optim.strength > 0,
    prefix_sharing=lambda config: "auto",
)
OBJECTIVES["made_up"] = ("made_up:MADE_UP", "triples")

if __name__ == "__main__":
    sys.modules["made_up"] = sys.modules["__main__"]
    from open_instruct.cli import main

    sys.exit(main(sys.argv[1:]))
"""
RUN = ["--model_name_or_path", "allenai/OLMo-2-1124-7B", "--gpus_per_node", "8", "--per_device_train_batch_size", "2"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("made_up") / "made_up.py"
    file.write_text(MADE_UP)
    return file


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), "plan", *words]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def planned(program: Path, *words: str) -> Any:
    done = run(program, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_documents_prompts_and_reference_are_counted(program: Path) -> None:
    plain = planned(program, "made_up", *RUN)["workload"]
    assert (plain["algorithm"], plain["tokens_per_microbatch"], plain["documents_per_group"]) == ("made_up", 12288, 3)
    assert plain["reference_pass_tokens"] == 0
    pulled = planned(program, "made_up", *RUN, "--strength", "0.5", "--shared_prompt_tokens", "1025")["workload"]
    # A row of three replies of 1,024 tokens each, and their prompt once.
    assert pulled["tokens_per_microbatch"] == 2 * (1024 + 3 * 1024) == pulled["reference_pass_tokens"]


def test_it_needs_what_a_known_one_of_as_many_tokens_does(program: Path) -> None:
    mine = planned(program, "made_up", *RUN)
    known = planned(program, "dpo", *RUN[:-1], "3", "--loss_type", "simpo")
    assert mine["phases"] == known["phases"] and mine["exchanges"] == known["exchanges"]


def test_it_is_named(program: Path) -> None:
    done = run(program, "made_up", *RUN)
    assert done.stdout.startswith("MADE_UP of allenai/OLMo-2-1124-7B (7.3B parameters) on 1 node of 8 GPUs")
    runs = [*OBJECTIVES, "made_up", "grpo"]
    assert "|".join(runs) in " ".join(run(program, "--help").stdout.split())
    assert f"the first word is {one_of(runs)}" in run(program, "made_down").stderr.replace("\n", " ")

"""An objective that the planner has never heard of is planned from its record alone."""

from dataclasses import dataclass
from typing import Any

import pytest

from open_instruct.cli import main
from open_instruct.commands.plan import parse_request
from open_instruct.config.sections import OptimSection, PrefixSharing, flag
from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import EXIT_INPUT
from open_instruct.core.text import join_choices
from open_instruct.data.row_builder import RowBuilder
from open_instruct.objectives.objective import BoundLoss, LossOutputs, Objective
from open_instruct.objectives.registry import OBJECTIVES
from open_instruct.planning.plan import Plan, make_plan

RUN = ["--model_name_or_path", "allenai/OLMo-2-1124-7B", "--gpus_per_node", "8"]
RUN += ["--activation_checkpointing", "full", "--per_device_train_batch_size", "2"]


@dataclass(kw_only=True)
class MadeUpOptim(OptimSection):
    strength: float = flag("of a pull towards the start", 0.0)


@dataclass(kw_only=True)
class MadeUpConfig(TrainingConfig):
    optim: MadeUpOptim


class Triples(RowBuilder):
    documents_per_row = 3


class MadeUpLoss(BoundLoss):
    def compute(self, *arguments: Any) -> LossOutputs:
        raise AssertionError("a plan computes no loss")


class MadeUp(Objective):
    name = "made_up"
    config_class = MadeUpConfig
    rows = Triples

    def bind(self, config: MadeUpConfig) -> BoundLoss:
        return MadeUpLoss()

    def needs_reference(self, config: MadeUpConfig) -> bool:
        return config.optim.strength > 0

    def prefix_sharing(self, config: MadeUpConfig) -> PrefixSharing:
        return "auto"


MADE_UP = MadeUp()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "made_up", (f"{__name__}:MADE_UP", "triples"))


def planned(*words: str) -> Plan:
    return make_plan(parse_request(words).setting)


def test_new_objective_is_planned_with_documents_prompts_and_reference() -> None:
    plain = planned("made_up", *RUN).workload
    assert (plain.algorithm, plain.tokens_per_microbatch, plain.rows.per_group) == (
        "made_up",
        12288,
        3,
    )
    assert plain.reference_pass_tokens == 0
    pulled = planned(
        "made_up", *RUN, "--strength", "0.5", "--shared_prompt_tokens", "1025"
    ).workload
    # A row of three replies of 1,024 tokens each, and their prompt once.
    assert pulled.tokens_per_microbatch == 2 * (1024 + 3 * 1024) == pulled.reference_pass_tokens


def test_new_objective_needs_what_a_known_one_of_equal_tokens_needs() -> None:
    mine = planned("made_up", *RUN)
    known = planned("dpo", *RUN[:-1], "3", "--loss_type", "simpo")
    assert mine.phases == known.phases and mine.exchanges == known.exchanges


def test_new_objective_is_named_by_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "made_up", *RUN]) == 0
    assert capsys.readouterr().out.startswith(
        "MADE_UP of allenai/OLMo-2-1124-7B (7.3B parameters) on 1 node of 8 GPUs"
    )
    assert main(["plan", "--help"]) == 0
    runs = [*OBJECTIVES, "grpo"]
    assert "made_up" in runs and "|".join(runs) in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "made_down"]) == EXIT_INPUT
    assert f"the first word is {join_choices(runs)}" in " ".join(capsys.readouterr().err.split())

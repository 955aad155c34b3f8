"""Every two flags of memory, sharding, backend, objective and precision go together, or are refused
by a sentence.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest

from open_instruct.core.errors import Kind
from tests.ranks.flag_pairs import (
    REFUSED_BY_MODEL,
    Case,
    Level,
    collect_flags,
    find_num_ranks,
    find_refusal,
    is_refused,
    list_pairs,
    list_runs,
    spell_flags,
)
from tests.ranks.grpo_case import GRPOCase
from tests.ranks.launch import run_ranks
from tests.ranks.objective_rows import write_objective_case
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_prm import write_solutions
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.flag_pairs:run_each"
FAMILIES = {"dense": "qwen3", "experts": "qwen3_moe"}
LAYOUTS = (
    "one",
    "single",
    "sharded",
    "replicas",
    "tensor",
    "context",
    "experts",
    "zero_1",
    "zero_2",
    "zero_3",
)
ROWS_A_STEP = {"batch": 2, "max_train_steps": 2, "dist_timeout_s": 120}
# What refuses them names a flag of the pair, or what of the model is in the way.
USUAL: Case = {"layout": "one", "objective": "sft", "model": "dense"}


class Cases:
    """Rows of every objective, and a small model of each kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._models = {
            kind: write_shallow_model(folder / kind, family=family)
            for kind, family in FAMILIES.items()
        }
        self._grpo = GRPOCase(folder / "grpo")
        self._offline = {
            name: self._write(name)
            for name in ("dpo", "sft", "kto", "reward_model", "prm", "distill")
        }

    def _write(self, objective: str) -> TrainCase:
        folder = self._folder / objective
        if objective != "prm":
            return write_objective_case(folder, objective, family=FAMILIES["dense"])
        folder.mkdir()
        write_solutions(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
        return TrainCase(
            model=self._models["dense"], rows=folder / "rows.jsonl", folder=folder, own_flags={}
        )

    def build(self, case: Case) -> dict[str, Any]:
        """What the job takes: the objective, the words of its command, and where it writes."""
        self._number += 1
        name, objective, model = str(self._number), case["objective"], self._models[case["model"]]
        flags = collect_flags(case)
        if objective == "grpo":
            needed = {
                "model_name_or_path": model,
                "num_learners_per_node": find_num_ranks(case),
                "beta": 0.05,
            }
            words = self._grpo.case(name, flags=needed | flags)["flags"]
            return {"objective": objective, "words": words, "folder": str(self._grpo.folder / name)}
        offline = self._offline[objective]
        own = {"model_name_or_path": model}
        words = offline.command(name, ranks=find_num_ranks(case), **ROWS_A_STEP | own | flags)
        return {"objective": objective, "words": words, "folder": str(offline.folder / name)}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def runs() -> list[Case]:
    return list_runs()


def run(cases: Cases, chosen: list[Case]) -> list[list[str]]:
    """How each ended, on every rank."""
    (num_ranks,) = {find_num_ranks(case) for case in chosen}
    built = [cases.build(case) for case in chosen]
    ended = run_ranks(num_ranks, JOB, cases=built, ports=free_ports(len(built)))
    return [list(of_ranks) for of_ranks in zip(*ended, strict=True)]


def describe(case: Case) -> str:
    return json.dumps(case)


def test_runs_have_every_pair_that_is_not_refused(runs: list[Case]) -> None:
    """But for those of which one level goes with a model that the other refuses."""
    tried = {frozenset(pair) for case in runs for pair in combinations(case.items(), 2)}
    open_pairs = {frozenset(pair) for pair in list_pairs() if not is_refused(*pair)}
    never: set[frozenset[Level]] = {
        frozenset({("layout", "experts"), other})
        for other in (("optimizer", "muon"), ("adapters", "qlora"), ("dtype", "float8"))
    }
    assert open_pairs - tried == never


def test_pairs_that_flags_refuse_are_refused_by_a_sentence_about_them() -> None:
    for pair in list_pairs():
        if (refusal := find_refusal(*sorted(pair))) is None:
            continue
        assert refusal.kind in get_args(Kind) and refusal.kind != "input", pair
        flags = {name for factor, level in pair for name in collect_flags({factor: level})}
        assert any(
            f"--{name}" in str(refusal) or f"--no_{name}" in str(refusal) for name in flags
        ), pair


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_of_flags_takes_two_steps(cases: Cases, runs: list[Case], layout: str) -> None:
    chosen = [case for case in runs if case["layout"] == layout]
    ended = run(cases, chosen)
    failed = {
        describe(case): how for case, how in zip(chosen, ended, strict=True) if set(how) != {"done"}
    }
    assert not failed, "\n\n".join(
        f"{case}\n" + "\n".join(sorted(set(how))) for case, how in failed.items()
    )


@pytest.mark.parametrize(
    "pair",
    sorted(REFUSED_BY_MODEL, key=sorted),
    ids=lambda pair: " ".join(level for _, level in sorted(pair)),
)
def test_pairs_that_a_model_refuses_are_refused_by_a_sentence(
    cases: Cases, pair: frozenset[Level]
) -> None:
    case = USUAL | dict(pair)
    (ended,) = run(cases, [case])
    flags = spell_flags(collect_flags(dict(pair)))
    assert all(how.startswith("refused: ") for how in ended), ended
    assert all(any(word in how for word in flags if word.startswith("--")) for how in ended), ended

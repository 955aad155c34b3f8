"""Tokens go to the experts that they are told, however their rows are cut, shared, recomputed or
split over ranks.
"""

from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase, Rows, RunRanks
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.extended

# With a reference, which chooses its own experts, and log-probs from before the step, which do not.
FLAGS: dict[str, Any] = {"beta": 0.05, "num_mini_batches": 2, "prefix_sharing": "off"}
CUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": ({}, {"one_at_a_time": True}),
    "shared": ({"prefix_sharing": "on"}, {}),
    "recomputed": ({"activation_checkpointing": "full", "pack_length": 48}, {}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "context": {"context_parallel_degree": 2, "prefix_sharing": "on"},
    "experts": {"expert_parallel_degree": 2},
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    case = GRPOCase(tmp_path_factory.mktemp("routes"))
    case.model = write_shallow_model(case.folder / "moe", family="qwen3_moe")
    return case


def job(case: GRPOCase, name: str, flags: dict[str, Any], **more: Any) -> dict:
    return case.case(
        name, flags=FLAGS | flags, **{"completions": [9, 3], "trees": True, "routes": True} | more
    )


@pytest.fixture(scope="module")
def one_process(case: GRPOCase) -> dict[str, Rows]:
    from tests.ranks.launch import run_ranks

    cases = {name: job(case, name, flags, **more) for name, (flags, more) in CUTS.items()}
    cases |= {
        "base": job(case, "base", {}),
        "own choice": job(case, "own choice", {}, routes=False),
    }
    return case.run(run_ranks, 1, cases)


def assert_same(ours: Rows, theirs: Rows) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "kl", "grad_norm", "logprob_diff/mean"):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("cut", CUTS)
def test_cutting_does_not_matter(one_process: dict[str, Rows], cut: str) -> None:
    assert_same(one_process[cut], one_process["base"])


def test_step_differs_when_experts_do(one_process: dict[str, Rows]) -> None:
    base, own = one_process["base"][0], one_process["own choice"][0]
    assert base["grad_norm"] != pytest.approx(own["grad_norm"], rel=1e-3)
    assert base["router/replayed"] > 0.9 and 0.5 < base["router/differing"] < 1
    assert base["kl"] > 1e-6, "the reference has experts of its own choice"


def test_deepspeed(case: GRPOCase, one_process: dict[str, Rows], run_ranks: RunRanks) -> None:
    flags = {"backend": "deepspeed", "activation_checkpointing": "full", "num_learners_per_node": 2}
    cases = {
        f"zero_{stage}": job(case, f"zero_{stage}", flags | {"deepspeed_stage": stage})
        for stage in (1, 3)
    }
    for rows in case.run(
        run_ranks, 2, cases, job="tests.ranks.jobs.deepspeed_grpo:run_each"
    ).values():
        assert_same(rows, one_process["base"])


def test_two_ranks(case: GRPOCase, one_process: dict[str, Rows], run_ranks: RunRanks) -> None:
    cases = {
        name: job(case, name, flags | {"num_learners_per_node": 2})
        for name, flags in LAYOUTS.items()
    }
    for rows in case.run(run_ranks, 2, cases).values():
        assert_same(rows, one_process["base"])

"""The reference policy starts as the policy, follows it where that is asked for, and outlives a
restart.
"""

import json
from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase
from tests.ranks.launch import run_ranks
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.grpo_reference:run_each"
COMPLETIONS = [5, 6, 7, 4]
LAYOUTS: dict[str, dict[str, int]] = {
    "one_process": {"num_learners_per_node": 1},
    "fsdp_2": {"num_learners_per_node": 2},
    "tensor_2": {"num_learners_per_node": 2, "tensor_parallel_degree": 2},
}

Rows = list[dict[str, Any]]


@pytest.fixture(params=LAYOUTS, scope="module")
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def results(layout: str, grpo_case: GRPOCase) -> dict[str, list[Rows]]:
    """By the name of the case, the rows of every rank."""

    def case(name: str, **flags: Any) -> dict[str, Any]:
        settings = {"learning_rate": 1e-2} | flags | LAYOUTS[layout]
        return grpo_case.case(f"{name}_{layout}", completions=COMPLETIONS, flags=settings)

    half = {"beta": 0.05, "ref_policy_update_freq": 2, "alpha": 0.5}
    frozen, moved = case("frozen", beta=0.05), case("moved", **half)
    cases = {
        "no_reference": case("no_reference") | {"completions": COMPLETIONS[:1]},
        "replaced": case("replaced", **half | {"alpha": 1.0}),
        "frozen": case("frozen_undisturbed", beta=0.05),
        "frozen/first": frozen | {"stop_after": 3},
        "frozen/rest": frozen,
        "moved": case("moved_undisturbed", **half),
        "moved/first": moved | {"stop_after": 3},
        "moved/rest": moved,
    }
    num_ranks = LAYOUTS[layout]["num_learners_per_node"]
    of_ranks = run_ranks(num_ranks, JOB, cases=list(cases.values()), ports=free_ports(len(cases)))
    return {name: [rows[index] for rows in of_ranks] for index, name in enumerate(cases)}


def test_first_step_does_not_feel_the_reference(results: dict[str, list[Rows]]) -> None:
    for with_reference, without in zip(results["frozen"], results["no_reference"], strict=True):
        assert with_reference[0]["kl"] == pytest.approx(0, abs=1e-6)
        for name in ("loss", "policy_loss", "grad_norm"):
            assert with_reference[0][name] == pytest.approx(without[0][name], rel=1e-5)
        assert with_reference[1]["kl"] > 1e-4
        assert all(row["reference_is_start"] for row in with_reference)


def test_full_update_makes_the_reference_the_policy(results: dict[str, list[Rows]]) -> None:
    for rows in results["replaced"]:
        assert [row["reference"] == row["policy"] for row in rows] == [False, True, False, True]
        assert rows[0]["reference_is_start"] and rows[2]["reference"] == rows[1]["reference"]
        # The policy is its own reference again.
        assert (
            rows[1]["kl"] > 1e-4
            and rows[2]["kl"] == pytest.approx(0, abs=1e-6)
            and rows[3]["kl"] > 1e-4
        )


@pytest.mark.parametrize("kind", ["frozen", "moved"])
def test_resumed_run_is_bitwise_the_undisturbed_one(
    results: dict[str, list[Rows]], kind: str
) -> None:
    for undisturbed, first, rest in zip(
        results[kind], results[f"{kind}/first"], results[f"{kind}/rest"], strict=True
    ):
        assert [row["step"] for row in rest] == [4]
        assert first + rest == undisturbed
        assert undisturbed[-1]["reference_is_start"] == (kind == "frozen")
        assert undisturbed[-1]["reference"] != undisturbed[-1]["policy"]


def test_only_a_reference_that_moves_is_stored(
    results: dict[str, list[Rows]], layout: str, grpo_case: GRPOCase
) -> None:
    for kind in ("frozen", "moved"):
        index = json.loads(
            (grpo_case.folder / f"{kind}_{layout}" / "step3" / "index.json").read_text()
        )
        names = index["tensors"]
        assert any(name.startswith("reference.") for name in names) == (kind == "moved")

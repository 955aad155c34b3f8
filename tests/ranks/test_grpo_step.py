"""What a GRPO step learns does not depend on how its completions are cut or how the model is
sharded.
"""

from functools import partial
from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase, Rows, RunRanks, is_computed

pytestmark = pytest.mark.extended

# The settings under which layouts are compared: a reference policy, and engines that disagree.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"beta": 0.05, "kl_estimator": 2, "record_entropy": True},
    "minibatches": {
        "beta": 0.05,
        "num_mini_batches": 2,
        "num_epochs": 2,
        "loss_fn": "grpo",
        "clip_higher": 0.001,
    },
}
CORRECTED = {"rho_correction": "sequence_mask", "rho_cap": 1.3}
OTHER_LOSSES: dict[str, dict[str, Any]] = {
    "cispo": CORRECTED,
    "dr_grpo": CORRECTED,
    "gspo": CORRECTED,
    # Of sequences, and of tokens that are chosen among those of all ranks, once the weights have
    # moved.
    "gmpo": {"num_epochs": 2, "clip_lower": 0.001, "clip_higher": 0.001},
    "clip_cov": {
        "num_epochs": 2,
        "cov_fraction": 0.2,
        "clip_cov_lower": 0.0,
        "clip_cov_upper": 9.0,
    },
    "kl_cov": {"num_epochs": 2, "cov_fraction": 0.2},
}
SHARDED_LOSSES = ("gmpo", "clip_cov", "kl_cov")
# Completions of some groups begin with the same tokens, each with advantages of its own.
TREES = {"trees": True}


def data_of(way: str) -> dict[str, bool]:
    return TREES if way == "plain" else {}


@pytest.fixture(scope="module")
def one_process(grpo_case: GRPOCase) -> dict[str, Rows]:
    """Runs of one process: those that every layout must follow, and other ways to cut and to
    lose.
    """
    from tests.ranks.launch import run_ranks

    # Nothing shared here; by default all others share what pays.
    unshared = {"prefix_sharing": "off"}
    cases = {
        way: grpo_case.case(way, flags=flags | unshared, **data_of(way))
        for way, flags in WAYS.items()
    }
    for way, flags in WAYS.items():
        case = partial(grpo_case.case, **data_of(way))
        cases[f"{way}/shared"] = case(f"{way}_shared", flags=flags | {"prefix_sharing": "on"})
        cases[f"{way}/single"] = case(f"{way}_single", flags=flags, one_at_a_time=True)
        cases[f"{way}/accumulated"] = case(f"{way}_accumulated", flags=flags | {"pack_length": 48})
        cases[f"{way}/chunked"] = case(f"{way}_chunked", flags=flags, logits_per_chunk=5)
    cases["constant"] = grpo_case.case("constant", flags={"loss_denominator": 24}, completions=[6])
    cases["tokens"] = grpo_case.case("tokens", flags={}, completions=[6])
    cases["single_device"] = grpo_case.case(
        "single_device", flags=WAYS["plain"] | {"single_gpu_mode": True}, **TREES
    )
    cases["nothing"] = grpo_case.case("nothing", flags=WAYS["plain"], completions=[6, 0, 6])
    return grpo_case.run(run_ranks, 1, cases)


@pytest.fixture(scope="module")
def other_losses(grpo_case: GRPOCase) -> dict[str, Rows]:
    """Runs of one process, by loss, and `ratio` by the clipped ratio alone."""
    from tests.ranks.launch import run_ranks

    cases = {}
    for loss_fn, flags in OTHER_LOSSES.items():
        case = partial(grpo_case.case, flags=flags | {"loss_fn": loss_fn}, completions=[6, 6])
        cases[loss_fn] = case(loss_fn)
        cases[f"{loss_fn}/single"] = case(f"{loss_fn}_single", one_at_a_time=True)
    cases["ratio"] = grpo_case.case("ratio", flags={"num_epochs": 2}, completions=[6, 6])
    return grpo_case.run(run_ranks, 1, cases)


def assert_same_trajectory(ours: Rows, theirs: Rows, *, rel: float = 1e-5) -> None:
    assert len(ours) == len(theirs)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert a.keys() == b.keys()
        for name in ("loss", "policy_loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=rel, abs=1e-7), f"{name} of step {step}"
        for name in filter(is_computed, a.keys() - {"padding_fraction", "shared_fraction"}):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), f"{name} of step {step}"


def test_steps_move_the_weights(one_process: dict[str, Rows]) -> None:
    for way in WAYS:
        rows = one_process[way]
        assert all(
            row["has_moved"] and row["grad_norm"] > 1e-3 and abs(row["loss"]) > 1e-4 for row in rows
        )
        assert all(row["rho/corrected_fraction"] > 0.01 for row in rows)
    assert any(row["clip_fraction"] > 0.01 for row in one_process["minibatches"])
    assert all(row["kl"] > 0 for row in one_process["plain"][1:])
    for way in WAYS:
        assert all(row["shared_fraction"] == 0 for row in one_process[way])
        assert all(row["shared_fraction"] > 0.02 for row in one_process[f"{way}/shared"])


def test_metrics_of_a_step(one_process: dict[str, Rows]) -> None:
    first = one_process["plain"][0]
    assert first.keys() > {
        *(
            "loss",
            "policy_loss",
            "kl",
            "clip_fraction",
            "entropy",
            "padding_fraction",
            "grad_norm",
            "lr",
        ),
        *("rho/mean", "rho/max", "rho/corrected_fraction", "rho/hist_0.95_to_1.05"),
        *("logprob_diff/mean", "logprob_diff/max"),
    }
    # The policy is its own reference and its own old policy before the first update.
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert first["clip_fraction"] == 0
    assert first["rho/max"] > first["rho/mean"] > 0
    assert first["logprob_diff/max"] > first["logprob_diff/mean"] > 0
    histogram = [value for name, value in first.items() if name.startswith("rho/hist_")]
    assert len(histogram) == 7 and sum(histogram) == pytest.approx(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", ["single", "shared", "accumulated", "chunked"])
def test_cutting_does_not_matter(one_process: dict[str, Rows], way: str, cut: str) -> None:
    assert_same_trajectory(one_process[f"{way}/{cut}"], one_process[way])


@pytest.mark.parametrize("loss_fn", OTHER_LOSSES)
def test_cutting_does_not_matter_to_other_losses(
    other_losses: dict[str, Rows], loss_fn: str
) -> None:
    assert_same_trajectory(other_losses[f"{loss_fn}/single"], other_losses[loss_fn])


def test_two_ranks_learn_by_other_losses(
    grpo_case: GRPOCase, other_losses: dict[str, Rows], run_ranks: RunRanks
) -> None:
    cases = {
        loss_fn: grpo_case.case(
            f"{loss_fn}_fsdp_2",
            flags=OTHER_LOSSES[loss_fn] | {"loss_fn": loss_fn, "num_learners_per_node": 2},
            completions=[6, 6],
        )
        for loss_fn in SHARDED_LOSSES
    }
    for loss_fn, rows in grpo_case.run(run_ranks, 2, cases).items():
        assert_same_trajectory(rows, other_losses[loss_fn])
        # What the loss has beside a clipped ratio is at work, where the weights have moved since
        # the rollout.
        assert rows[-1]["grad_norm"] != pytest.approx(
            other_losses["ratio"][-1]["grad_norm"], rel=1e-4
        ), loss_fn


def test_single_device_mode(one_process: dict[str, Rows]) -> None:
    assert_same_trajectory(one_process["single_device"], one_process["plain"])


def test_constant_denominator_only_scales(one_process: dict[str, Rows]) -> None:
    (constant,), (tokens,) = one_process["constant"], one_process["tokens"]
    for name in ("loss", "grad_norm"):
        assert constant[name] * 6 * 24 == pytest.approx(
            tokens[name] * tokens["num_labels"], rel=1e-5
        )


def test_step_with_nothing_to_learn_from_changes_nothing(one_process: dict[str, Rows]) -> None:
    before, empty, after = one_process["nothing"]
    assert before["has_moved"] and after["has_moved"] and not empty["has_moved"]
    assert empty["loss"] == empty["grad_norm"] == 0
    assert "rho/max" not in empty and "logprob_diff/max" not in empty


def test_two_ranks(grpo_case: GRPOCase, one_process: dict[str, Rows], run_ranks: RunRanks) -> None:
    tensor = {"tensor_parallel_degree": 2}
    check_layouts(
        2,
        [
            ("plain", "fsdp_2", {}, {}),
            ("minibatches", "fsdp_2", {}, {}),
            ("plain", "tensor_2", tensor, {}),
            ("plain", "context_2", {"context_parallel_degree": 2}, {}),
            ("minibatches", "context_2", {"sequence_parallel_size": 2}, {"logits_per_chunk": 5}),
            # Every rank has its own part of the positions, and cuts it into chunks too.
            ("minibatches", "tensor_2_chunked", tensor, {"logits_per_chunk": 5}),
        ],
        grpo_case,
        one_process,
        run_ranks,
    )


def test_four_ranks(grpo_case: GRPOCase, one_process: dict[str, Rows], run_ranks: RunRanks) -> None:
    layouts = [
        ("plain", "fsdp_4", {}, {}),
        (
            "plain",
            "context_2_replicas_2",
            {"context_parallel_degree": 2, "fsdp_shard_degree": 1},
            {},
        ),
    ]
    check_layouts(4, layouts, grpo_case, one_process, run_ranks)


def check_layouts(
    num_ranks: int,
    layouts: list[tuple[str, str, dict[str, Any], dict[str, Any]]],
    grpo_case: GRPOCase,
    one_process: dict[str, Rows],
    run_ranks: RunRanks,
) -> None:
    """Run (way, name, flags of the layout, arguments of the job), and compare each with its way in
    one process.
    """
    cases = {
        (way, name): grpo_case.case(
            f"{way}_{name}",
            flags=WAYS[way] | degrees | {"num_learners_per_node": num_ranks},
            **data_of(way),
            **job,
        )
        for way, name, degrees, job in layouts
    }
    for (way, _), rows in grpo_case.run(run_ranks, num_ranks, cases).items():
        assert_same_trajectory(rows, one_process[way])

"""When a run warns of a slow process, or of a loss or a gradient that grows, and when not."""

import logging
import math
import random
from pathlib import Path

import pytest

from open_instruct.parallel.processes import find_cpu_host
from open_instruct.run.alarms import (
    GROWTH_WINDOW,
    GrowthWatch,
    SlownessWatch,
    find_slowest,
    find_slowest_loader,
)
from open_instruct.run.metrics_log import MetricsLog

Paces = list[float | None]


def warnings_of_paces(what: str, token_s: Paces, *, before: Paces | None = None) -> list[str]:
    """Those of the second of two comparisons."""
    watch = SlownessWatch()
    assert watch.after_step(find_slowest(what, token_s if before is None else before)) == []
    return watch.after_step(find_slowest(what, token_s))


@pytest.mark.parametrize(
    ("what", "token_s", "words"),
    [
        (
            "learner",
            [0.004, 0.004, 0.012, 0.005],
            "learner-2 takes 3.0 times as long as the other learners for a token (12 ms, their "
            "median 4)",
        ),
        (
            "engine",
            [0.01, 0.031],
            "engine-1 takes 3.1 times as long as the other engines for a token (31 ms, their "
            "median 10)",
        ),
    ],
)
def test_slow_process_is_named_with_figures_and_a_remedy(
    what: str, token_s: Paces, words: str
) -> None:
    (warning,) = warnings_of_paces(what, token_s)
    assert warning.startswith(words)
    assert "nvidia-smi" in warning and "leave that node out" in warning


@pytest.mark.parametrize(
    "token_s", [[0.01], [None, 0.01], [None, None], [0.01, 0.014], [0.01, 0.011, 0.009, 0.0145], []]
)
def test_processes_that_are_alike_or_unknown_lead_to_no_warning(token_s: Paces) -> None:
    assert warnings_of_paces("learner", token_s) == []


def test_processes_that_share_the_cores_of_a_host_are_not_compared() -> None:
    """Which of them waits for a core is chance; a host may still be slower than another."""
    paces: Paces = [0.001, 0.0041, None, 0.002]
    assert find_slowest("learner", paces, ["laptop"] * 4) == {}
    assert find_slowest(
        "learner", [0.01, 0.002, 0.003, 0.007, 0.006], ["a", "a", "a", "b", "b"]
    ) == {
        "slowest_learner": 4.0,
        "slowest_learner/times": pytest.approx(3.0),
        "learners/token_s": 0.002,
    }
    assert find_slowest("learner", paces, [None] * 4) == find_slowest("learner", paces) != {}
    assert find_cpu_host("cpu") and find_cpu_host("cuda") is None


def test_two_comparisons_in_a_row_must_find_a_slow_process() -> None:
    assert warnings_of_paces("learner", [0.01, 0.03], before=[0.01, 0.01]) == []
    # The ranks of a slow node take turns as the slowest.
    (warning,) = warnings_of_paces(
        "learner", [0.01, 0.01, 0.01, 0.031, 0.03], before=[0.01, 0.01, 0.01, 0.03, 0.031]
    )
    assert warning.startswith("learner-3 takes 3.1 times")


def test_learner_that_alone_waits_for_rows_leads_to_one_warning() -> None:
    watch = SlownessWatch()
    all_wait, one_waits = [0.5, 0.6, 0.55], [0.02, 0.01, 0.45]
    assert [watch.after_step(find_slowest_loader(shares)) for shares in (all_wait, one_waits)] == [
        [],
        [],
    ]
    (warning,) = watch.after_step(find_slowest_loader(one_waits))
    assert warning.startswith(
        "learner-2 waits for its own rows for 45% of its time (the others' median is 2%)"
    )
    assert watch.after_step(find_slowest_loader(one_waits)) == []
    assert find_slowest_loader([0.9]) == {}


def test_each_kind_of_slow_process_leads_to_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", warn=warnings.append)
    for step in range(1, 41):
        row = find_slowest("learner", [0.01, 0.03]) if step % 10 == 0 else {}
        log.write(
            {"step": step, "loss": 0.5}
            | row
            | (find_slowest("engine", [0.2, 0.1]) if step in (25, 30) else {})
        )
    assert [line.split(" takes")[0] for line in warnings] == [
        "after step 20 learner-1",
        "after step 30 engine-0",
    ]
    assert log.rows()[9]["slowest_learner"] == 1.0 and log.rows()[9][
        "slowest_learner/times"
    ] == pytest.approx(3)


def test_warning_goes_to_the_log_where_nobody_else_listens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        for step in (10, 20):
            log.write({"step": step, "loss": 0.5} | find_slowest("learner", [0.01, 0.05]))
    assert "after step 20 learner-1 takes 5.0 times" in caplog.text


def warnings_of_growth(losses: list[float], norms: list[float]) -> list[str]:
    watch = GrowthWatch()
    rows = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms, strict=True)]
    return [warning for row in rows if (warning := watch.after_step(row)) is not None]


GROWING_STEPS = range(GROWTH_WINDOW, 5 * GROWTH_WINDOW)


@pytest.mark.parametrize(
    ("losses", "norms", "words"),
    [
        (
            [0.69] * 60,
            [0.5 * 1.12**step for step in range(60)],
            "the norm of the gradient has grown from ",
        ),
        ([2.0 + 0.3 * step for step in range(60)], [1.0] * 60, "the loss has grown from 4.25 to "),
        (
            [1.0] * GROWTH_WINDOW + [math.exp(step) for step in GROWING_STEPS],
            [1.0] * GROWTH_WINDOW + [99.0] * len(GROWING_STEPS),
            "the loss has grown",
        ),
    ],
    ids=["gradient", "loss", "both"],
)
def test_growth_leads_to_one_warning(losses: list[float], norms: list[float], words: str) -> None:
    (warning,) = warnings_of_growth(losses, norms)
    assert warning.startswith(words) and "--learning_rate" in warning


@pytest.mark.parametrize("seed", range(5))
def test_usual_trainings_raise_no_alarm_of_growth(seed: int) -> None:
    draw = random.Random(seed)
    steps = range(300)
    falling = [2.5 * math.exp(-step / 60) + draw.uniform(-0.3, 0.3) for step in steps]
    around_zero = [draw.gauss(0, 0.05) for _ in steps]
    spiky = [draw.lognormvariate(0, 1) * (100 if draw.random() < 0.05 else 1) for _ in steps]
    slowly_larger = [0.4 * (1 + step / 50) for step in steps]
    for losses in (falling, around_zero):
        for norms in (spiky, slowly_larger):
            assert warnings_of_growth(losses, norms) == []


def test_step_that_was_left_out_counts_for_nothing() -> None:
    watch = GrowthWatch()
    rows = [
        {"loss": 1.0, "grad_norm": None},
        {"loss": math.nan, "grad_norm": math.inf},
        {"step": 3},
    ]
    assert [watch.after_step(row) for row in rows * 20] == [None] * 60


def test_run_that_goes_on_knows_how_it_began_and_warns_no_second_time(tmp_path: Path) -> None:
    def write(steps: range) -> list[str]:
        warnings: list[str] = []
        log = MetricsLog(tmp_path / "metrics.jsonl", warn=warnings.append)
        log.keep_until(steps.start - 1)
        for step in steps:
            log.write(
                {"step": step, "loss": 1.0, "grad_norm": 1.0 if step <= GROWTH_WINDOW else 50.0}
            )
        return warnings

    assert write(range(1, GROWTH_WINDOW + 2)) == []
    (warning,) = write(range(GROWTH_WINDOW + 2, 3 * GROWTH_WINDOW))
    assert warning.startswith(
        f"after step {2 * GROWTH_WINDOW} the norm of the gradient has grown from 1 to 50 "
    )
    assert write(range(3 * GROWTH_WINDOW, 4 * GROWTH_WINDOW)) == []

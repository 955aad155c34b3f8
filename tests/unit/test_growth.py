"""When a loss or a gradient is said to grow without bound, and when not."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from open_instruct.run.growth import WINDOW, GrowthWatch
from open_instruct.run.metrics_log import MetricsLog


def warnings_of(losses: list[float], norms: list[float]) -> list[str]:
    watch = GrowthWatch()
    told = [watch.after_step({"loss": loss, "grad_norm": norm}) for loss, norm in zip(losses, norms, strict=True)]
    return [each for each in told if each is not None]


def test_a_gradient_that_grows_is_told_of_once() -> None:
    steps = 60
    (told,) = warnings_of([0.69] * steps, [0.5 * 1.12**step for step in range(steps)])
    assert told.startswith("the norm of the gradient has grown from ") and "--learning_rate" in told


def test_a_loss_that_grows_is_told_of_once() -> None:
    (told,) = warnings_of([2.0 + 0.3 * step for step in range(60)], [1.0] * 60)
    assert told.startswith("the loss has grown from 4.25 to ")


def test_both_at_once_are_one_warning() -> None:
    steps = range(WINDOW, 5 * WINDOW)
    (told,) = warnings_of([1.0] * WINDOW + [math.exp(step) for step in steps], [1.0] * WINDOW + [99.0] * len(steps))
    assert "the loss has grown" in told or "gradient has grown" in told


@pytest.mark.parametrize("seed", range(5))
def test_what_trainings_do_is_no_growth(seed: int) -> None:
    draw = random.Random(seed)
    steps = range(300)
    falling = [2.5 * math.exp(-step / 60) + draw.uniform(-0.3, 0.3) for step in steps]
    around_zero = [draw.gauss(0, 0.05) for _ in steps]
    spiky = [draw.lognormvariate(0, 1) * (100 if draw.random() < 0.05 else 1) for _ in steps]
    slowly_larger = [0.4 * (1 + step / 50) for step in steps]
    for losses in (falling, around_zero):
        for norms in (spiky, slowly_larger):
            assert warnings_of(losses, norms) == []


def test_a_step_that_was_left_out_counts_for_nothing() -> None:
    watch = GrowthWatch()
    rows = [{"loss": 1.0, "grad_norm": None}, {"loss": math.nan, "grad_norm": math.inf}, {"step": 3}]
    assert [watch.after_step(row) for row in rows * 20] == [None] * 60


def test_a_run_that_goes_on_knows_how_it_began_and_warns_no_second_time(tmp_path: Path) -> None:
    def write(steps: range) -> list[str]:
        warned: list[str] = []
        log = MetricsLog(tmp_path / "metrics.jsonl", warn=warned.append)
        log.keep_until(steps.start - 1)
        for step in steps:
            log.write({"step": step, "loss": 1.0, "grad_norm": 1.0 if step <= WINDOW else 50.0})
        return warned

    assert write(range(1, WINDOW + 2)) == []
    (told,) = write(range(WINDOW + 2, 3 * WINDOW))
    assert told.startswith(f"after step {2 * WINDOW} the norm of the gradient has grown from 1 to 50 ")
    assert write(range(3 * WINDOW, 4 * WINDOW)) == []
